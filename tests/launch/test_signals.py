"""Runs of several learners that are sent a signal, alone or as a process group, or whose parent is killed."""

from __future__ import annotations

import os
import signal
import time

import pytest

from coterie.cli.main import main
from coterie.parallel.processes import scratch_folder
from tests.launch.harness import (
    ENDLESS,
    EXCHANGES,
    check_accounts,
    last_checkpoint,
    last_line,
    named_memory,
    options,
    read_summary,
    until,
)

COUNTING = {"env.id": "coterie.envs.testing:CountingEnv", "env.num_envs": 4}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_signal_checkpoints_and_the_run_can_be_resumed(capsys, meddler, exchange, number):
    out = meddler.out

    def interrupt() -> None:
        meddler.at_work()
        for _, pid in meddler.started:
            assert not named_memory(pid)
        os.kill(os.getpid(), number)

    assert meddler.run(options(out, exchange, **ENDLESS), interrupt) == 75
    assert f"{number.name}: checkpoint written" in capsys.readouterr().out
    summary = read_summary(out)
    assert (summary["status"], summary["reason"]) == ("interrupted", number.name)
    assert summary["restarts"] == 0
    check_accounts(out, summary)
    meddler.check_nothing_left()
    if number == signal.SIGINT:
        return  # one resumed run for each exchange is enough
    total = summary["env_steps"] + 1000
    assert main(["resume", str(out), "--steps", str(total)]) == 0
    again = read_summary(out)
    assert again["status"] == "finished"
    assert again["rows"]["rolled_back"] == 0
    assert total <= again["env_steps"] <= total + 4 * 128
    assert again["learner_steps"] > summary["learner_steps"]
    check_accounts(out, again)
    meddler.check_nothing_left()


def test_a_second_signal_ends_it_at_once(capsys, meddler):
    """Also where a learner is in the middle of a long rollout."""
    out = meddler.out

    def interrupt_twice() -> None:
        meddler.until(lambda: meddler.saved() == 0 and meddler.steps() >= 0, "the first checkpoint")
        time.sleep(0.5)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)

    assert meddler.run(options(out, "gossip", **{**ENDLESS, "env.delay": 5}), interrupt_twice) == 1
    assert last_line(capsys) == "coterie: stopped at once; the last checkpoint stands"
    assert read_summary(out)["status"] == "failed"
    last_checkpoint(out)
    meddler.check_nothing_left()


def test_everybody_goes_with_a_killed_parent(outside):
    """Learners that wait for each other, and their env workers."""
    run = outside(make=lambda out: options(out, "allreduce", **ENDLESS, **COUNTING))
    run.wait_for("metrics.jsonl")
    assert len(run.processes()) >= 6  # parent, fork server, two learners with two workers at least
    run.process.kill()
    run.process.wait()
    until(lambda: not run.processes(), "all are gone", 5)
    (left,) = run.tmp.glob("coterie-*")  # where they met: the next run sees to it
    scratch_folder(str(run.tmp))
    assert not left.exists()


@pytest.mark.parametrize(
    ("exchange", "number", "changes", "early"),
    [
        ("gossip", signal.SIGINT, COUNTING, False),
        ("hogwild", signal.SIGINT, {}, True),
        ("allreduce", signal.SIGTERM, COUNTING, False),
    ],
)
def test_a_signal_to_the_whole_process_group(outside, exchange, number, changes, early):
    """As a terminal's Ctrl-C and `timeout` or a service manager send it: to every process of the run.

    `early`: while the server that the learners are forked from still loads torch.
    """
    run = outside(make=lambda out: options(out, exchange, **ENDLESS, **changes))
    if early:
        until(lambda: "forkserver" in " ".join(run.processes().values()), "the fork server starts")
    else:
        run.wait_for("metrics.jsonl")
    os.killpg(run.process.pid, number)
    code, stdout, stderr = run.end()
    assert (code, stderr) == (75, "")
    assert f"{number.name}: checkpoint written" in stdout
    summary = read_summary(run.out)
    assert (summary["status"], summary["envs_replaced"]) == ("interrupted", 0)
    _, state = last_checkpoint(run.out)
    assert state["env_steps"] == summary["env_steps"]
    until(lambda: not run.processes(), "all are gone", 5)
    assert list(run.tmp.iterdir()) == []
