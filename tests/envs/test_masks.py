"""Action masks from the env to the learner: the env of these tests raises at an illegal choice."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.wrappers import TimeLimit

import coterie
from coterie.algorithms.q_base import greedy
from coterie.envs.gym import describe, layout, make_instance
from coterie.envs.make import make_envs, make_spec
from coterie.envs.spaces import random_actions
from coterie.envs.team import Team
from coterie.errors import ConfigError, CoterieError
from coterie.models.build import Network
from coterie.ops.dist import ILLEGAL
from coterie.remote.rollout_service import check_rollout
from coterie.types import MASK, Inputs
from coterie.wire.codec import Refused, check_values
from tests.conftest import make_config
from tests.support.cells import ON_POLICY
from tests.support.crowd import Crowd
from tests.support.masked import Masked
from tests.support.services import recorded

MASKED = "tests.support.masked:Masked"


def config_of(where: str = "obs", kind: str = "discrete", **changes: Any) -> Any:
    kwargs = json.dumps({"where": where, "kind": kind} | changes.pop("kwargs", {}))
    return make_config(**{"env.id": MASKED, "env.kwargs": kwargs, "env.num_envs": 4, "env.decorrelate": 7, **changes})


@pytest.mark.parametrize("limit", [0, 3])
@pytest.mark.parametrize("kind", ["discrete", "multi", "mixed"])
@pytest.mark.parametrize("where", ["obs", "info", "sample", "method"])
def test_a_mask_arrives_from_wherever_the_env_has_it(where: str, kind: str, limit: int) -> None:
    """Also where an episode is truncated: the value of the best legal action is bootstrapped there."""
    config = config_of(where, kind, **{"env.max_episode_steps": limit})
    spec, rng = make_spec(config.env, config.atari), np.random.default_rng(0)
    assert spec.masked
    assert list(spec.obs) == ["count" if where == "obs" else "observation", "action_mask"] or where == "obs"
    with make_envs(config.env, config.atari, seed=1) as envs:
        for _ in range(15):
            seen = envs.recv(0)
            mask = seen.obs["action_mask"]
            assert mask.dtype == bool
            assert mask[seen.terminated].all()
            count = next(x for k, x in seen.obs.items() if k != "action_mask")
            expected = (count + np.arange(4)) % 3 != 0
            np.testing.assert_array_equal(mask[~seen.terminated, :4], expected[~seen.terminated])
            envs.send(0, random_actions(spec.action, rng, 4, seen.obs))


class Silent(Masked):
    """Its info has no mask at step 3."""

    def _see(self) -> tuple[Any, dict[str, Any]]:
        obs, info = super()._see()
        return obs, {} if self.count == 3 else info


@pytest.mark.parametrize(("env", "where"), [(Masked, "obs"), (Masked, "info"), (Silent, "info")])
def test_all_is_legal_where_an_episode_is_truncated_and_no_action_is_legal_or_the_mask_is_missing(
    env: type[Masked], where: str
) -> None:
    name = f"{env.__module__}:{env.__name__}"
    config = config_of(where, "multi", kwargs={"stuck": 3}, **{"env.id": name, "env.max_episode_steps": 3})
    spec, rng, cut = make_spec(config.env, config.atari), np.random.default_rng(0), 0
    with make_envs(config.env, config.atari, seed=1) as envs:
        for _ in range(9):
            seen = envs.recv(0)
            assert seen.obs[MASK][seen.truncated].all()
            cut += seen.truncated.sum()
            envs.send(0, random_actions(spec.action, rng, 4, seen.obs))
    assert cut > 4
    assert coterie.check_env(lambda: TimeLimit(env(where, "multi", stuck=3), 3), steps=60) == []


STUCK = f"env 8 of '{MASKED}': its action_mask allows no action at step %d of an episode"


@pytest.mark.parametrize(
    ("where", "kind", "changes", "says"),
    [
        ("short", "mixed", {}, r"action_mask array.* does not fit the 9 choices of Dict\("),
        ("dict", "multi", {}, r"action_mask {'x': .* does not fit the 9 choices of Tuple\("),
        ("number", "discrete", {}, r"action_mask 1 does not fit the 4 choices of Discrete\(4, start=1\)$"),
        ("inside", "multi", {}, r"observation 'in.action_mask' has shape \(9,\); an action mask is the entry"),
        ("info", "multi", {"env.action_repeat": 2}, "env.action_repeat: must be 1; .*:Masked has action masks"),
        ("obs", "multi", {"env.decorrelate": 0, "kwargs": {"stuck": 0}}, STUCK % 0),
        ("obs", "multi", {"env.decorrelate": 0, "kwargs": {"stuck": 3}}, STUCK % 3),
        ("obs", "multi", {"env.decorrelate": 90, "kwargs": {"stuck": 3}}, STUCK % 3),
    ],
)
def test_what_is_no_mask_is_one_line(where: str, kind: str, changes: dict[str, Any], says: str) -> None:
    def step() -> None:
        config = config_of(where, kind, **changes)
        spec = make_spec(config.env, config.atari)
        with make_envs(config.env, config.atari, seed=1, first_env_id=8) as envs:
            for _ in range(4):
                envs.send(0, random_actions(spec.action, np.random.default_rng(0), 4, envs.recv(0).obs))

    with pytest.raises(CoterieError, match=says) as caught:
        step()
    assert not caught.value.trace


VECTOR = spaces.Box(-np.inf, np.inf, (3,), np.float32)


class Named(Crowd):
    """Continuous actions, and a vector that is named like an action mask."""

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Dict({"seen": VECTOR, MASK: VECTOR})

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Box(-1, 1, (1,), np.float32)

    def step(self, actions: dict[str, Any]) -> tuple[Any, ...]:
        return super().step(dict.fromkeys(actions, 0))

    def _see(self, agents: Sequence[str]) -> dict[str, Any]:
        return {a: {"seen": x, MASK: x} for a, x in super()._see(agents).items()}


@pytest.mark.parametrize("bare", [False, True])
def test_the_last_observation_of_continuous_actions_is_kept_whatever_its_name(bare: bool) -> None:
    env = Team("named", Named(lives=[(0, 1), (0, 2)], bare=bare), 0)
    declared = describe("named", env, 0)
    arrays = {name: np.zeros(*of) for name, of in layout(declared, 2).items()}
    instance = make_instance("named", env, 1, range(2), arrays, declared.mask)
    instance.reset()
    for _ in range(2):
        instance.step()
        np.testing.assert_array_equal(arrays[f"obs/{MASK}"], arrays["obs/seen"])


VALUE = {"q.learn_start": 90, "q.batch_size": 8, "q.intensity": 1.0, "q.target_every": 40, "replay.capacity": 2000}
C51 = {"q.atoms": 7, "q.v_min": 0.0, "q.v_max": 9.0, "q.dueling": 8}
LSTM = {"model.core": "lstm", "model.core_size": 8, "model.last_action_reward": True}
GRU = {"model.core": "gru", "model.core_size": 8}
GTRXL = {"model.core": "gtrxl", "model.core_size": 8, "model.core_memory": 4}
R2D2 = {**LSTM, "r2d2.length": 5, "r2d2.burn_in": 5, "r2d2.stride": 5, "q.batch_size": 3, "replay.alpha": 0.9}
RUNS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "a2c": ("a2c", "mixed", {}),
    "a2c, gtrxl": ("a2c", "mixed", GTRXL),
    "a2c, own network": ("a2c", "mixed", {"model.network": "tests.support.networks:Counter"}),
    "ppo, lstm": ("ppo", "mixed", {**LSTM, "ppo.minibatch_size": 10}),
    "vtrace, replay": ("vtrace", "multi", {**GRU, "vtrace.replay_capacity": 8, "vtrace.minibatch": 4}),
    "dqn": ("dqn", "discrete", VALUE),
    "c51": ("dqn", "discrete", {**VALUE, **C51, "q.noisy": True}),
    "dqn, own network": ("dqn", "discrete", {**VALUE, "model.network": "tests.support.networks:Mixer"}),
    "r2d2": ("r2d2", "discrete", {**VALUE, **R2D2}),
    "r2d2, gtrxl": ("r2d2", "discrete", {**VALUE, **R2D2, **GTRXL}),
    "r2d2, own network": ("r2d2", "discrete", {**VALUE, **R2D2, "model.network": "tests.support.networks:Counter"}),
}


@pytest.mark.parametrize(
    "acting", ["inline", *(pytest.param(x, marks=pytest.mark.slow) for x in ("decoupled", "central"))]
)
@pytest.mark.parametrize("name", RUNS)
def test_no_algorithm_takes_an_illegal_choice(name: str, acting: str, tmp_path: Any) -> None:
    """In training, in evaluation, greedy and sampled, and as a policy."""
    algorithm, kind, changes = RUNS[name]
    lockstep = algorithm in ON_POLICY
    run = config_of(
        "info", kind, algorithm=algorithm, acting=acting, out=str(tmp_path / "run"), steps=400, learners=1,
        **{
            "algo.unroll_length": 5, "reward.clip": "none", "actors": 1 if acting == "decoupled" else "auto",
            "decoupled.lockstep": lockstep, "central.lockstep": lockstep, **changes,
        },
    )  # fmt: skip
    summary = coterie.train(run, quiet=True)
    assert summary["status"] == "finished"
    assert np.isfinite(summary["mean_return"])
    for sampled in (False, True):
        assert coterie.evaluate_run(tmp_path / "run", episodes=3, sampled=sampled)["episodes"] == 3
    policy, obs = coterie.load(tmp_path / "run"), np.ones((6, 1), np.float32)
    only = np.zeros((6, 4 if kind == "discrete" else 9), bool)
    only[:, [-1] if kind == "discrete" else [1, 6, 8]] = True
    for sampled in (False, True):
        action = policy(
            obs, action_mask=only, sampled=sampled, **({"reward": np.zeros(6)} if policy.model.recurrent else {})
        )
        a = action["a"] if kind == "mixed" else action
        np.testing.assert_array_equal(a if kind == "discrete" else a[0], [4] * 6 if kind == "discrete" else [1] * 6)
        if kind != "discrete":
            np.testing.assert_array_equal(a[1], [[2, 1]] * 6)
    for masks, says in ({}, "this policy needs one"), ({"action_mask": only & (obs < 0)}, "nothing is legal in"):
        with pytest.raises(ConfigError, match=f"action_mask: {says}"):
            policy(obs, **masks)


def test_an_illegal_action_is_worse_than_the_worst_return_of_a_distribution() -> None:
    config = config_of(algorithm="dqn", **C51)
    spec = make_spec(config.env, config.atari)
    model = Network(spec, config.model, config.q)
    legal = torch.tensor([[False, True, False, False]] * 3)
    zeros = torch.zeros(3)
    inputs = Inputs(
        {"count": torch.zeros(3, 1), "action_mask": legal}, torch.ones(3, dtype=torch.bool), zeros.long(), zeros
    )
    params, value, _ = model(inputs)
    with torch.no_grad():
        params[:, 7:8] = 1e4  # the legal action's return is v_min, which is 0
    values = model.expected(params)
    assert (values.argmax(-1) == 1).all()
    assert (values[~legal] == ILLEGAL).all()
    assert (value > ILLEGAL).all()


def test_random_actions_of_epsilon_greedy_are_spread_over_the_legal_ones() -> None:
    values = torch.tensor([[ILLEGAL, 1.0, 2.0, ILLEGAL, 0.0]]).expand(30_000, -1)
    explore, rng = torch.full((30_000,), 0.6), torch.Generator().manual_seed(0)
    action, log_prob = greedy(values, explore, rng, masked=True)
    share = torch.bincount(action, minlength=5) / 30_000
    torch.testing.assert_close(share, torch.tensor([0, 0.2, 0.6, 0, 0.2]), atol=0.015, rtol=0)
    torch.testing.assert_close(log_prob.exp(), share[action], atol=0.015, rtol=0)
    assert (greedy(values, None, rng)[0] == 2).all()


@pytest.mark.parametrize("kind", ["discrete", "mixed"])
def test_remote_rollouts_with_illegal_choices_are_refused(kind: str) -> None:
    config = config_of(kind=kind)
    spec = make_spec(config.env, config.atari)
    arrays = recorded(spec)
    with pytest.raises(Refused, match="action_mask allows no action"):
        check_values(spec, arrays)
    arrays["obs/action_mask"][:] = True
    arrays["action"][:] = 0
    check_rollout(spec, arrays)
    arrays["obs/action_mask"][2, 1, -1] = False
    check_rollout(spec, arrays)
    arrays["action"][3, 1, ...] = 3 if kind == "discrete" else [0, 0, 1, 0, 0]
    with pytest.raises(Refused, match="an action is not legal by action_mask"):
        check_rollout(spec, arrays)
