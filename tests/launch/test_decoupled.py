"""Runs with actors of their own, as a user has them: killed, stopped, resumed, the same twice, and the books."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from coterie.cli.main import main
from coterie.launch.ledger import Account
from coterie.parallel.board import Board
from coterie.parallel.slots import Slots
from coterie.runs.metrics import read_metrics
from tests.conftest import VECTOR, make_config
from tests.launch.harness import ENDLESS, last_checkpoint, last_line, read_summary
from tests.launch.test_killed import TALLY

CROWD = 4  # simulators of one learner, in two actors


def options(out: Path, exchange: str = "solo", **changes: object) -> list[str]:
    learners = 1 if exchange == "solo" else 2
    fields: dict[str, object] = {
        "steps": 3000,
        "out": out,
        "exchange": exchange,
        "learners": learners,
        "actors": 2 * learners,
        "env.num-envs": CROWD,
        "decoupled.batch_size": 0,
        "algo.unroll-length": 5,
        "log.tensorboard": False,
        "log.every": 0.1,
        **changes,
    }
    return [
        "train",
        "impala",
        "--env",
        "CartPole-v1",
        *(text for k, v in fields.items() for text in (f"--{k}", str(v))),
    ]


def check(out: Path) -> dict:
    """The books of a run whose actors may have left work that nobody learned from."""
    summary = read_summary(out)
    rows = summary["rows"]
    assert rows["produced"] == rows["learned"] + rows["in_flight"] + rows["dropped"] + rows["rolled_back"]
    assert min(rows.values()) >= 0
    assert rows["learned"] == summary["env_steps"]
    if summary["status"] != "failed":
        assert last_checkpoint(out)[1]["in_flight"] == rows["in_flight"]
    return summary


@pytest.mark.parametrize("exchange", ["solo", "allreduce", "hogwild", "store", "gossip"])
def test_through_every_exchange(tmp_path, exchange):
    out = tmp_path / "run"
    assert main(options(out, exchange, **{"eval.every": 1000, "eval.episodes": 2})) == 0
    summary = check(out)
    assert summary["status"] == "finished"
    if exchange == "allreduce":  # all learners hold equal parameters: pulling from one is pulling from all
        assert len(summary["digests"]) == 2
        assert len(set(summary["digests"])) == 1
    # Whoever has not seen the end yet finishes a batch: at most what is open of each learner.
    assert 3000 <= summary["env_steps"] <= 3000 + 4 * CROWD * 5
    assert summary["rows"]["dropped"] == summary["rows"]["rolled_back"] == 0
    lines = read_metrics(out)
    assert any("eval/return" in line for line in lines)
    assert {"stage/wait", "stage/actor/env", "slots/waiting", "policy_lag/mean"} <= {k for line in lines for k in line}
    assert sum(summary["policy_lag"].values()) == summary["env_steps"] + summary["masked_steps"]
    assert main(["resume", str(out), "--steps", "4000"]) == 0
    before, summary = summary["rows"], check(out)
    assert summary["env_steps"] >= 4000
    assert summary["rows"]["dropped"] == before["in_flight"]
    # Both are of the whole run, the life before the resume with it.
    lags, by_row = {int(k): n for k, n in summary["policy_lag"].items()}, summary["policy_lag_by_row"]
    mean = sum(lag * n for lag, n in lags.items()) / sum(lags.values())
    assert sum(by_row) / len(by_row) == pytest.approx(mean, abs=1e-3)


@pytest.mark.parametrize("handed_over", [True, False])
def test_rows_of_an_actor_killed_at_its_slot_are_dropped_only_if_nobody_gets_them(handed_over):
    """Between filling a slot and counting it there is a moment at which an actor can be killed, too."""
    config, board = make_config(), Board(1, 1)
    account = Account(config, VECTOR, board, None, 0)
    slots = Slots({"x": ((5, 2), "int64")}, 1, 2, 2)
    board.write(1, {"produced": 100, "delivered": 90})
    slots.open(0, 0)
    at = slots.take(0)
    slots.promise(0, at, 100)
    if handed_over:
        slots.fill(at)
    account.lose_actor(1, slots.delivered(0))
    left = 100 if handed_over else 90
    assert (account.dropped, board.read(1)["produced"], board.read(1)["delivered"]) == (100 - left, left, left)


@pytest.mark.parametrize("exchange", ["solo", "allreduce", "gossip"])
def test_killed_actors_come_back_and_every_row_is_accounted_for(tmp_path, monkeypatch, meddler, exchange):
    out, tally = meddler.out, tmp_path / "tally"
    (tmp_path / "tally_env.py").write_text(TALLY)
    monkeypatch.syspath_prepend(str(tmp_path))
    actors = 2 if exchange == "solo" else 4
    env = {"env.id": "tally_env:Tally", "env.kwargs": json.dumps({"path": str(tally)}), "env.delay": 0.01}

    def kill_each() -> None:
        meddler.at_work()
        for i in range(actors):
            starts = len(meddler.started)
            os.kill(meddler.pid(f"actor {i}"), signal.SIGKILL)
            meddler.until(lambda s=starts: len(meddler.started) > s, "an actor is started again")
            steps = meddler.steps()
            meddler.until(lambda s=steps: meddler.steps() > s + 20 * CROWD, "the run goes on")
        os.kill(os.getpid(), signal.SIGTERM)

    code = meddler.run(options(out, exchange, **{**ENDLESS, **env}), kill_each)
    assert code == 75
    summary = check(out)
    assert summary["status"] == "interrupted"
    log = (out / "log.txt").read_text()
    assert all(f"actor {i} was killed by SIGKILL" in log for i in range(actors))
    assert [x for x, _ in meddler.started].count(0) == 1, "no learner was started again"
    assert summary["rows"]["rolled_back"] == 0
    # Of a killed actor, and of one that leaves, a step may have been made that nobody saw.
    taken = tally.stat().st_size
    assert summary["rows"]["produced"] <= taken <= summary["rows"]["produced"] + 2 * actors * CROWD
    meddler.check_nothing_left()


@pytest.mark.parametrize("exchange", ["solo", "gossip"])
def test_a_killed_learner_comes_back_with_its_actors(tmp_path, monkeypatch, meddler, exchange):
    out, tally = meddler.out, tmp_path / "tally"
    (tmp_path / "tally_env.py").write_text(TALLY)
    monkeypatch.syspath_prepend(str(tmp_path))
    env = {"env.id": "tally_env:Tally", "env.kwargs": json.dumps({"path": str(tally)}), "env.delay": 0.01}

    def kill() -> None:
        meddler.at_work()
        meddler.kill(0)
        at = meddler.saved()
        meddler.until(lambda: meddler.saved() > at, "a later checkpoint")
        os.kill(os.getpid(), signal.SIGTERM)

    assert meddler.run(options(out, exchange, **{**ENDLESS, **env}), kill) == 75
    summary = check(out)
    actors = sum(isinstance(x, str) for x, _ in meddler.started)
    taken = tally.stat().st_size
    assert summary["rows"]["produced"] <= taken <= summary["rows"]["produced"] + 2 * actors * CROWD
    if exchange == "solo":  # what was rolled back is not in the histogram either
        assert sum(summary["policy_lag"].values()) == summary["env_steps"] + summary["masked_steps"]
    assert [x for x, _ in meddler.started].count(0) == 2
    assert [x for x, _ in meddler.started].count("actor 0") == 2
    assert (summary["rows"]["rolled_back"] > 0) == (exchange == "solo")
    meddler.check_nothing_left()


@pytest.mark.parametrize("changes", [{}, {"algorithm": "a2c"}, {"exchange": "allreduce", "learners": 2, "actors": 4}])
def test_lockstep_is_the_same_twice(tmp_path, changes):
    digests = []
    for i in range(2):
        out = tmp_path / str(i)
        assert main(options(out, **{"decoupled.lockstep": True, "steps": 1000, **changes})) == 0
        summary = check(out)
        assert set(summary["policy_lag"]) == {"0"}
        assert summary["rows"]["in_flight"] == 0
        digests.append(summary["digest"])
    assert digests[0] == digests[1]


def test_forced_lag_is_seen(tmp_path):
    out = tmp_path / "run"
    changes = {"decoupled.publish_every": 8, "decoupled.lag_alarm": 6, "steps": 4000}
    assert main(options(out, **changes)) == 0
    summary = check(out)
    assert 7 <= summary["policy_lag_max"] <= 8 + 4
    assert "policy_lag" in (out / "log.txt").read_text()


def test_an_actor_that_dies_again_and_again_ends_the_run(tmp_path, meddler, capsys):
    def kill() -> None:
        meddler.at_work()
        os.kill(meddler.pid("actor 1"), signal.SIGKILL)

    assert meddler.run(options(meddler.out, **{**ENDLESS, "decoupled.restarts": 0}), kill) == 1
    assert "actor 1 was killed by SIGKILL" in (line := last_line(capsys))
    assert "decoupled.restarts (0) are used up" in line
    check(meddler.out)
    meddler.check_nothing_left()


def test_an_actor_that_hangs_is_named(tmp_path, meddler, capsys):
    env = {"env.id": "coterie.envs.testing:FlakyEnv", "log.stall": 8, "env.timeout": 60}  # more than a start takes
    env["env.kwargs"] = json.dumps({"how": "hang", "at": 30, "marker": str(tmp_path / "once")})
    assert meddler.run(options(meddler.out, **{**ENDLESS, **env}), lambda: None) == 1
    line = last_line(capsys)
    assert "actor " in line
    assert "hangs" in line
    meddler.check_nothing_left()


def test_an_actors_error_ends_the_run_with_its_reason(tmp_path, monkeypatch, capsys):
    (tmp_path / "odd_torso.py").write_text(
        "import multiprocessing\n"
        "from coterie.models.mlp import MLPTorso\n"
        "class Odd(MLPTorso):\n"
        "    def forward(self, x):\n"
        "        if 'actor-1' in multiprocessing.current_process().name:\n"
        "            raise ValueError('odd by design')\n"
        "        return super().forward(x)\n"
        "def odd(obs, config):\n"
        "    return Odd(obs[''].shape, config.hidden, config.activation, False)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    out = tmp_path / "run"
    assert main(options(out, **{"model.torso": "odd_torso:odd"})) == 1
    assert "actor 1: ValueError: odd by design" in last_line(capsys)
    assert "odd by design" in (out / "log.txt").read_text()
