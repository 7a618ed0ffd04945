"""Seeds and grids: what runs, where it goes, and that the same command goes on where it was stopped."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from coterie.cli.main import main
from coterie.config import Config
from coterie.tools.sweep import Job, parse_grid, plan_runs, run_jobs
from coterie.types import ConfigError

TRAIN = ("train", "ppo", "--env", "CartPole-v1", "--log.tensorboard", "False")


def test_seeds_run_side_by_side_and_once(tmp_path, capsys):
    options = (*TRAIN, "--steps", "2000", "--out", str(tmp_path / "run"), "--seeds", "4..5", "--jobs", "2")
    assert main(list(options)) == 0
    lines = capsys.readouterr().out.splitlines()  # on a busy machine also how far all are
    assert sorted(line.split(":")[0] for line in lines if " done, " not in line) == ["seed 4", "seed 5"]
    paths = [tmp_path / f"run-seed{s}" / "summary.json" for s in (4, 5)]
    assert len({json.loads(path.read_text())["digest"] for path in paths}) == 2
    before = [path.stat().st_mtime_ns for path in paths]
    assert main([*options[:-3], "4..5", "--jobs", "1"]) == 0  # nothing is left to do
    assert capsys.readouterr().out.count("(was there)") == 2
    assert [path.stat().st_mtime_ns for path in paths] == before
    assert main([*options, "--optim.lr", "0.5"]) == 2
    assert "was begun with other options" in capsys.readouterr().err


def test_a_grid_is_every_combination(tmp_path):
    config = Config(preset="ppo", out=str(tmp_path / "g"))
    points = parse_grid(["optim.lr=1e-3,3e-4", "algo.gamma=0.9,0.99"])
    assert points[1] == {"optim.lr": "1e-3", "algo.gamma": "0.99"}
    jobs = plan_runs(["ppo"], config, [0, 1], points)
    assert len({job.folder for job in jobs}) == 8
    assert jobs[3].folder.name == "g-lr-1e-3-gamma-0.99-seed1"
    assert jobs[3].args == ("ppo", "--optim.lr", "1e-3", "--algo.gamma", "0.99", "--seed", "1")
    assert parse_grid([]) == [{}]
    for bad in ("seed=1,2", "out=a,b", "optim.lr=1,1"):
        with pytest.raises(ConfigError, match="--grid"):
            parse_grid([bad])
    with pytest.raises(ConfigError, match="there twice"):
        parse_grid(["optim.lr=1", "optim.lr=2"])


def test_a_value_below_nothing_has_a_folder_of_its_own():
    config = Config(preset="gala-ppo", out="x")
    jobs = plan_runs(["gala-ppo"], config, [0], parse_grid(["gossip.tau=-1,1"]))
    assert [job.folder.name for job in jobs] == ["x-tau--1-seed0", "x-tau-1-seed0"]


def test_each_runs_on_cores_of_its_own(tmp_path, monkeypatch):
    given: dict[int, list[int]] = {}
    really = os.sched_setaffinity
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: (given.update({pid: cores}), really(pid, cores)))
    jobs = [Job(f"j{k}", (*TRAIN[1:], "--steps", "2000", "--seed", str(k)), tmp_path / f"r{k}") for k in range(2)]
    assert run_jobs(jobs, 2) == 0
    here = sorted(os.sched_getaffinity(0))
    assert list(given.values()) == [here[k::2] or [here[k % len(here)]] for k in range(2)]
    seen = [json.loads((job.folder / "machine.json").read_text())["cores"] for job in jobs]
    assert seen == [len(cores) for cores in given.values()]


def test_a_stopped_sweep_goes_on(tmp_path):
    words = [sys.executable, "-m", "coterie", *TRAIN, "--steps", "30000", "--log.every", "0.2", "--out",
             str(tmp_path / "run"), "--seeds", "0..1"]  # fmt: skip
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        metrics, end = tmp_path / "run-seed0/metrics.jsonl", time.monotonic() + 120
        while not (metrics.exists() and metrics.read_text().count("\n") > 2):
            assert time.monotonic() < end
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out = process.communicate(timeout=120)[0]
    assert process.returncode == 75, out
    reached = json.loads((tmp_path / "run-seed0/summary.json").read_text())["env_steps"]
    assert 0 < reached < 30_000
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    text = (tmp_path / "run-seed0.txt").read_text()
    assert re.search(r"interrupted.*finished", text, re.S), "the second life is written below the first"
    assert [json.loads((tmp_path / f"run-seed{k}/summary.json").read_text())["status"] for k in (0, 1)] == [
        "finished"
    ] * 2


def test_the_same_twice_at_once_is_refused(tmp_path):
    words = [
        sys.executable,
        "-m",
        "coterie",
        *TRAIN,
        "--steps",
        "100000000",
        "--out",
        str(tmp_path / "run"),
        "--seeds",
        "0",
    ]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            end = time.monotonic() + 120
            while not (tmp_path / "run-seed0/config.json").exists():
                assert time.monotonic() < end
                time.sleep(0.05)
            busy = subprocess.run(words, capture_output=True, text=True, timeout=120)
            assert busy.returncode == 2
            assert "is being trained by another process" in busy.stderr
            assert process.poll() is None
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=120)
    assert process.returncode == 75
    assert json.loads((tmp_path / "run-seed0/summary.json").read_text())["status"] == "interrupted"


def test_what_others_left_is_not_touched(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    mine = folder / "notes.txt"
    mine.write_text("mine")
    assert run_jobs([Job("a", (*TRAIN[1:], "--steps", "500"), folder)], 1) == 0  # a folder without a run will do
    shutil.rmtree(folder / "checkpoints")  # as if it had been killed at once: it is made anew
    (folder / "summary.json").unlink()
    assert run_jobs([Job("a", (*TRAIN[1:], "--steps", "500"), folder)], 1) == 0
    assert mine.read_text() == "mine"
    (folder / "summary.json").unlink()  # killed between its last checkpoint and its summary: it is done
    assert run_jobs([Job("a", (*TRAIN[1:], "--steps", "500"), folder)], 1) == 0
    (tmp_path / "run.args.json").unlink()
    with pytest.raises(ConfigError, match="did not begin"):
        run_jobs([Job("a", (*TRAIN[1:], "--steps", "500"), folder)], 1)
    assert (folder / "config.json").exists()


def test_a_run_that_fails_is_told(tmp_path, capsys):
    jobs = [
        Job("bad", ("ppo", "--env", "nowhere:Env"), tmp_path / "bad"),
        Job("ok", (*TRAIN[1:], "--steps", "500"), tmp_path / "ok"),
    ]
    assert run_jobs(jobs, 1) == 2
    out = capsys.readouterr().out
    assert re.search(r"bad: coterie: .*nowhere.* \(exit 2\)", out)
    assert "ok: finished" in out
    assert not Path(tmp_path / "bad").exists()
