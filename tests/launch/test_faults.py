"""Runs with processes that are killed, hang, raise or make a NaN: they come back, or the run ends with a reason."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from contextlib import suppress

import pytest

import coterie
from coterie.cli.main import main
from coterie.parallel import heartbeats
from coterie.runs import checkpoint
from coterie.runs.metrics import read_metrics
from tests.support.runs import (
    ENDLESS,
    central_options,
    check_accounts,
    check_rows,
    decoupled_options,
    inline_options,
    last_checkpoint,
    last_line,
    read_summary,
)


class Stop(coterie.Callback):
    def should_stop(self, run):
        return (run.folder / "stop").exists()


@pytest.mark.parametrize(
    ("options", "exchange", "which", "name"),
    [
        (inline_options, "allreduce", 1, "learner 1"),  # learner 0 waits for it
        (inline_options, "gossip", 1, "learner 1"),
        (decoupled_options, "solo", "actor 1", "actor 1"),
        pytest.param(central_options, "solo", "actor 1", "host 1", marks=pytest.mark.slow),
    ],
)
def test_a_process_that_hangs_is_killed_and_the_run_goes_on(meddler, options, exchange, which, name):
    def stop() -> None:
        meddler.at_work()
        os.kill(meddler.pid(which), signal.SIGSTOP)
        meddler.hurry(2.5, heartbeats)
        meddler.until(lambda: f"{name} hung (no rollout for" in meddler.log(), "it is noticed")
        meddler.hurry(1, heartbeats)
        meddler.until(lambda: meddler.starts(which) == 2, "it is started again")
        meddler.saves_again()
        meddler.interrupt()

    assert meddler.run(options(meddler.out, exchange, **ENDLESS, **{"log.stall": 20}), stop) == 75
    check_rows(meddler.out)
    for other in ("learner 0", "actor 0", "host 0"):
        assert f"{other} hung" not in meddler.log()


@pytest.mark.parametrize(
    "kinds",
    [
        [(inline_options, "solo"), (decoupled_options, "solo")],
        pytest.param([(inline_options, "allreduce"), (inline_options, "store")], marks=pytest.mark.slow),
        pytest.param([(central_options, "gossip")], marks=pytest.mark.slow),
    ],
)
def test_a_run_that_was_stopped_for_longer_than_its_time_outs_goes_on(command, kinds):
    """As by Ctrl-Z, a container that is frozen, or a machine that is paused."""
    limits = {**ENDLESS, "log.stall": 12, "env.timeout": 12, "env.id": "coterie.envs.testing:CountingEnv"}
    runs = [
        command(options, exchange, name=f"run{k}", **{"learners": 1 + (exchange != "solo"), **limits})
        for k, (options, exchange) in enumerate(kinds)
    ]
    for run in runs:
        run.until(run.line, "it trains")
    before = [run.line()["env_steps"] for run in runs]
    for number, seconds in ((signal.SIGSTOP, 16), (signal.SIGCONT, 0)):
        for run in runs:
            os.killpg(run.process.pid, number)
        time.sleep(seconds)
    for run, steps in zip(runs, before, strict=True):
        run.until(lambda run=run, steps=steps: run.line()["env_steps"] > steps + 200, "it goes on")
    time.sleep(3)
    for run in runs:
        run.end(signal.SIGTERM, 75)
        summary = read_summary(run.out)
        assert (summary.get("restarts", 0), summary["envs_replaced"]) == (0, 0), run.log()


@pytest.mark.parametrize(
    ("options", "exchange"), [(inline_options, "gossip"), (decoupled_options, "solo"), (central_options, "solo")]
)
def test_an_env_that_raises_and_is_replaced_shows_its_traceback_once(options, exchange, tmp_path, capsys):
    changes = FLAKY | {"env.on_error": "replace", "env.num_envs": 4, "steps": 600}
    assert main(options(tmp_path / "run", exchange, **changes)) == 0
    replaced = read_summary(tmp_path / "run")["envs_replaced"]
    log, screen = (tmp_path / "run" / "log.txt").read_text(), capsys.readouterr().out
    assert replaced == log.count(": ValueError: flaky by design (") > 2  # each process has a last report
    assert log.count("Traceback (most recent call last)") == screen.count("Traceback (most recent call last)") == 1


FLAKY = {"env.id": "tests.support.flaky:FlakyEnv", "env.kwargs": '{"how": "raise", "at": 20}', "env.num_envs": 2}


@pytest.mark.parametrize(
    ("options", "exchange", "changes", "reason", "inside"),
    [
        (inline_options, "gossip", FLAKY,
         r"learner [01]: env\.id .* ValueError: flaky by design \(.*flaky\.py, line \d+, in step\)", "in step"),
        (inline_options, "allreduce", {"model.torso": "odd:raises"},
         "learner 1: ValueError: odd by design", "in fail"),
        (decoupled_options, "solo", {"model.torso": "odd:actor_raises"},
         "actor 1: ValueError: odd by design", "in fail"),
        # tests/exchange has the same of the other exchanges.
        (inline_options, "hogwild", {"model.torso": "odd:not_a_number", "log.checkpoint_every": 0.0, "log.keep": 100},
         r"learner 1: policy_loss is not finite at learner step \d+", ""),
    ],
    ids=["envs", "learner", "actor", "nan"],
)  # fmt: skip
def test_an_error_in_a_process_ends_the_run_and_is_named(
    capsys, meddler, odd, options, exchange, changes, reason, inside
):
    """What is not finite stays with the learner that made it."""
    assert main(options(meddler.out, exchange, **{"steps": 10**9, **changes})) == 1
    *trace, line = capsys.readouterr().err.splitlines()
    assert re.match(f"coterie: {reason}", line)
    assert ("Traceback" in meddler.log(), "Traceback (most recent call last):" in trace) == (bool(inside),) * 2
    assert inside in meddler.log()
    summary = read_summary(meddler.out)
    assert (summary["status"], bool(re.search(reason, summary["reason"]))) == ("failed", True)
    for path in (meddler.out / "checkpoints").glob("step_*"):
        tensors, _ = checkpoint.load(path)
        assert all(x.isfinite().all() for name, group in tensors.items() if "rng" not in name for x in group.values())


@pytest.mark.parametrize(
    ("options", "exchange", "which", "name", "field"),
    [(inline_options, "gossip", 1, "learner 1", "restarts"),
     (decoupled_options, "solo", "actor 1", "actor 1", "decoupled.restarts")],
)  # fmt: skip
def test_without_restarts_a_killed_process_ends_the_run(capsys, meddler, options, exchange, which, name, field):
    def kill() -> None:
        meddler.at_work()
        os.kill(meddler.pid(which), signal.SIGSEGV)

    assert meddler.run(options(meddler.out, exchange, **{**ENDLESS, field: 0}), kill) == 1
    line, reason = last_line(capsys), f"{name} was killed by SIGSEGV"
    assert reason in line
    assert f"the limit of 0 restarts in an hour ({field}) is reached" in line
    assert reason in read_summary(meddler.out)["reason"]
    assert check_rows(meddler.out)["status"] == "failed"
    last_checkpoint(meddler.out)


def test_a_killed_learner_of_gossip_comes_back_alone_and_every_row_is_accounted_for(meddler, tally):
    out = meddler.out

    def kill() -> None:
        meddler.at_work()
        meddler.kill(1)
        meddler.saves_again()
        at = last_checkpoint(out)[1]["learners"][1]["learned"]
        meddler.until(lambda: last_checkpoint(out)[1]["learners"][1]["learned"] > at, "it learns again")
        (out / "stop").touch()

    changes = {**ENDLESS, **tally.options, "env.num_envs": 4, "env.groups": 1, "algo.unroll_length": 8}
    assert meddler.run(inline_options(out, "gossip", callbacks=f"{__name__}:Stop", **changes), kill) == 0
    summary = check_accounts(out)
    assert (summary["status"], summary["restarts"]) == ("finished", 1)
    assert all(summary["digests"])
    assert "learner 1 was killed by SIGKILL" in meddler.log()
    assert [one for one, _ in meddler.started] == [0, 1, 1]
    assert summary["rows"]["rolled_back"] == 0
    # The envs' own count: only rows of the unfinished rollout are not in the accounts.
    assert 0 <= tally.steps - summary["rows"]["produced"] <= 4 * 8


@pytest.mark.parametrize(("exchange", "rank"), [("allreduce", 0), ("hogwild", 1), ("store", 1)])
def test_a_killed_learner_costs_what_it_was_at_and_no_more(meddler, tally, exchange, rank, monkeypatch):
    """There is no checkpoint after the first: the others save what they have when the one is gone."""
    known = []

    def kill() -> None:
        meddler.until(lambda: meddler.steps() > 600, "it has learned")
        os.kill(meddler.pid(rank), signal.SIGKILL)
        begin = time.monotonic()
        known.append(meddler.steps())
        monkeypatch.setattr(checkpoint, "sync", lambda path: time.sleep(0.1))  # the disk is slow, and the others wait
        meddler.until(lambda: meddler.starts(rank) == 2, "it is started again")
        meddler.until(lambda: meddler.steps() > known[0] + 200, "it goes on")
        assert time.monotonic() - begin < 60  # 10 s on a machine of its own: test_effective_time.py
        meddler.interrupt()

    rollouts = {"env.num_envs": 4, "env.groups": 1, "algo.unroll_length": 8}
    changes = {**ENDLESS, **tally.options, **rollouts, "log.every": 0.1, "log.checkpoint_every": 1e6}
    assert meddler.run(inline_options(meddler.out, exchange, **changes), kill) == 75
    summary = check_accounts(meddler.out)
    rows = summary["rows"]
    assert summary["restarts"] == 1
    assert f"learner {rank} was killed by SIGKILL" in meddler.log()
    assert [one for one, _ in meddler.started] == [0, 1] * 2  # the other is ended with the one
    (back,) = re.findall(r"go back to step_(\d+)", meddler.log())
    assert int(back) >= known[0]
    assert rows["rolled_back"] <= 4 * 4 * 8  # what the others learned after they had saved
    assert 0 <= tally.steps - rows["produced"] <= 2 * 4 * 8


def test_what_was_learned_survives_the_death_of_all_learners_at_the_same_moment(meddler):
    def kill_both() -> None:
        meddler.until(lambda: meddler.saved() >= 2500, "it has learned for a while")
        for pid in [meddler.pid(rank) for rank in range(2)]:
            os.kill(pid, signal.SIGKILL)
        meddler.until(lambda: len(meddler.started) == 4, "they are started again")
        meddler.saves_again()
        (meddler.out / "stop").touch()

    changes = {**ENDLESS, "log.checkpoint_every": 0.2, "callbacks": f"{__name__}:Stop"}
    assert meddler.run(inline_options(meddler.out, "store", **changes), kill_both) == 0
    assert check_accounts(meddler.out)["restarts"] == 1
    assert len(meddler.started) == 4
    (back,) = re.findall(r"go back to step_(\d+)", meddler.log())
    assert int(back) >= 2500


def test_gossip_finishes_without_a_learner_that_dies_at_the_end(meddler):
    """What is saved is enough to resume from, and to be evaluated."""
    out = meddler.out

    def kill_the_last() -> None:
        meddler.until(lambda: meddler.steps() > 0, "a line of metrics")
        os.kill(meddler.pid(1), signal.SIGSTOP)  # it stays in its rollout of 3 s
        meddler.until(lambda: meddler.steps() >= 1200, "learner 0 has ended its training")
        os.kill(meddler.pid(1), signal.SIGKILL)

    changes = {"steps": 1200, "env.delay": 0.4, "env.delay_learner": 1}
    assert meddler.run(inline_options(out, "gossip", **changes), kill_the_last) == 0
    summary = check_rows(out)
    assert summary["status"] == "finished"
    assert summary["env_steps"] >= 1200
    assert summary["digests"][0]
    assert main(["eval", str(out), "--learner", "mean", "--episodes", "2"]) == 0
    seen = float(last_checkpoint(out)[0]["learner_0/model"]["obs_norm.obs_.count"])
    # Learner 1 continues with what the other has learned, not from the beginning.
    assert main(["resume", str(out), "--steps", str(summary["env_steps"] + 1)]) == 0
    check_accounts(out)
    tensors, _ = last_checkpoint(out)
    for rank in range(2):
        assert float(tensors[f"learner_{rank}/model"]["obs_norm.obs_.count"]) >= 0.9 * seen


@pytest.mark.parametrize(
    ("options", "exchange"),
    [(inline_options, "gossip"), pytest.param(decoupled_options, "solo", marks=pytest.mark.slow)],
)
def test_a_full_disk_costs_no_step(meddler, tmp_path, options, exchange):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "none", str(disk)], capture_output=True).returncode:
        pytest.skip("cannot mount a file system")
    meddler.out = disk / "run"

    def fill() -> None:
        meddler.at_work()
        with suppress(OSError), (disk / "filler").open("wb") as file:
            while True:
                file.write(bytes(1 << 16))
                file.flush()
        meddler.until(lambda: shutil.disk_usage(disk).free == 0, "it is full")
        time.sleep(3)
        (disk / "filler").unlink()
        meddler.saves_again()
        meddler.interrupt()

    try:
        assert meddler.run(options(meddler.out, exchange, **ENDLESS), fill) == 75
        summary = check_rows(meddler.out)
        assert summary.get("restarts", 0) == 0
        assert "No space left on device" in meddler.log()
        seen = [line["env_steps"] for line in read_metrics(meddler.out)]
        assert seen == sorted(seen)
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
