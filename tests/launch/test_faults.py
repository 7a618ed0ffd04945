"""Runs of several learners one of which hangs, raises, makes a NaN or has envs that fail."""

from __future__ import annotations

import os
import re
import signal
from contextlib import suppress

import pytest

from coterie.cli.main import main
from coterie.runs import checkpoint
from tests.support.runs import ENDLESS, inline_options, last_line, read_summary


@pytest.mark.parametrize(
    ("exchange", "rank", "changes"),
    [("allreduce", 1, {}), pytest.param("gossip", 0, {"gossip.tau": 0}, marks=pytest.mark.slow)],
)
def test_a_learner_that_hangs_is_named_also_where_the_others_wait_for_it(capsys, meddler, exchange, rank, changes):
    stopped: list[int] = []

    def stop() -> None:
        with suppress(AssertionError):
            meddler.at_work()
            stopped.append(meddler.pid(rank))
            os.kill(stopped[-1], signal.SIGSTOP)

    for seconds in (3, 6, 12):  # on a busy machine it may take longer until they work at all
        meddler.out = out = meddler.out.with_name(f"run-{seconds}")
        args = inline_options(out, exchange, **ENDLESS, **changes, **{"log.stall": seconds})
        assert meddler.run(args, stop) == 1
        if stopped:
            break
    line = last_line(capsys)
    assert f"learner {rank}" in line
    assert f"learner {1 - rank}" not in line
    assert "log.stall" in line
    assert read_summary(out)["status"] == "failed"
    meddler.check_nothing_left()


def test_a_learner_whose_envs_fail_ends_the_run_with_the_reason(capsys, meddler):
    env = {"env.id": "coterie.envs.testing:FlakyEnv", "env.kwargs": '{"how": "raise", "at": 20}', "env.num_envs": 2}
    args = inline_options(meddler.out, "gossip", steps=10**9, **env, **{"env.replace_budget": 0})
    assert main(args) == 1
    assert re.match(r"coterie: learner [01]: .*env\.replace_budget 0; the last: .*flaky by design", last_line(capsys))
    assert "Traceback" not in meddler.log()
    summary = read_summary(meddler.out)
    assert summary["status"] == "failed"
    assert "flaky by design" in summary["reason"]
    meddler.check_nothing_left()


def test_an_exception_in_a_learner_leaves_its_traceback(capsys, meddler, odd):
    assert main(inline_options(meddler.out, "allreduce", steps=10**9, **{"model.torso": "odd:raises"})) == 1
    assert "learner 1: ValueError: odd by design" in last_line(capsys)
    assert "learner 1:\nTraceback" in meddler.log()
    assert "in fail" in meddler.log()
    assert read_summary(meddler.out)["status"] == "failed"
    meddler.check_nothing_left()


@pytest.mark.parametrize("exchange", ["allreduce", "hogwild", "gossip"])
def test_a_nan_stays_with_the_learner_that_made_it_and_is_named(capsys, meddler, odd, exchange):
    changes = {"model.torso": "odd:not_a_number", "log.checkpoint_every": 0.0, "steps": 10**9, "log.keep": 100}
    assert main(inline_options(meddler.out, exchange, **changes)) == 1
    assert re.match(r"coterie: learner 1: the gradient of \S+ is not finite at learner step \d+", last_line(capsys))
    for path in (meddler.out / "checkpoints").glob("step_*"):
        tensors, _ = checkpoint.load(path)
        assert all(x.isfinite().all() for name, group in tensors.items() if "rng" not in name for x in group.values())
    meddler.check_nothing_left()
