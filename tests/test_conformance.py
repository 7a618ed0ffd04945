"""ONE test that every cell of acting x exchange passes, on both env backends: what reaches the learner is checked by
arithmetic, and rows produced = learned (+ in flight + dropped + rolled back, which inline acting has none of).
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from coterie.acting.table import ACTING
from coterie.algorithms.table import ALGORITHMS
from coterie.exchange.table import EXCHANGES
from coterie.roles.learner_process import LearnerProcess
from coterie.types import Array, Rollout, map_tensors
from tests.conftest import make_config
from tests.envs.env_harness import Seen, check_counting
from tests.support.cells import ON_POLICY, fast_and_slow
from tests.support.crew import crewed

CELLS = fast_and_slow(
    [
        (algorithm, acting, exchange, groups, backend)
        for algorithm in ALGORITHMS
        if algorithm != "bc"  # it does not learn from rollouts: test_bc.py
        for acting in ACTING
        for exchange in EXCHANGES
        for groups in (1, 2)
        for backend in ("workers", "envpool")
        if groups == 1 or acting != "central" or algorithm not in ON_POLICY  # in lockstep a host's envs are one group
    ],
    (1, 2, 4),
    (1, 3, 4),
)


def make_cell(algorithm, acting, exchange, groups, unroll, env="", **changes):
    """The config of a cell with four envs, whose value learning begins within the few rollouts of a test."""
    lengths: dict[str, object] = {}
    env = env or ("Pendulum-v1" if algorithm == "sac" else "CartPole-v1")
    if algorithm == "r2d2":
        lengths = dict.fromkeys(("r2d2.length", "r2d2.burn_in", "r2d2.stride"), unroll)
        lengths |= {"model.core": "lstm", "model.core_size": 8, "q.batch_size": 3, "q.learn_start": 4 * 4 * unroll}
    value = {"q.learn_start": 80, "q.batch_size": 16, "q.intensity": 2.0, "q.target_every": 30}
    return make_config(
        algorithm=algorithm,
        acting=acting,
        exchange=exchange,
        env=env,
        **{
            "env.num_envs": 4,
            "env.groups": groups,
            "actors": 1 if acting == "decoupled" else "auto",
            "decoupled.lockstep": algorithm in ON_POLICY,
            "central.lockstep": algorithm in ON_POLICY,
            "algo.unroll_length": unroll,
            "ppo.minibatch_size": 2 * unroll,
            "replay.capacity": 4000,
            **value,
            **lengths,
            **changes,
        },
    )


def rollouts(learner: LearnerProcess, count: int) -> list[Rollout]:
    """What the learner sees, copied, `count` times."""
    seen: list[Rollout] = []

    def keep(rollout: Rollout) -> bool:
        seen.append(map_tensors(torch.clone, rollout))
        return len(seen) == count

    learner.run(keep)
    return seen


def by_env(seen: list[Rollout]) -> list[Rollout]:
    """The same with each env's columns in one place. Groups that are not in step may fill a batch twice, so that some
    envs have more rollouts than others: as many as all have.
    """
    columns: dict[int, list[Rollout]] = {}
    for r in seen:
        for b, env in enumerate(r.env_id.tolist()):
            columns.setdefault(env, []).append(_columns([(r, b)]))
    return [_columns([(x, 0) for x in row]) for row in zip(*(columns[env] for env in sorted(columns)), strict=False)]


def _columns(picked: list[tuple[Rollout, int]]) -> Rollout:
    def join(name: str, axis: int) -> torch.Tensor:
        return torch.cat([getattr(r, name).narrow(axis, b, 1) for r, b in picked], axis)

    fields = {
        k: join(k, 0 if k in ("env_id", "core_state") else 1)
        for k, x in vars(picked[0][0]).items()
        if isinstance(x, torch.Tensor)
    }
    return Rollout(**fields, episodes=[game for r, b in picked for game in r.episodes if game[2] == int(r.env_id[b])])


def check_alignment(learner: LearnerProcess, seen: list[Rollout]) -> None:
    """What holds for any env: previous rows, masks, the seam between rollouts, the count of rows."""
    for before, after in pairwise(by_env(seen)):
        for key in ("is_first", "prev_action", "prev_reward"):
            assert torch.equal(getattr(before, key)[-1], getattr(after, key)[0])
    for r in seen:
        assert torch.equal(r.prev_action[1:], r.action)
        assert torch.equal(r.prev_reward[1:], r.reward)
        ended = r.terminated | r.truncated
        assert torch.equal(r.is_first[2:], ended[:-1])  # the fake step follows each end, and only there
        masked = ~r.mask
        assert not (ended & masked).any()
        assert not r.reward[masked].any()
        assert not ((r.behavior_log_prob == -42.42) | (r.behavior_value[:-1] == -42.42)).any()
        assert (r.behavior_log_prob <= 0).all() or learner.config.algorithm == "sac"  # densities
    produced = sum(int(r.mask.sum()) for r in seen)
    assert learner.progress.env_steps == produced
    assert learner.progress.masked == sum(int((~r.mask).sum()) for r in seen)
    if learner.config.algorithm in ON_POLICY:
        assert learner.progress.policy_lag_max == 0
    assert learner.progress.lags.total() == sum(r.mask.numel() for r in seen)


@pytest.mark.parametrize(("algorithm", "acting", "exchange", "groups", "backend"), CELLS)
def test_every_cell_aligns_the_rows(algorithm, acting, exchange, groups, backend):
    """Of envs in worker processes, and of EnvPool's own."""
    envpools = check_pendulum if algorithm == "sac" else check_cartpole
    check = check_counting_env if backend == "workers" else envpools
    check(algorithm, acting, exchange, groups)


def check_counting_env(algorithm, acting, exchange, groups, **changes):
    counting = {"env": "coterie.envs.testing:CountingEnv", "env.threads": 2}
    if algorithm == "sac":
        counting["env.kwargs"] = '{"continuous": true}'
    config = make_cell(algorithm, acting, exchange, groups, 7, **counting, **changes)
    with crewed(config) as learner:
        seen = rollouts(learner, 5)
        check_alignment(learner, seen)
    rows = of_envs(by_env(seen))
    effect = (2 + 4 * rows.action).sum(-1) if algorithm == "sac" else rows.action  # -1 to 1 are -2 to 6
    check_counting(rows, rows.obs, effect, length=5)
    assert rows.done.sum() >= 20


def of_envs(seen: list[Rollout]) -> Seen:
    """The rollouts one after the other, as the envs gave their rows: an episode's return and length are at its end."""

    def rows(name: str) -> Array:
        """T rows of each rollout, and row T of the last one where it has that."""
        length, each = len(seen[0].mask), [getattr(r, name) for r in seen]
        return torch.cat([*(x[:length] for x in each), each[-1][length:]]).numpy()

    terminated, truncated = (np.pad(rows(name), ((1, 0), (0, 0))) for name in ("terminated", "truncated"))
    returns, lengths = np.full(terminated.shape, np.nan), np.zeros(terminated.shape)
    for env in range(4):
        ends = np.flatnonzero((terminated | truncated)[:, env])
        games = [(score, n) for r in seen for score, n, of in r.episodes if of == env]
        returns[ends, env], lengths[ends, env] = np.array(games).T
    obs, reward, is_first, action = map(rows, ("obs", "prev_reward", "is_first", "action"))
    return Seen(obs, reward, terminated, truncated, is_first, returns, lengths, np.arange(4), action)


def check_pendulum(algorithm, acting, exchange, groups, **changes):
    """The pendulum's own equations are the arithmetic."""
    config = make_cell(algorithm, acting, exchange, groups, 9, **{"env.max_episode_steps": 12, **changes})
    with crewed(config) as learner:
        seen = rollouts(learner, 6)
        check_alignment(learner, seen)
    for r in seen:
        cos, sin, speed = (x[:-1][r.mask] for x in r.obs.unbind(-1))
        torque, after = 2 * r.action[..., 0][r.mask], r.obs[1:][r.mask][:, 2]
        torch.testing.assert_close(after, (speed + 0.05 * (15 * sin + 3 * torque)).clamp(-8, 8), atol=1e-3, rtol=1e-4)
        cost = torch.atan2(sin, cos) ** 2 + 0.1 * speed**2 + 0.001 * torque**2
        torch.testing.assert_close(r.reward[r.mask], -cost, atol=1e-3, rtol=1e-4)
        assert (r.action.abs() <= 1).all()
    assert sum(int(r.truncated.sum()) for r in seen) > 0


def check_cartpole(algorithm, acting, exchange, groups, **changes):
    """CartPole's own equations are the arithmetic: position and angle follow from the velocities of the row before."""
    config = make_cell(algorithm, acting, exchange, groups, 9, **{"env.max_episode_steps": 12, **changes})
    with crewed(config) as learner:
        seen = rollouts(learner, 6)
        check_alignment(learner, seen)
    tau = 0.02
    for r in seen:
        x, speed, angle, spin = r.obs.unbind(-1)
        ok = r.mask
        torch.testing.assert_close(x[1:][ok], (x + tau * speed)[:-1][ok], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(angle[1:][ok], (angle + tau * spin)[:-1][ok], atol=1e-5, rtol=1e-4)
        pushed = (speed[1:] - speed[:-1])[ok]
        assert torch.equal(pushed > 0, r.action[ok] == 1)  # the force of this row's action moves this row's cart
        assert (r.reward[ok] == 1).all()
    truncated = sum(int(r.truncated.sum()) for r in seen)
    lengths = [n for r in seen for _, n, _ in r.episodes]
    assert truncated == sum(n == 12 for n in lengths) > 0
    assert all(score == n for r in seen for score, n, _ in r.episodes)


@pytest.mark.parametrize("acting", ACTING)
def test_lstm_state_replayed_from_core_state_is_the_acting_state(acting):
    """The learner's pass from `core_state` gives the acting values and log-probs, over resets and rollouts."""
    config = make_cell(
        "vtrace", acting, "solo", 2, 7, "coterie.envs.testing:CountingEnv",
        **{
            "actors": 2 if acting == "decoupled" else "auto", "env.threads": 1, "model.core": "lstm",
            "model.core_size": 8, "model.last_action_reward": True,
            "optim.lr": 1e-12, "optim.eps": 1.0,  # the weights that evaluate are those that acted
        },
    )  # fmt: skip
    with crewed(config) as learner:
        seen = rollouts(learner, 4)
    assert any(r.is_first[1:].any() for r in seen)
    assert all(r.core_state.abs().sum() > 0 for r in seen[1:])
    near = 1e-5 if learner.resources.device.type == "cpu" else 1e-3  # cuDNN's LSTM multiplies in TF32
    for r in seen:
        inputs = r.inputs
        params, value, _ = learner.model(inputs, r.core_state)
        torch.testing.assert_close(value, r.behavior_value, atol=near, rtol=near)
        log_prob = learner.algorithm.dist.log_prob(params[:-1], r.action)
        torch.testing.assert_close(log_prob, r.behavior_log_prob, atol=near, rtol=near)
