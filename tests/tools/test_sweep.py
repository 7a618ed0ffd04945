"""Seeds and grids: what runs and where it goes, that the same command continues, and the lines about all runs."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coterie.cli.main import main
from coterie.config import Config
from coterie.errors import ConfigError
from coterie.runs import checkpoint, starting
from coterie.tools.job import Job
from coterie.tools.sweep import parse_grid, parse_seeds, plan_runs, progress, run_jobs
from tests.conftest import made_by
from tests.support.commands import Command
from tests.support.outputs import outputs
from tests.support.waiting import wait_until

TRAIN = ("train", "ppo", "--env", "CartPole-v1", "--log.tensorboard", "False")


def test_seeds_run_in_parallel_on_separate_cores_and_once(tmp_path, capsys, monkeypatch):
    given: dict[int, list[int]] = {}
    really = os.sched_setaffinity
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: (given.update({pid: cores}), really(pid, cores)))
    options = (*TRAIN, "--steps", "500", "--out", str(tmp_path / "run"), "--seeds", "4..5", "--jobs", "2")
    assert main(list(options)) == 0
    lines = capsys.readouterr().out.splitlines()  # on a busy machine also progress
    assert sorted(line.split(":")[0] for line in lines if " running" not in line) == ["seed 4", "seed 5"]
    here = sorted(os.sched_getaffinity(0))
    assert list(given.values()) == [here[k::2] or [here[k % len(here)]] for k in range(2)]
    paths = [tmp_path / f"run-seed{s}" / "summary.json" for s in (4, 5)]
    assert len({json.loads(path.read_text())["digest"] for path in paths}) == 2
    before = [path.stat().st_mtime_ns for path in paths]
    assert main([*options[:-3], "4..5", "--jobs", "1"]) == 0  # nothing is left to do
    assert capsys.readouterr().out.count("(already done)") == 2
    assert [path.stat().st_mtime_ns for path in paths] == before
    assert main([*options, "--optim.lr", "0.5"]) == 2
    assert "was begun with other options" in capsys.readouterr().err


def test_runs_of_a_sweep_that_is_killed_stop_with_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sweep = Command([*TRAIN, "--steps", "10_000_000", "--out", str(tmp_path / "run"), "--seeds", "0..1"], tmp_path)
    metrics = tmp_path / "run-seed0" / "metrics.jsonl"
    with closing(sweep):
        sweep.until(lambda: metrics.exists() and metrics.stat().st_size > 0, "it trains")
        sweep.process.kill()
        sweep.process.wait()
        wait_until(lambda: not sweep.processes(), what="its run ends")
        assert checkpoint.latest(tmp_path / "run-seed0" / "checkpoints") is not None


def test_a_grid_has_every_combination(tmp_path):
    config = Config(preset="ppo", out=str(tmp_path / "g"))
    points = parse_grid(["optim.lr=1e-3,3e-4", "algo.gamma=0.9,0.99"])
    assert points[1] == {"optim.lr": "1e-3", "algo.gamma": "0.99"}
    jobs = plan_runs(["ppo"], config, [0, 1], points)
    assert len({job.folder for job in jobs}) == 8
    assert plan_runs([], replace(config, out=f"{config.out}/"), [0, 1], points)[3].folder == jobs[3].folder
    assert jobs[3].folder.name == "g-lr-1e-3-gamma-0.99-seed1"
    assert jobs[3].args == ("ppo", "--optim.lr", "1e-3", "--algo.gamma", "0.99", "--seed", "1")
    assert plan_runs(["ppo", "--out", "x", "--out=y"], config, [0], [{}])[0].args == ("ppo", "--seed", "0")
    assert parse_grid([]) == [{}]
    negative = plan_runs(["gala-ppo"], config, [0], parse_grid(["gossip.tau=-1,1"]))
    assert [job.folder.name for job in negative] == ["g-tau--1-seed0", "g-tau-1-seed0"]
    lists = parse_grid(["model.hidden=[64,64],[32],16 16"])
    assert [point["model.hidden"] for point in lists] == ["[64,64]", "[32]", "16 16"]
    objects = parse_grid(['env.kwargs={"a": {"b": 1, "c": 2}, "d": 3},{}'])
    assert [point["env.kwargs"] for point in objects] == ['{"a": {"b": 1, "c": 2}, "d": 3}', "{}"]
    with pytest.raises(ConfigError, match=r"--seeds: 3 is one seed: --seed 3, or 0\.\.2 for three"):
        parse_seeds("3")
    for bad in ("seed=1,2", "out=a,b", "optim.lr=1,1.0", "model.core=,lstm", "algo.gamma=1,,0.9", "algo.gamma=1,"):
        with pytest.raises(ConfigError, match="--grid"):
            parse_grid([bad])
    with pytest.raises(ConfigError, match="given twice"):
        parse_grid(["env.num-envs=1", "env.num_envs=2"])
    assert main([*TRAIN, "--seed", "5", "--seeds", "0..1"]) == 2


@pytest.fixture
def sweep(tmp_path):
    """Starts sweeps of runs tmp_path/run-seed0, ...; those that still run are killed after the test."""
    yield from made_by(
        lambda name, *args: Command([*TRAIN, *args, "--out", str(tmp_path / "run")], tmp_path / name), Command.close
    )


def summary_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


@pytest.mark.slow
def test_a_stopped_sweep_continues(tmp_path, sweep):
    options = ("--steps", "30000", "--log.every", "0.2", "--seeds", "0..1")
    first = sweep("first", *options)
    first.until(lambda: len(first.lines(tmp_path / "run-seed0")) > 2, "seed 0 trains")
    first.end(signal.SIGINT, 75)
    assert 0 < summary_of(tmp_path / "run-seed0")["env_steps"] < 30_000
    sweep("second", *options).end()
    text = (tmp_path / "run-seed0.txt").read_text()
    assert re.search(r"interrupted.*finished", text, re.S), "the resumed run appends to its output"
    assert [summary_of(tmp_path / f"run-seed{k}")["status"] for k in (0, 1)] == ["finished"] * 2


def test_a_stopped_sweep_has_its_exit_code_although_ctrl_c_has_ended_tee_too(tmp_path, monkeypatch):
    def start(job: Job, cores: list[int]) -> subprocess.Popen[bytes]:
        os.kill(os.getpid(), signal.SIGINT)
        return subprocess.Popen(["sleep", "60"])

    read, write = os.pipe()
    os.close(read)
    monkeypatch.setattr(Job, "start", start)
    monkeypatch.setattr(sys, "stdout", open(write, "w"))  # noqa: SIM115
    assert run_jobs([Job("a", TRAIN[1:], tmp_path / "run")], 1, "runs/x") == 75
    with pytest.raises(BrokenPipeError):
        sys.stdout.close()


def test_a_sweep_without_a_folder_says_how_it_continues(tmp_path, monkeypatch, capsys):
    """And leaves the notes of runs that have begun as they are: a full disk would leave empty ones."""
    monkeypatch.chdir(tmp_path)
    stop = lambda *_: os.kill(os.getpid(), signal.SIGINT) or subprocess.Popen(["sleep", "60"])  # noqa: E731
    with monkeypatch.context() as stopped:
        stopped.setattr(Job, "start", stop)
        assert main([*TRAIN, "--seeds", "0..1"]) == 75
    said = re.search(r"^stopped; the same command continues with --out (\S+)$", capsys.readouterr().out, re.M)
    job = Job("a", TRAIN[1:], tmp_path / said[1])
    job.folder.parent.mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(Job, "_command", lambda self, resumed: ["true"])
    job.start([0]).wait()
    job.folder.mkdir()
    before = (note := job.beside(".args.json")).stat().st_mtime_ns
    for _ in range(2):
        (job.folder / "config.json").write_text("{}")
        job.start([0]).wait()
    assert note.stat().st_mtime_ns == before
    (job.folder / "config.json").write_text("{}")
    note.write_text(json.dumps(["--out", "elsewhere", *job.args]))  # of an earlier version
    assert job._begun()


def fail(reason):
    raise ConfigError(reason)


def test_jobs_go_on_although_nobody_reads_what_the_sweep_prints(tmp_path, monkeypatch):
    write, read = outputs("full pipe")
    monkeypatch.setattr(starting, "_LEAVE_S", 1.0)
    monkeypatch.setattr(Job, "_command", lambda self, resumed: [sys.executable, "-c", "print('it ran')"])
    monkeypatch.setattr(sys, "stdout", file := open(write, "w"))  # noqa: SIM115
    jobs = [Job(name, TRAIN[1:], tmp_path / name) for name in "ab"]
    really = Job.start
    monkeypatch.setattr(Job, "start", lambda self, cores: really(self, cores) if self in jobs else fail("no disk"))
    with pytest.raises(ConfigError, match="no disk"):
        run_jobs([*jobs, Job("c", TRAIN[1:], tmp_path / "c")], 1)
    assert sys.stdout.name == os.devnull
    assert [job.beside(".txt").read_text() for job in jobs] == ["it ran\n"] * 2
    os.close(read)
    sys.stdout.close()  # in place of the file
    with pytest.raises(BrokenPipeError):
        file.close()


def test_a_running_job_keeps_its_output(tmp_path):
    job = Job("a", TRAIN[1:], tmp_path / "run")
    job.beside(".txt").write_bytes(b"30 of 40 env steps\nnot UTF-8: \xff\n")
    with job.beside(".args.json").open("w") as note:
        fcntl.flock(note, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="is being trained by another process"):
            job.start([0])
    assert job.outcome() == "not UTF-8: \ufffd"


def test_a_run_that_fails_says_why_though_an_earlier_life_has_left_a_summary(tmp_path):
    job = recorded(tmp_path / "run")
    job.beside(".txt").write_text("20 of 40 env steps\ncoterie: the disk is full\n")
    (job.folder / "summary.json").write_text('{"status": "finished", "mean_return": 1.5, "env_steps": 20}')
    assert job.outcome(1) == "coterie: the disk is full"
    assert job.outcome() == job.outcome(75) == "finished, mean return 1.5, 20 env steps"


def test_a_sweep_with_another_config_file_is_another_sweep(tmp_path, monkeypatch):
    monkeypatch.setattr(Job, "_command", lambda self, resumed: [sys.executable, "-c", ""])
    file = tmp_path / "cartpole.toml"
    for words in ((str(file), "--seed", "1"), (f"--config={file}",)):
        file.write_text("steps = 500")
        job = Job("a", words, tmp_path / f"run{len(words)}")
        assert run_jobs([job], 1) == 0
        job.folder.mkdir()
        (job.folder / "config.json").write_text("{}")
        assert not job.done()  # nothing was trained
        file.write_text("steps = 900")
        with pytest.raises(ConfigError, match=r"was begun with a different config file \([^{]*\); name"):
            job.done()
        job.beside(".args.json").write_text(json.dumps(words))  # as earlier versions did
        assert not job.done()


def test_a_warning_is_passed_on_to_the_runs_that_wait_for_it(tmp_path, monkeypatch):
    code = """if True:
        import os, signal, sys, time
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN  # it does not end a run that has not begun
        signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
        os.kill(os.getppid(), signal.SIGUSR1)
        time.sleep(60)
    """
    monkeypatch.setattr(Job, "_command", lambda self, resumed: [sys.executable, "-c", code])
    assert run_jobs([Job("a", (), tmp_path / "run")], 1) == 75


@pytest.mark.slow
def test_a_second_sweep_of_running_runs_is_refused(tmp_path, sweep):
    options = ("--steps", "100000000", "--seeds", "0..0")
    first = sweep("first", *options)
    first.until((tmp_path / "run-seed0/config.json").exists, "seed 0 begins")
    second = sweep("second", *options)
    second.end(code=2)
    assert "is being trained by another process" in second.text()
    first.end(signal.SIGINT, 75)
    assert summary_of(tmp_path / "run-seed0")["status"] == "interrupted"


@pytest.mark.slow
def test_a_sweep_leaves_other_files_alone(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    mine = folder / "notes.txt"
    mine.write_text("mine")
    assert run_jobs([Job("a", (*TRAIN[1:], "--steps", "500"), folder)], 1) == 0  # a folder without a run is accepted
    shutil.rmtree(folder / "checkpoints")  # as if it had been killed at once: it starts again
    (folder / "summary.json").unlink()
    assert run_jobs([Job("a", (*TRAIN[1:], "--steps", "500"), folder)], 1) == 0
    assert mine.read_text() == "mine"
    (folder / "summary.json").unlink()  # killed between its last checkpoint and its summary: it is finished
    assert run_jobs([Job("a", (*TRAIN[1:], "--steps", "500"), folder)], 1) == 0
    (tmp_path / "run.args.json").unlink()
    with pytest.raises(ConfigError, match="did not begin"):
        run_jobs([Job("a", (*TRAIN[1:], "--steps", "500"), folder)], 1)
    assert (folder / "config.json").exists()


def recorded(folder: Path, *lines: dict[str, Any], rest: str = "") -> Job:
    """A job whose run has these lines of metrics; `rest`: what follows them in the file."""
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + rest)
    return Job(folder.name, (), folder)


def line(steps: int, rate: float | None) -> dict[str, Any]:
    return {"env_steps": steps, "seconds": 1.0, "env_steps_per_s": rate}


def test_progress_adds_the_env_steps_and_rates_of_all_runs(tmp_path):
    """A run without a readable rate adds none, and does not hide the others."""
    score = {"env_steps": 9_000, "seconds": 1.0, "eval/return": 1.0}  # an evaluation's line has no rate
    jobs = [
        recorded(tmp_path / "unreadable", line(1, 1.0), rest="{}\n" + json.dumps(line(2, 2.0)) + "\n"),
        recorded(tmp_path / "evaluated", line(100, 1e6), line(200, 20.0), score),
        recorded(tmp_path / "in an evaluation", line(50, 4.0), line(60, 0.0)),
        recorded(tmp_path / "in-the-middle-of-a-line", line(3_000, 300.0), rest='{"env_steps": 4000, "env_st'),
        recorded(tmp_path / "first", line(10_000, None)),  # no time has passed
        recorded(tmp_path / "empty"),
        Job("not begun", (), tmp_path / "not-begun"),
    ]
    assert progress(jobs, 0, 6) == "0 of 6 done, 7 running: 13,260 env steps so far, 324 env steps/s in all"


def test_a_failed_command_is_reported_and_the_json_of_another_kept(tmp_path, capsys):
    """For `coterie reproduce`, which also runs `bench`, `plan` and `eval`. The rest runs after a failure."""
    kept = Job("kept", ("no-such-option",), tmp_path / "kept", "bench")
    kept.beside(".args.json").write_text(json.dumps(list(kept.args)))
    kept.beside(".json").write_text('{"cores": 7}')
    fails = Job("fails", ("no-such-preset",), tmp_path / "fails", "bench")
    assert run_jobs([fails, Job("again", fails.args, tmp_path / "again", "bench"), kept], 1) == 2
    assert kept.report() == {"cores": 7}
    assert fails.report() is None
    out = capsys.readouterr().out
    for name in ("fails", "again"):
        assert re.search(rf"{name}: coterie: preset: 'no-such-preset' is unknown.* \(exit 2\)", out)
