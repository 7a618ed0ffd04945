"""Runs of several learners one of which hangs, raises, makes a NaN or has envs that fail."""

from __future__ import annotations

import os
import re
import signal
from contextlib import suppress

import pytest

from coterie.cli.main import main
from coterie.runs import checkpoint
from tests.launch.harness import ENDLESS, EXCHANGES, last_line, options, read_summary


@pytest.mark.parametrize(
    ("exchange", "rank", "changes"),
    [
        ("allreduce", 1, {}),
        ("hogwild", 0, {}),
        ("store", 0, {"store.fixed_turns": True}),
        ("gossip", 1, {"gossip.tau": 0}),
    ],
)
def test_a_learner_that_hangs_is_named(capsys, meddler, exchange, rank, changes):
    """Also where the others wait for it, and come forward as little."""
    stopped: list[int] = []

    def stop() -> None:
        with suppress(AssertionError):
            meddler.at_work()
            stopped.append(meddler.pid(rank))
            os.kill(stopped[-1], signal.SIGSTOP)

    for seconds in (3, 6, 12):  # on a busy machine it may take longer until they work at all
        meddler.out = out = meddler.out.with_name(f"run-{seconds}")
        args = options(out, exchange, **ENDLESS, **changes, **{"log.stall": seconds})
        assert meddler.run(args, stop) == 1
        if stopped:
            break
    line = last_line(capsys)
    assert f"learner {rank}" in line
    assert f"learner {1 - rank}" not in line
    assert "log.stall" in line
    assert read_summary(out)["status"] == "failed"
    meddler.check_nothing_left()


@pytest.mark.parametrize("exchange", ["allreduce", "gossip"])
def test_a_learner_whose_envs_fail_ends_the_run_with_the_reason(capsys, meddler, exchange):
    out = meddler.out
    env = {"env.id": "coterie.envs.testing:FlakyEnv", "env.kwargs": '{"how": "raise", "at": 20}', "env.num_envs": 2}
    assert main(options(out, exchange, steps=10**9, **env, **{"env.replace_budget": 0})) == 1
    line = last_line(capsys)
    assert re.match(r"coterie: learner [01]: .*env\.replace_budget 0; the last: .*flaky by design", line)
    assert "Traceback" not in (out / "log.txt").read_text()
    summary = read_summary(out)
    assert summary["status"] == "failed"
    assert "flaky by design" in summary["reason"]
    meddler.check_nothing_left()


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_an_exception_in_a_learner_leaves_its_traceback(capsys, meddler, odd, exchange):
    out = meddler.out
    assert main(options(out, exchange, steps=10**9, **{"model.torso": "odd:raises"})) == 1
    assert "learner 1: ValueError: odd by design" in last_line(capsys)
    log = (out / "log.txt").read_text()
    assert "learner 1:\nTraceback" in log
    assert "in fail" in log
    assert read_summary(out)["status"] == "failed"
    meddler.check_nothing_left()


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_nan_stays_with_the_learner_that_made_it_and_is_named(capsys, meddler, odd, exchange):
    out = meddler.out
    changes = {"model.torso": "odd:not_a_number", "log.checkpoint_every": 0.0, "steps": 10**9, "log.keep": 100}
    assert main(options(out, exchange, **changes)) == 1
    assert re.match(r"coterie: learner 1: the gradient of \S+ is not finite at learner step \d+", last_line(capsys))
    for path in (out / "checkpoints").glob("step_*"):
        tensors, _ = checkpoint.load(path)
        assert all(x.isfinite().all() for name, group in tensors.items() if "rng" not in name for x in group.values())
    meddler.check_nothing_left()
