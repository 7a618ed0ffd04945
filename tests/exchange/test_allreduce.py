"""Synchronous learners: L of b envs are one of L x b, they skip and stop together, and miss one that is gone."""

from __future__ import annotations

import math
import signal
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from coterie import presets
from coterie.algorithms.table import algorithm_class
from coterie.build.factory import ProcessContext, normalizers
from coterie.build.resources import resolve_config
from coterie.config import Config
from coterie.exchange import allreduce
from coterie.exchange.allreduce import AllReduce, memory
from coterie.exchange.base import NonFinite, Peers
from coterie.exchange.shared_sum import leave
from coterie.ops.optim import RMSProp
from coterie.parallel.board import Board
from coterie.parallel.processes import PeerLost
from coterie.parallel.shm import SharedArrays
from coterie.roles.learner_process import LearnerProcess
from coterie.types import Post, Rollout
from tests.conftest import make_config
from tests.exchange.harness import collect, expect, flat, gradients, make_setup, start

ROLLOUTS = 8


def config(exchange: str, envs: int, groups: int, **changes: object) -> Config:
    small = {"env.max_episode_steps": 15, "env.threads": 1, "precision": "fp32", "device": "cpu"}  # some episodes end
    # The rate falls noticeably: all must know the steps of all.
    run = {"exchange": exchange, "env.num_envs": envs, "env.groups": groups, "steps": 1000, "log.stall": 60.0}
    return presets.a2c("CartPole-v1", **{**small, **run, **changes})


def train(learner: LearnerProcess) -> dict[str, object]:
    """A few rollouts; what the learner has afterwards, without tensors, which would be sent as shared memory."""
    actions, masked = [], []

    def note(rollout: Rollout) -> bool:
        actions.append(rollout.action.numpy().copy())
        masked.append(int((~rollout.mask).sum()))
        return len(actions) == ROLLOUTS

    learner.run(note)
    result = {
        "weights": learner.params.data.numpy().copy(),
        "square": learner.exchange.state_dict()["square"].numpy().copy(),
        "moments": normalizers(learner.config, learner.model).read().numpy(),
        "actions": np.stack(actions),
        "masked": sum(masked),
        "total": learner.exchange.env_steps,
        "lr": learner.lr(learner.exchange.env_steps),
        "skipped": learner.exchange.guard.skipped,
    }
    learner.close()
    return result


def train_one_of_two(post: Post, rank: int, shared: SharedArrays, board: Board, settings: Config) -> None:
    torch.set_num_threads(1)
    post("result", train(LearnerProcess(resolve_config(settings), 0, ProcessContext(rank, board, shared))))


def test_two_learners_of_four_envs_are_one_of_eight():
    changes = {"model.normalize_obs": True, "reward.normalize": True, "optim.sqrt_scaling_from": 2}
    changes |= {"algo.normalize_advantage": False, "algo.unroll_length": 8}  # each learner would do it by its own share
    one = LearnerProcess(resolve_config(config("solo", 8, 2, **changes)))
    board, norms = Board(2), normalizers(one.config, one.model).normalizers
    shared = memory(make_setup(one.params, RMSProp(0.9, 1e-3), peers=Peers(0, board), norms=norms))
    children = [
        start(train_one_of_two, rank, shared, board, config("allreduce", 4, 1, learners=2, **changes))
        for rank in range(2)
    ]
    one = train(one)
    said = collect(children)
    assert [kind for s in said for kind, _ in s] == ["result", "end"] * 2, said
    two = [s[0][1] for s in said]
    for name in ("weights", "square", "moments"):
        assert np.array_equal(two[0][name], two[1][name]), name
    both = np.concatenate([two[0]["actions"], two[1]["actions"]], axis=2)
    assert np.array_equal(both, one["actions"])
    assert np.abs(two[0]["weights"] - one["weights"]).max() < 1e-6
    np.testing.assert_allclose(two[0]["square"], one["square"], rtol=1e-3, atol=1e-9)
    np.testing.assert_allclose(two[0]["moments"], one["moments"], rtol=1e-6, atol=1e-9)
    assert two[0]["total"] == two[1]["total"] == one["total"] < 8 * 8 * ROLLOUTS
    assert two[0]["masked"] + two[1]["masked"] == one["masked"] == 8 * 8 * ROLLOUTS - one["total"] > 0
    assert two[0]["lr"] == one["lr"]
    assert one["moments"][0] == one["total"]  # every row of all envs, once
    first = LearnerProcess(resolve_config(config("solo", 8, 2, **changes)))
    assert np.abs(first.params.data.numpy() - one["weights"]).max() > 1e-3  # it has learned
    first.close()


def test_learners_that_divide_by_deviations_of_their_own_stay_equal():
    changes = {"algorithm": "vtrace", "algo.normalize_advantage": True, "learners": 2}
    board = Board(2)
    one = LearnerProcess(resolve_config(config("allreduce", 4, 1, **changes)), 0, ProcessContext(0, board, None))
    shared = memory(make_setup(one.params, RMSProp(0.9, 1e-3), peers=Peers(0, board)))
    children = [start(train_one_of_two, rank, shared, board, config("allreduce", 4, 1, **changes)) for rank in (0, 1)]
    first, second = (said[0][1] for said in collect(children))
    assert np.array_equal(first["weights"], second["weights"])
    assert not np.array_equal(first["weights"], one.params.data.numpy())
    one.close()


# --- the exchange alone ---


def shared_by_two() -> SharedArrays:
    return memory(make_setup(flat(50, 20), RMSProp(0.9, 1e-3), peers=Peers(0, Board(2))))


def exchange(rank: int, shared: SharedArrays, *, skip: bool = True, **how) -> AllReduce:
    torch.set_num_threads(1)
    return AllReduce(make_setup(flat(50, 20), skip=skip, timeout=60.0, peers=Peers(rank, Board(2), shared), **how))


def go(x: AllReduce, grad: torch.Tensor, lr: float = 1.0) -> float:
    x.params.grad.copy_(grad)
    return x.step(x.params, lr)


def skip_and_stop(post: Post, rank: int, shared: SharedArrays, skips: bool) -> None:
    """Three steps; at the second learner 1's gradient is bad, in the end with the order to stop."""
    with exchange(rank, shared, rule=RMSProp(0.9, 1e-3)) as x:
        grads = gradients(x.params, 4, seed=rank)
        go(x, grads[0], 0.1)
        before = [x.params.data.clone(), x.state_dict()["square"].clone()]
        poisoned = grads[1].clone()
        if rank == 1:
            poisoned[x.params.slices["w1"].start] = math.nan
        norm = go(x, poisoned, 0.1)
        same = torch.equal(x.params.data, before[0]) and torch.equal(x.state_dict()["square"], before[1])
        post("skipped", (x.guard.skipped, same, bool(x.params.grad.any()), math.isnan(norm)))
        go(x, grads[2], 0.1)
        moved = not torch.equal(x.params.data, before[0])
        post("weights", (x.params.data.numpy().copy(), x.state_dict()["square"].numpy().copy(), moved, x.guard.skipped))
        x.guard.skip, x.guard.in_a_row = skips, 1000
        if rank == 0:
            grads[3][0] = math.inf
        try:
            go(x, grads[3], 0.1)
        except (NonFinite, PeerLost) as error:
            post("stopped", str(error))


@pytest.mark.parametrize("skips", [False, True])
def test_a_bad_gradient_of_one_is_skipped_or_stops_all(skips):
    shared = shared_by_two()
    said = collect([start(skip_and_stop, rank, shared, skips) for rank in range(2)])
    assert [[kind for kind, _ in s] for s in said] == [["skipped", "weights", "stopped", "end"]] * 2, said
    for s in said:
        assert s[0][1] == (1, True, False, True)
        assert s[1][1][2:] == (True, 1)
        assert np.isfinite(s[1][1][0]).all()
        assert s[3][1] == "ended with exit code 0"
    assert np.array_equal(said[0][1][1][0], said[1][1][1][0])
    assert np.array_equal(said[0][1][1][1], said[1][1][1][1])
    assert said[0][2][1] == "the gradient of w0 is not finite" + ", nor were 1000 before it" * skips
    assert said[1][2][1] == "allreduce: the gradient of another learner is not finite"


def agree(post: Post, rank: int, shared: SharedArrays) -> None:
    """Learner 0 has an order after rollout 0, and until all know of it; learner 1 wants to stop after rollout 1."""
    with exchange(rank, shared) as x:
        for k, grad in enumerate(gradients(x.params, 3, seed=rank)):
            x.count(10 * (rank + 1) + k)
            go(x, grad)
            x.after_rollout(x.params)
            post("agreed", (*x.agree(rank == 0 and k < 2, rank == 1 and k == 1), x.env_steps))


def test_rows_orders_and_the_end_travel_with_the_gradients():
    shared = shared_by_two()
    said = collect([start(agree, rank, shared) for rank in range(2)])
    agreed = [(False, False, 30), (True, False, 62), (False, True, 96)]
    assert said == [[*(("agreed", what) for what in agreed), ("end", "ended with exit code 0")]] * 2


def test_a_learner_that_waits_for_anothers_state_keeps_its_own_where_that_one_dies():
    """Else it would save cleared weights."""
    shared = shared_by_two()
    x = exchange(1, shared, rule=RMSProp(0.9, 1e-3))
    x.across = SimpleNamespace()
    state = {"weights": x.params.data, **x.state_dict()}
    before = {name: tensor.clone() for name, tensor in state.items()}
    leave(shared, 0)
    with pytest.raises(PeerLost):
        x._join()
    assert all(torch.equal(before[name], tensor) for name, tensor in state.items())
    assert before["weights"].any()


def step_and_wait(post: Post, rank: int, shared: SharedArrays) -> None:
    with exchange(rank, shared) as x:
        go(x, gradients(x.params, 1)[0])
        post("met", rank)
        signal.pause()


def test_learners_of_one_machine_open_no_port():
    shared = shared_by_two()
    children = [start(step_and_wait, rank, shared) for rank in range(2)]
    try:
        for rank, child in enumerate(children):
            assert expect(child, {"met"}) == ("met", rank)
        for child in children:
            assert psutil.Process(child.process.pid).net_connections("inet") == []
    finally:
        for child in children:
            child.kill()


def test_machines_with_more_learners_have_longer_schedules_and_train_the_same(monkeypatch):
    monkeypatch.setattr(allreduce, "MachineGroup", lambda machine, ended: machine)
    monkeypatch.setattr(allreduce, "Machine", lambda at, machines, kind, *_, **__: kind)

    def kind(**changes: Any) -> str:
        config = resolve_config(make_config(algorithm="ppo", **{"allreduce.bind": "127.0.0.1:1"}, **changes))
        settings, none = algorithm_class(config).lockstep_settings(config), SimpleNamespace(slices={}, size=0)
        return allreduce._between_machines(  # type: ignore[return-value]
            SimpleNamespace(
                config=config, peers=None, params=none, moments=none, lockstep_settings=settings, timeout=1.0
            )
        )

    longer = {f"{name}.warmup": 9 for name in ("algo.entropy_schedule", "ppo.clip_schedule", "optim.schedule")}
    assert kind(**longer) == kind()
    assert kind(**{"algo.gamma": 0.5}) != kind()
