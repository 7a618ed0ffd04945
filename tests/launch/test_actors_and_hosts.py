"""Runs with actors (decoupled acting) or env hosts (central): killed, resumed, the same twice, and their row counts."""

from __future__ import annotations

import os
import re
import signal
from functools import partial

import pytest
import torch

from coterie.acting.child_processes import WorkerReport
from coterie.cli.main import main
from coterie.envs.news import EnvNews, Means
from coterie.launch.ledger import Ledger
from coterie.parallel.board import Board
from coterie.parallel.slots import Slots
from coterie.runs import checkpoint
from coterie.runs.metrics import read_metrics
from tests.conftest import VECTOR, make_config
from tests.support.remote_workers import goes_on
from tests.support.runs import (
    CROWD,
    ENDLESS,
    central_options,
    check_rows,
    decoupled_options,
    inline_options,
    last_checkpoint,
)

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


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (partial(inline_options, learners=1), "RepeatingInline"),
        (decoupled_options, "LosingDecoupled"),
        (central_options, "RepeatingCentral"),
    ],
)
def test_the_accounts_show_a_rollout_that_was_lost_or_learned_twice(tmp_path, options, part):
    out = tmp_path / "run"
    assert main(options(out, "solo", steps=1000, **{"plugins.acting": f"tests.support.lossy:{part}"})) == 0
    with pytest.raises(AssertionError, match="not accounted for"):
        check_rows(out)
    assert "rows are not accounted for" in (out / "log.txt").read_text()


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


def test_stages_grow_by_what_each_process_reports_though_it_starts_again():
    ledger = Ledger(make_config(), VECTOR, Board(1, 2), None, 0)
    for row, seconds in [(1, 10.0), (2, 10.0), (2, 12.0), (0, 0.0), (2, 1.0)]:
        if row:
            ledger.take_acted(row, WorkerReport({"actor/env": seconds}, 1e9, None, EnvNews([], Means()), []))
        else:
            ledger.lose_actor(2)
    assert ledger.stages == {"actor/env": (10 + 12 + 1) / 2}


def test_a_checkpoint_keeps_how_many_envs_actors_have_replaced():
    board = Board(1, 2)
    for row in range(3):
        board.write(row, {"replaced": 2})
    state = Ledger(make_config(), VECTOR, board, None, 0).state([board.read(0)], last=False)
    assert state["learners"][0]["replaced"] == 6


@pytest.mark.parametrize(("acting", "name"), [("decoupled", "actor"), ("central", "host")])
def test_killed_actors_and_hosts_are_restarted_and_lose_at_most_a_rollout(meddler, tally, acting, name):
    def kill_each() -> None:
        meddler.at_work()
        for i in range(2):
            meddler.kill(f"actor {i}")
            goes_on(meddler)
        meddler.interrupt()

    assert meddler.run(OPTIONS[acting](meddler.out, **{**ENDLESS, **tally.options}), kill_each) == 75
    summary = check_rows(meddler.out)
    assert summary["status"] == "interrupted"
    assert all(f"{name} {i} was killed by SIGKILL" in meddler.log() for i in range(2))
    assert meddler.starts(0) == 1, "the learner was not restarted"
    assert (summary["restarts"], summary["actor_restarts"], summary["rows"]["rolled_back"]) == (0, 2, 0)
    assert acting == "central" or summary["rows"]["dropped"] <= 2 * 5 * CROWD // 2
    # One that is killed or shuts down may have made a step of each of its envs that is not counted.
    assert summary["rows"]["produced"] <= tally.steps <= summary["rows"]["produced"] + 4 * CROWD


@slow
def test_a_killed_learner_comes_back_with_its_hosts(meddler, tally):
    """Of long rollouts, whose rows it has received and not learned from."""

    def kill() -> None:
        meddler.at_work()
        meddler.kill(0)
        meddler.saves_again()
        meddler.interrupt()

    changes = {**ENDLESS, **tally.options, "algo.unroll-length": 20, "log.checkpoint_every": 4}
    assert meddler.run(central_options(meddler.out, **changes), kill) == 75
    summary = check_rows(meddler.out)
    actors = sum(isinstance(one, str) for one, _ in meddler.started)
    assert summary["rows"]["produced"] <= tally.steps <= summary["rows"]["produced"] + 2 * actors * CROWD
    assert meddler.starts(0) == meddler.starts("actor 0") == 2


@pytest.mark.parametrize(("acting", "exchange"), [("decoupled", "solo"), ("central", "solo"), ("decoupled", "gossip")])
def test_a_lone_learner_that_is_killed_goes_on_from_what_it_had_last_reported(meddler, tally, acting, exchange):
    """There is no checkpoint between the first and its death."""
    known = []

    def kill() -> None:
        meddler.until(lambda: meddler.steps() > 150, "it has learned")
        known.append(read_metrics(meddler.out)[-1])
        meddler.until(lambda: meddler.steps() > known[0]["env_steps"] + 150, "it has reported that")
        os.kill(meddler.pid(0), signal.SIGKILL)
        meddler.until(lambda: meddler.starts(0) == 2, "it is started again")
        known.append(last_checkpoint(meddler.out))
        meddler.until(lambda: meddler.steps() > known[1][1]["env_steps"] + 200, "it goes on")
        meddler.interrupt()

    changes = {**ENDLESS, **tally.options, "log.checkpoint_every": 1e6, "log.keep": 100, "env.num_envs": CROWD}
    changes |= {"learners": 1, "actors": 2}
    assert meddler.run(OPTIONS[acting](meddler.out, exchange, **changes), kill) == 75
    before, (tensors, state) = known
    (counts,) = state["learners"]
    (back,) = re.findall(r"go back to step_(\d+)", meddler.log())
    assert int(back) == counts["learned"] >= before["env_steps"]
    assert counts["learner_steps"] >= before["learner_steps"]
    first, _ = checkpoint.load(min((meddler.out / "checkpoints").glob("step_*")))
    for name in ("torso.weight_0", "obs_norm.obs_.count"):
        assert not torch.equal(tensors["learner_0/model"][name], first["learner_0/model"][name])
    assert all(torch.equal(x, first["learner_0/exchange"][k]) for k, x in tensors["learner_0/exchange"].items())
    summary = check_rows(meddler.out)
    assert summary["learner_steps"] > counts["learner_steps"]
    rows, actors = summary["rows"], sum(isinstance(one, str) for one, _ in meddler.started)
    assert rows["rolled_back"] <= 200  # 400 in a second
    assert rows["produced"] <= tally.steps <= rows["produced"] + 2 * actors * CROWD
    assert sum(summary["policy_lag"].values()) == summary["env_steps"] + summary["masked_steps"]
    steps = [line["learner_steps"] for line in read_metrics(meddler.out)]
    assert steps == sorted(steps)
    assert meddler.starts(0) == meddler.starts("actor 0") == 2


def test_envs_that_start_programs_are_made_in_a_host(tmp_path):
    """ViZDoom's: a host makes them in several threads, beside its gRPC client, which must not mind the forks."""
    sizes = ["--env.num-envs", "8", "--central.batch-size", "8", "--model.torso", "a3c", "--steps", "200"]
    args = ["seed-vtrace", "--env", "Basic-v1", *sizes, "--algo.unroll-length", "5", "--log.stall", "20"]
    assert main(["train", *args, "--out", str(tmp_path / "run")]) == 0
    assert not check_rows(tmp_path / "run").get("restarts", 0)
