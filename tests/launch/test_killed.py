"""Runs of inline learners some of which are killed: they rejoin or go back, or the run ends, and the rows are right."""

from __future__ import annotations

import os
import re
import signal
import threading
import time

import pytest

from coterie.cli.main import main
from tests.support.runs import (
    ENDLESS,
    check_accounts,
    check_rows,
    inline_options,
    last_checkpoint,
    last_line,
    read_summary,
)
from tests.support.waiting import wait_until


@pytest.mark.parametrize(("exchange", "steps"), [("allreduce", 1500), ("gossip", 3000)])  # gossip goes on meanwhile
def test_killed_learners_come_back_and_every_row_is_accounted_for(meddler, tally, exchange, steps):
    out, known = meddler.out, []

    def kill_each() -> None:
        for rank in range(2):
            meddler.at_work()
            before = last_checkpoint(out)[1]["learners"][rank]["learned"]
            known.append((meddler.kill(rank), before))
            meddler.saves_again()

    changes = {"steps": steps, "log.checkpoint_every": 0.4, "env.num_envs": 4, "env.groups": 1}
    assert meddler.run(inline_options(out, exchange, **tally.options, **changes), kill_each) == 0
    summary = check_accounts(out)
    assert summary["status"] == "finished"
    assert summary["env_steps"] >= steps
    assert summary["restarts"] == 2
    assert all(summary["digests"])
    log, rows, starts = meddler.log(), summary["rows"], [rank for rank, _ in meddler.started]
    assert all(f"learner {rank} was killed by SIGKILL" in log for rank in range(2))
    if exchange == "gossip":
        assert starts == [0, 1, 0, 1]
        assert rows["rolled_back"] == 0
    else:
        assert starts == [0, 1] * 3
        back = [int(step) for step in re.findall(r"go back to step_(\d+)", log)]
        assert len(back) == 2
        assert rows["rolled_back"] >= sum(max(0, steps - at) for (steps, _), at in zip(known, back, strict=True))
    for (_, before), row in zip(known, last_checkpoint(out)[1]["learners"], strict=True):
        assert row["learned"] > before  # the restarted learner has learned
    # The envs' own count: only rows of unfinished rollouts are not in the accounts.
    kills = 2 if exchange == "gossip" else 4  # the others are killed with the one
    assert 0 <= tally.steps - rows["produced"] <= kills * 4 * 8
    meddler.check_nothing_left()


@pytest.mark.parametrize(("exchange", "restarts"), [("store", 1), pytest.param("gossip", 2, marks=pytest.mark.slow)])
def test_what_was_learned_survives_the_death_of_all_learners_at_the_same_moment(meddler, exchange, restarts):
    out, number = meddler.out, signal.SIGUSR1
    pids: list[int] = []
    before: list[float] = []

    def rows() -> float:
        """The running normalizers show how much of the run the weights of a checkpoint have seen."""
        tensors, _ = last_checkpoint(out)
        return sum(float(tensors[f"learner_{rank}/model"]["obs_norm.obs_.count"]) for rank in range(2))

    def kill_both() -> None:
        meddler.until(lambda: meddler.saved() >= 2500, "most of the run")
        before.append(rows())
        signal.pthread_kill(threading.main_thread().ident, number)  # both ends reach the parent at once
        time.sleep(0.1)
        pids.extend(meddler.pid(rank) for rank in range(2))
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    def hold(*_: object) -> None:
        wait_until(lambda: len(pids) == 2, what="both are killed")
        time.sleep(0.3)

    handler = signal.signal(number, hold)
    changes = {"steps": 6000, "log.checkpoint_every": 0.2, "env.delay": 0.01}
    try:
        assert meddler.run(inline_options(out, exchange, **changes), kill_both) == 0
    finally:
        signal.signal(number, handler)
    assert check_accounts(out)["restarts"] == restarts
    assert len(meddler.started) == 4
    assert rows() > before[0]
    meddler.check_nothing_left()


@pytest.mark.slow
def test_gossip_saves_again_after_a_death_in_the_middle_of_a_checkpoint(meddler, odd):
    """Learner 0 is slow to write its part; learner 1, which has written its own, dies."""
    drafts = meddler.out / "checkpoints"

    def kill_while_saving() -> None:
        meddler.at_work()
        meddler.until(lambda: list(drafts.glob(".draft-order_*/learner_1/rng.safetensors")), "learner 1 has saved")
        meddler.kill(1)
        meddler.saves_again()

    changes = {"steps": 6000, "log.checkpoint_every": 0.3, "model.torso": "odd:slow_save_0", "env.delay": 0.01}
    assert meddler.run(inline_options(meddler.out, "gossip", **changes), kill_while_saving) == 0
    assert check_accounts(meddler.out)["restarts"] == 1


def test_gossip_finishes_without_a_learner_that_dies_at_the_end(meddler):
    """What is saved is enough to resume from, and to be evaluated."""
    out = meddler.out

    def kill_the_last() -> None:
        # Learner 0 has reached the total while learner 1 is in a rollout of 3 s.
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
    ("exchange", "rank", "number"), [("allreduce", 0, signal.SIGKILL), ("gossip", 1, signal.SIGSEGV)]
)
def test_without_restarts_a_killed_learner_ends_the_run(capsys, meddler, exchange, rank, number):
    def kill() -> None:
        meddler.at_work()
        os.kill(meddler.pid(rank), number)

    assert meddler.run(inline_options(meddler.out, exchange, restarts=0, **ENDLESS), kill) == 1
    line, reason = last_line(capsys), f"learner {rank} was killed by {number.name}"
    assert reason in line
    assert "restarts (0) are used up" in line
    assert reason in read_summary(meddler.out)["reason"]
    assert check_rows(meddler.out)["status"] == "failed"
    last_checkpoint(meddler.out)
    meddler.check_nothing_left()
