"""Runs with actors (decoupled acting) or env hosts (central): killed, resumed, the same twice, and their row counts."""

from __future__ import annotations

import json
import os
import signal

import pytest

from coterie.cli.main import main
from coterie.launch.ledger import Ledger
from coterie.parallel.board import Board
from coterie.parallel.slots import Slots
from coterie.runs.metrics import read_metrics
from tests.conftest import VECTOR, make_config
from tests.support.runs import CROWD, ENDLESS, central_options, check_rows, decoupled_options, last_line

slow = pytest.mark.slow
OPTIONS = {"decoupled": decoupled_options, "central": central_options}
METRICS = {
    "decoupled": {"stage/wait", "stage/actor/env", "slots/waiting", "policy_lag/mean"},
    "central": {
        "stage/wait", "stage/host/env", "inference/batch", "inference/envs", "wire/bytes_in_per_step",
        "policy_lag/mean", "latency/p50_ms",
    },
}  # fmt: skip


@pytest.mark.parametrize("acting", ["decoupled", "central"])
def test_a_run_with_actors_or_hosts_finishes_evaluates_and_resumes(tmp_path, acting):
    out = tmp_path / "run"
    assert main(OPTIONS[acting](out, **{"eval.every": 1000, "eval.episodes": 2})) == 0
    summary = check_rows(out)
    assert summary["status"] == "finished"
    # A learner finishes the batches that it has begun.
    assert 3000 <= summary["env_steps"] <= 3000 + 4 * CROWD * 5
    assert summary["rows"]["rolled_back"] == 0
    lines = read_metrics(out)
    assert any("eval/return" in line for line in lines)
    assert METRICS[acting] <= {k for line in lines for k in line}
    assert sum(summary["policy_lag"].values()) == summary["env_steps"] + summary["masked_steps"]
    assert main(["resume", str(out), "--steps", "4000"]) == 0
    before, summary = summary["rows"], check_rows(out)
    assert summary["env_steps"] >= 4000
    if acting == "decoupled":
        assert before["dropped"] == 0
        assert summary["rows"]["dropped"] == before["in_flight"]
    else:
        assert summary["rows"]["dropped"] >= before["in_flight"] + before["dropped"]
        # Of each env the rollouts that wait, in a batch or for one, and the one that it is at.
        assert summary["rows"]["in_flight"] + summary["rows"]["dropped"] <= 2 * 2 * CROWD * 5 * (3 + 2 + 1)
    # Both are of the whole run, with its life before the resume.
    lags, by_row = {int(k): n for k, n in summary["policy_lag"].items()}, summary.get("policy_lag_by_row", [0])
    mean = sum(lag * n for lag, n in lags.items()) / sum(lags.values())
    assert acting == "central" or sum(by_row) / len(by_row) == pytest.approx(mean, abs=1e-3)


@pytest.mark.parametrize("handed_over", [True, False])
def test_rows_of_an_actor_killed_at_its_slot_are_dropped_only_if_they_were_not_handed_over(handed_over):
    """An actor can be killed between filling a slot and counting it."""
    config, board = make_config(), Board(1, 1)
    ledger = Ledger(config, VECTOR, board, None, 0)
    slots = Slots({"x": ((5, 2), "int64")}, 1, 2, 2)
    board.write(1, {"produced": 100, "delivered": 90})
    slots.open(0, 0)
    at = slots.take(0)
    slots.promise(0, at, 100)
    if handed_over:
        slots.fill(at)
    ledger.lose_actor(1, slots.delivered(0))
    left = 100 if handed_over else 90
    assert (ledger.dropped, board.read(1)["produced"], board.read(1)["delivered"]) == (100 - left, left, left)


@pytest.mark.parametrize(("acting", "name"), [("decoupled", "actor"), ("central", "host")])
def test_killed_actors_and_hosts_are_restarted_and_every_row_is_accounted_for(meddler, tally, acting, name):
    def kill_each() -> None:
        meddler.at_work()
        for i in range(2):
            meddler.kill(f"actor {i}")
            steps = meddler.steps()
            meddler.until(lambda s=steps: meddler.steps() > s + 20 * CROWD, "the run goes on")
        meddler.interrupt()

    assert meddler.run(OPTIONS[acting](meddler.out, **{**ENDLESS, **tally.options}), kill_each) == 75
    summary = check_rows(meddler.out)
    assert summary["status"] == "interrupted"
    assert all(f"{name} {i} was killed by SIGKILL" in meddler.log() for i in range(2))
    assert meddler.starts(0) == 1, "the learner was not restarted"
    assert summary["rows"]["rolled_back"] == 0
    # One that is killed or shuts down may have made a step of each of its envs that is not counted.
    assert summary["rows"]["produced"] <= tally.steps <= summary["rows"]["produced"] + 4 * CROWD
    meddler.check_nothing_left()


@pytest.mark.parametrize(
    ("acting", "exchange", "changes"),
    [
        ("decoupled", "solo", {}),
        pytest.param("decoupled", "gossip", {}, marks=slow),
        # Long rollouts, whose rows the learner has received and not learned from.
        pytest.param("central", "solo", {"algo.unroll-length": 20, "log.checkpoint_every": 4}, marks=slow),
    ],
)
def test_a_killed_learner_comes_back_with_its_actors_or_hosts(meddler, tally, acting, exchange, changes):
    def kill() -> None:
        meddler.at_work()
        meddler.kill(0)
        meddler.saves_again()
        meddler.interrupt()

    assert meddler.run(OPTIONS[acting](meddler.out, exchange, **{**ENDLESS, **tally.options, **changes}), kill) == 75
    summary = check_rows(meddler.out)
    actors = sum(isinstance(one, str) for one, _ in meddler.started)
    assert summary["rows"]["produced"] <= tally.steps <= summary["rows"]["produced"] + 2 * actors * CROWD
    if exchange == "solo" and acting == "decoupled":  # what was rolled back is not in the histogram either
        assert sum(summary["policy_lag"].values()) == summary["env_steps"] + summary["masked_steps"]
    assert meddler.starts(0) == meddler.starts("actor 0") == 2
    assert (summary["rows"]["rolled_back"] > 0) == (exchange == "solo")
    meddler.check_nothing_left()


@pytest.mark.parametrize(
    ("acting", "changes"),
    [
        ("decoupled", {"exchange": "allreduce", "learners": 2, "actors": 4}),
        ("central", {}),
        pytest.param("decoupled", {"algorithm": "a2c"}, marks=slow),
        pytest.param("central", {"exchange": "allreduce", "learners": 2, "actors": 2}, marks=slow),
        pytest.param("central", {"model.core": "lstm", "model.core-size": 8, "algorithm": "a2c"}, marks=slow),
    ],
)
def test_acting_in_lockstep_gives_the_same_weights_twice(tmp_path, acting, changes):
    digests = []
    for i in range(2):
        out = tmp_path / str(i)
        assert main(OPTIONS[acting](out, **{f"{acting}.lockstep": True, "steps": 600, **changes})) == 0
        summary = check_rows(out)
        assert set(summary["policy_lag"]) == {"0"}
        assert summary["rows"]["in_flight"] == 0
        digests.append(summary["digest"])
    assert digests[0] == digests[1]


def test_weights_published_every_eighth_step_are_up_to_eight_steps_old(tmp_path):
    out = tmp_path / "run"
    assert main(decoupled_options(out, **{"decoupled.publish_every": 8, "steps": 4000})) == 0
    assert 7 <= check_rows(out)["policy_lag_max"] <= 8 + 4


@slow
def test_a_run_with_newest_frames_on_the_wire_learns_the_same(tmp_path):
    """Lives are lost on the way, where EnvPool's stacks go on, and episodes end, where they do not."""
    digests, sent = [], []
    changes = {"central.lockstep": True, "actors": 1, "steps": 1200, "algo.unroll-length": 10, "model.torso": "a3c"}
    for newest in (False, True):
        out = tmp_path / str(newest)
        args = central_options(out, **{**changes, "central.newest_frame": newest})
        args[args.index("CartPole-v1")] = "Breakout-v5"
        assert main(args) == 0
        summary = check_rows(out)
        assert 0 < summary["episodes"] < summary["masked_steps"]
        digests.append(summary["digest"])
        sent.append(
            [line["wire/bytes_in_per_step"] for line in read_metrics(out) if "wire/bytes_in_per_step" in line][-1]
        )
    assert digests[0] == digests[1]
    assert sent[1] < sent[0] / 2


def test_an_actor_that_dies_more_often_than_allowed_ends_the_run(meddler, capsys):
    def kill() -> None:
        meddler.at_work()
        os.kill(meddler.pid("actor 1"), signal.SIGKILL)

    assert meddler.run(decoupled_options(meddler.out, **{**ENDLESS, "decoupled.restarts": 0}), kill) == 1
    assert "actor 1 was killed by SIGKILL" in (line := last_line(capsys))
    assert "decoupled.restarts (0) are used up" in line
    check_rows(meddler.out)
    meddler.check_nothing_left()


@slow
def test_an_actor_that_hangs_is_named(tmp_path, meddler, capsys):
    env = {"env.id": "coterie.envs.testing:FlakyEnv", "log.stall": 8, "env.timeout": 60}  # more than a start takes
    env["env.kwargs"] = json.dumps({"how": "hang", "at": 30, "marker": str(tmp_path / "once")})
    assert meddler.run(decoupled_options(meddler.out, **{**ENDLESS, **env})) == 1
    line = last_line(capsys)
    assert "actor " in line
    assert "hangs" in line
    meddler.check_nothing_left()


def test_an_actors_error_ends_the_run_with_its_reason(meddler, odd, capsys):
    assert main(decoupled_options(meddler.out, **{"model.torso": "odd:actor_raises"})) == 1
    assert "actor 1: ValueError: odd by design" in last_line(capsys)
    assert "odd by design" in meddler.log()
