"""Runs of several learners of which some are killed: they come back, or the run ends, and the books are right."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time

import pytest

from coterie.cli.main import main
from coterie.runs.metrics import read_metrics
from tests.launch.harness import (
    ENDLESS,
    EXCHANGES,
    check_accounts,
    last_checkpoint,
    last_line,
    options,
    read_summary,
    until,
)

# A CountingEnv that keeps a tally of all steps of all processes: one byte for each.
TALLY = """
import os

from coterie.envs.testing import CountingEnv


class Tally(CountingEnv):
    def __init__(self, path, **kwargs):
        super().__init__(**kwargs)
        self.file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def step(self, action):
        os.write(self.file, b".")
        return super().step(action)

    def close(self):
        os.close(self.file)
"""


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_killed_learners_come_back_and_every_row_is_accounted_for(tmp_path, monkeypatch, meddler, exchange):
    out, tally, known = meddler.out, tmp_path / "tally", []
    (tmp_path / "tally_env.py").write_text(TALLY)
    monkeypatch.syspath_prepend(str(tmp_path))
    env = {
        "env.id": "tally_env:Tally",
        "env.kwargs": json.dumps({"path": str(tally)}),
        "env.num_envs": 4,
        "env.groups": 1,
    }

    def kill_each() -> None:
        for rank in range(2):
            meddler.at_work()
            before = last_checkpoint(out)[1]["learners"][rank]["learned"]
            known.append((meddler.kill(rank), before))
            at = meddler.saved()
            meddler.until(lambda at=at: meddler.saved() > at, "a later checkpoint")

    total = 3000 if exchange == "gossip" else 1500  # gossip goes on meanwhile
    changes = {"steps": total, "log.checkpoint_every": 0.4, "env.delay": 0.01}
    assert meddler.run(options(out, exchange, **env, **changes), kill_each) == 0
    summary = read_summary(out)
    assert summary["status"] == "finished"
    assert summary["env_steps"] >= total
    assert summary["restarts"] == 2
    check_accounts(out, summary)
    assert all(summary["digests"])
    log = (out / "log.txt").read_text()
    assert all(f"learner {rank} was killed by SIGKILL" in log for rank in range(2))
    rows, starts = summary["rows"], [rank for rank, _ in meddler.started]
    if exchange == "gossip":
        assert starts == [0, 1, 0, 1]
        assert rows["rolled_back"] == 0
    else:
        assert starts == [0, 1] * 3
        back = [int(step) for step in re.findall(r"go back to step_(\d+)", log)]
        assert len(back) == 2
        assert rows["rolled_back"] >= sum(max(0, steps - at) for (steps, _), at in zip(known, back, strict=True))
    for (_, before), row in zip(known, last_checkpoint(out)[1]["learners"], strict=True):
        assert row["learned"] > before  # who came back learned on
    # The envs' own count: only rows of rollouts that nobody finished are in nobody's books.
    kills = 2 if exchange == "gossip" else 4  # the others are killed with the one
    unfinished = tally.stat().st_size - rows["produced"]
    assert 0 <= unfinished <= kills * 4 * 8
    meddler.check_nothing_left()


def test_games_of_rows_that_were_rolled_back_do_not_count(meddler):
    """As after a resume. The only checkpoint is the one at step 0."""
    out = meddler.out

    def kill() -> None:
        meddler.until(lambda: meddler.steps() > 1500, "most of the run")
        meddler.kill(0)

    changes = {"steps": 3500, "env.delay": 0.01, "log.checkpoint_every": 1000, "env.max_episode_steps": 10}
    assert meddler.run(options(out, "hogwild", **changes), kill) == 0
    summary = read_summary(out)
    check_accounts(out, summary)
    assert summary["rows"]["rolled_back"] > 1500
    shortest = 8  # steps of a game, and the longest has 10
    assert 0 < summary["episodes"] <= summary["env_steps"] / shortest
    assert read_metrics(out)[-1]["episodes"] == summary["episodes"]


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_learners_that_die_at_the_same_moment(meddler, exchange):
    """Both ends reach the parent at once. What had been learned before is not lost."""
    out, number = meddler.out, signal.SIGUSR1
    pids: list[int] = []
    before: list[float] = []

    def rows() -> float:
        """The running normalizers tell how much of the run the weights of a checkpoint have seen."""
        tensors, _ = last_checkpoint(out)
        return sum(float(tensors[f"learner_{rank}/model"]["obs_norm.obs_.count"]) for rank in range(2))

    def kill_both() -> None:
        meddler.until(lambda: meddler.saved() >= 2500, "most of the run")
        before.append(rows())
        signal.pthread_kill(threading.main_thread().ident, number)  # the parent is held up meanwhile
        time.sleep(0.1)
        pids.extend(meddler.pid(rank) for rank in range(2))
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    def hold(*_: object) -> None:
        until(lambda: len(pids) == 2, "both are killed")
        time.sleep(0.3)

    handler = signal.signal(number, hold)
    changes = {"steps": 6000, "log.checkpoint_every": 0.2, "env.delay": 0.01}
    try:
        assert meddler.run(options(out, exchange, **changes), kill_both) == 0
    finally:
        signal.signal(number, handler)
    summary = read_summary(out)
    check_accounts(out, summary)
    assert summary["restarts"] == (2 if exchange == "gossip" else 1)
    assert len(meddler.started) == 4
    assert rows() > before[0]
    meddler.check_nothing_left()


def test_gossip_goes_on_saving_after_a_death_in_the_middle_of_a_checkpoint(meddler, odd):
    """Learner 0 takes its time over its part of it; learner 1, which is through, dies."""
    out = meddler.out
    drafts = out / "checkpoints"

    def kill_while_saving() -> None:
        meddler.at_work()
        meddler.until(lambda: list(drafts.glob(".draft-order_*/learner_1/rng.safetensors")), "learner 1 has saved")
        at = meddler.saved()
        meddler.kill(1)
        meddler.until(lambda: meddler.saved() > at, "a checkpoint after that")

    changes = {"steps": 6000, "log.checkpoint_every": 0.3, "model.torso": "odd:slow_save_0", "env.delay": 0.01}
    assert meddler.run(options(out, "gossip", **changes), kill_while_saving) == 0
    summary = read_summary(out)
    assert summary["restarts"] == 1
    check_accounts(out, summary)


def test_gossip_finishes_without_a_learner_that_dies_at_the_end(meddler):
    """The others are through; what is saved is enough to go on from, and to be evaluated."""
    out = meddler.out

    def kill_the_last() -> None:
        meddler.until(lambda: meddler.steps() >= 4 * 128, "learner 0 goes ahead")
        meddler.until(lambda: 0 in idle(), "learner 0 is through")
        os.kill(meddler.pid(1), signal.SIGKILL)

    def idle() -> list[int]:
        """Learner 0 has reached the total while learner 1 is in a rollout of 3 s."""
        return [0] if meddler.steps() >= 1200 else []

    changes = {"steps": 1200, "env.delay": 0.4, "env.delay_learner": 1}
    assert meddler.run(options(out, "gossip", **changes), kill_the_last) == 0
    summary = read_summary(out)
    assert summary["status"] == "finished"
    rows = summary["rows"]
    assert rows["learned"] == summary["env_steps"] >= 1200
    assert summary["digests"][0]
    assert main(["eval", str(out), "--learner", "mean", "--episodes", "2"]) == 0
    tensors, _ = last_checkpoint(out)
    seen = float(tensors["learner_0/model"]["obs_norm.obs_.count"])
    # Learner 1 goes on with what was learned, not from the beginning.
    args = ["resume", str(out), "--steps", str(summary["env_steps"] + 1)]
    assert main(args) == 0
    check_accounts(out, read_summary(out))
    tensors, _ = last_checkpoint(out)
    for rank in range(2):
        assert float(tensors[f"learner_{rank}/model"]["obs_norm.obs_.count"]) >= 0.9 * seen


@pytest.mark.parametrize(
    ("exchange", "rank", "number"),
    [
        ("allreduce", 0, signal.SIGKILL),
        ("hogwild", 1, signal.SIGSEGV),
        ("store", 0, signal.SIGSEGV),
        ("gossip", 1, signal.SIGKILL),
    ],
)
def test_without_restarts_a_killed_learner_ends_the_run(capsys, meddler, exchange, rank, number):
    out = meddler.out

    def kill() -> None:
        meddler.at_work()
        os.kill(meddler.pid(rank), number)

    assert meddler.run(options(out, exchange, restarts=0, **ENDLESS), kill) == 1
    line = last_line(capsys)
    assert f"learner {rank} was killed by {number.name}" in line
    assert "restarts (0)" in line
    summary = read_summary(out)
    assert summary["status"] == "failed"
    assert f"learner {rank} was killed by {number.name}" in summary["reason"]
    rows = summary["rows"]
    assert rows["produced"] == rows["learned"] + rows["in_flight"] + rows["dropped"] + rows["rolled_back"]
    last_checkpoint(out)
    meddler.check_nothing_left()
