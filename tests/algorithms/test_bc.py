"""Behavior cloning: what is read from a data set, what is trained on, and a PPO run that goes on from it."""

from __future__ import annotations

import math
import re
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

import coterie
from coterie import presets
from coterie.acting.table import ACTING
from coterie.algorithms.bc import BC, read_steps, returns_of
from coterie.build.factory import make_model
from coterie.build.resources import resolve_config
from coterie.build.warm_start import begin_from, fitting
from coterie.envs.make import make_spec
from coterie.envs.spaces import action_map
from coterie.errors import ConfigError
from coterie.exchange.table import EXCHANGES
from coterie.runs import checkpoint
from coterie.runs.config_io import load_config, save_config
from tests.conftest import make_rollout
from tests.support.begun import check_begins_with
from tests.support.commands import run_example
from tests.support.demonstrations import rule_plays_cartpole
from tests.support.runs import check_rows

QUIET = {"log.tensorboard": False, "device": "cpu"}


class OneWay(CartPoleEnv):
    """CartPole that can only be pushed to the left."""

    def __init__(self) -> None:
        super().__init__()
        self.action_space = spaces.Discrete(1)


def make(env: str = "CartPole-v1", **changes: Any) -> tuple[Any, Any]:
    config = resolve_config(presets.bc(env, **{"bc.dataset": rule_plays_cartpole(), **QUIET, **changes}))
    return config, make_spec(config.env, config.atari)


def test_the_steps_of_a_data_set_are_its_episodes_one_after_another():
    steps = read_steps(*make())
    assert len(steps.reward) == len(steps.action) == len(steps.is_first) == len(steps.obs) == 600
    assert steps.is_first.nonzero().flatten().tolist() == [0, 200, 400]
    assert (steps.reward == 1).all()
    x, speed, angle, turning = steps.obs.T
    assert torch.equal(steps.action, (angle + 0.5 * turning + 0.02 * x + 0.05 * speed > 0).long())


def test_returns_end_with_their_episodes():
    first = torch.tensor([True, False, False, True, False])
    assert returns_of(torch.arange(1.0, 6), first, 0.5).tolist() == [1 + 1 + 0.75, 2 + 1.5, 3, 4 + 2.5, 5]


def test_data_that_is_shorter_than_a_rollout_is_one_sequence_without_copies():
    config, spec = make(
        **{"model.core": "lstm", "algo.unroll_length": 10_000, "bc.batch_size": 64, "bc.intensity": 1e4}
    )
    steps = read_steps(config, spec)
    batch = next(BC(config, spec).batches(make_model(config, spec), make_rollout(spec, 8, 4)))
    assert torch.equal(batch.inputs.obs[:, 0], steps.obs)
    assert batch.count == batch.valid == len(steps.obs)


@pytest.mark.parametrize("core", ["none", "lstm"])
def test_a_batch_has_rows_of_the_data_or_with_a_core_sequences(core: str):
    config, spec = make(**{"model.core": core, "algo.unroll_length": 8, "bc.batch_size": 64, "bc.intensity": 4.0})
    model, bc = make_model(config, spec), BC(config, spec)
    steps = read_steps(config, spec)
    batches = list(bc.batches(model, make_rollout(spec, 8, 4)))
    assert len(batches) == 2  # 8 x 4 env steps, 4 samples each
    for batch in batches:
        assert batch.count == batch.mask.numel() == batch.valid == 64
        assert batch.mask.shape == ((64,) if core == "none" else (8, 8))
        rows = [[torch.equal(o, x) for x in steps.obs].index(True) for o in batch.inputs.obs.reshape(-1, 4)]
        assert torch.equal(batch.action.flatten(), steps.action[rows])
        if core != "none":
            assert (np.diff(np.array(rows).reshape(8, 8), axis=0) == 1).all()
            assert torch.equal(batch.inputs.prev_action.flatten(), steps.action[np.maximum(np.array(rows) - 1, 0)])
        params, _, _ = model(batch.inputs, batch.core_state)
        likelihood = torch.distributions.Categorical(logits=params).log_prob(batch.action)
        assert float(bc.loss(model, batch).metrics["policy_loss"].detach()) == pytest.approx(
            -float(likelihood.detach().mean()), abs=1e-5
        )
    assert torch.allclose(model.obs_norm["obs_"].mean.float(), steps.obs.mean(0), atol=1e-6)


def test_normalizers_of_a_network_that_has_learned_stay():
    config, spec = make(**{"model.normalize_obs": True, "init_from": "runs/ppo"})
    model, bc = make_model(config, spec), BC(config, spec)
    seen = torch.randn(50, 4) + 3
    model.observe(seen, torch.ones(50, dtype=torch.bool))  # of `init_from`; its rewards were not normalized
    list(bc.batches(model, make_rollout(spec, 8, 4)))
    assert torch.allclose(model.obs_norm["obs_"].mean.float(), seen.mean(0), atol=1e-6)
    assert float(model.return_norm.count) == 600


def test_a_ppo_run_goes_on_where_the_cloned_policy_is(tmp_path: Path):
    changes: dict[str, Any] = {"steps": 8_000, "env.threads": 1, **QUIET}
    data = {"bc.dataset": rule_plays_cartpole()}
    coterie.train(preset="bc", env="CartPole-v1", out=str(tmp_path / "bc"), quiet=True, **data, **changes)
    assert coterie.evaluate_run(tmp_path / "bc", episodes=5)["mean_return"] > 400
    begin = {"init_from": str(tmp_path / "bc"), "out": str(tmp_path / "ppo"), "learners": 2}
    changes = {**changes, "env.max_episode_steps": 90}
    tuned = coterie.train(preset="ppo", env="CartPole-v1", quiet=True, **changes, **begin)
    assert tuned["mean_return"] > 80  # 20 with new weights; 90 is the most
    assert "begins with the weights of" in (tmp_path / "ppo" / "log.txt").read_text()
    saved, first = (checkpoint.load(path)[0] for path in (
        checkpoint.latest(tmp_path / "bc/checkpoints"), tmp_path / "ppo/checkpoints/step_000000000000",
    ))  # fmt: skip
    for rank in (0, 1):
        check_begins_with(first[f"learner_{rank}/model"], saved["learner_0/model"])


def test_heads_for_other_actions_are_new_and_another_network_is_refused(tmp_path: Path):
    changes = {"steps": 300, "env.num_envs": 4, "algo.unroll_length": 16, "model.normalize_obs": True, **QUIET}
    run = tmp_path / "run"
    env = "coterie.envs.testing:CountingEnv"
    coterie.train(preset="a2c", env=env, out=str(run), quiet=True, **{"env.kwargs": '{"actions": 2}'}, **changes)
    for name, kwargs in (("means", '{"continuous": true}'), ("more", '{"actions": 7}')):  # two logits are no two means
        other = {"env.kwargs": kwargs, "init_from": str(run), **changes}
        coterie.train(preset="a2c", env=env, out=str(tmp_path / name), quiet=True, **other)
        assert re.search("new: .*policy.weight, policy.bias", (tmp_path / name / "log.txt").read_text())
    for wrong, why in [
        ({"model.hidden": (8,)}, r"has another network: torso\S+ is \[2, 2, 64\] there, \[2, 2, 8\] here"),
        ({"model.normalize_obs": False}, r"has another network: obs_norm\S+count is \[\] there, missing here"),
        ({"model.activation": "relu"}, "was trained with model.activation tanh, here it is relu$"),
        ({"init_from": str(tmp_path)}, "has no complete checkpoint"),
        ({"init_from": f"{tmp_path}/x"}, "/x: there is no such folder"),
    ]:
        with pytest.raises(ConfigError, match=f"^init_from: {tmp_path}.*{why}"):
            coterie.train(preset="a2c", env=env, out=str(tmp_path / "no"), quiet=True, **{**other, **wrong})
        assert not (tmp_path / "no").exists()
    frozen = {"model.torso": "tests.support.networks:frozen"} | changes
    coterie.train(preset="a2c", env=env, out=str(tmp_path / "frozen"), quiet=True, **frozen)
    source = load_config(tmp_path / "frozen" / "config.json")
    for acting, seed, refused in (("decoupled", 1, True), ("inline", 1, False), ("decoupled", 0, False)):
        model = make_model(replace(source, seed=seed), make_spec(source.env, source.atari))
        with pytest.raises(ConfigError, match=r"\.fixed is not trained") if refused else nullcontext():
            begin_from(tmp_path / "frozen", model, acting == "decoupled")
    (run / "checkpoints").rename(tmp_path / "gone")  # only a new run reads it
    assert coterie.resume(tmp_path / "more", steps=600, quiet=True)["status"] == "finished"


CLIPS = {"model.last_action_reward": True, "model.clip_last_reward": False}


@pytest.mark.parametrize(
    ("preset", "env", "there", "here", "refused"),
    [
        ("ppo", "CartPole-v1", CLIPS, {"model.last_action_reward": True, "model.clip_last_reward": True}, True),
        ("ppo", "CartPole-v1", {"model.clip_last_reward": False}, {"model.clip_last_reward": True}, False),  # not seen
        ("ppo", "Pong-v5", {"model.activation": "relu"}, {"model.activation": "tanh"}, False),  # of an mlp alone
        ("ppo", "CartPole-v1", {"model.activation": "relu"}, {"model.network": "a.b:C"}, False),
        ("c51", "CartPole-v1", {"q.v_max": 100.0}, {"q.v_max": 200.0}, False),  # the same order of actions
    ],
)
def test_weights_that_would_be_another_policy_are_refused(preset, env, there, here, refused, tmp_path):
    path = tmp_path / "checkpoints" / "step_000000000100"
    save_config(tmp_path / "config.json", presets.make(preset, env=env, **there))
    config = presets.make(preset, env=env, **here)
    spec = make_spec(config.env, config.atari)
    with pytest.raises(ConfigError, match=r"was trained with model\.clip") if refused else nullcontext():
        assert fitting(path, config, spec) == path


@pytest.mark.parametrize(
    ("acting", "exchange"),
    [
        pytest.param(acting, exchange, marks=() if at in (3, 9) else pytest.mark.slow)
        for at, (acting, exchange) in enumerate(product(ACTING, EXCHANGES))
    ],
)
def test_it_learns_with_every_acting_and_exchange(tmp_path: Path, acting: str, exchange: str):
    crowd = {"learners": 1 if exchange == "solo" else 2, "acting": acting, "exchange": exchange, "env.num_envs": 8}
    changes = {"steps": 6_000, "env.threads": 1, "bc.dataset": rule_plays_cartpole(), **crowd, **QUIET}
    summary = coterie.train(preset="bc", env="CartPole-v1", out=str(tmp_path / "run"), quiet=True, **changes)
    check_rows(tmp_path / "run")
    assert summary["samples_trained"] > 10 * summary["env_steps"]
    assert coterie.evaluate_run(tmp_path / "run", episodes=5)["mean_return"] > 150  # 10 at random


@pytest.mark.parametrize(
    ("env", "dataset", "why"),
    [
        ("Acrobot-v1", "", r"cannot be used for Acrobot-v1"),
        ("CartPole-v1", "no/such-v0", r"'no/such-v0' cannot be used for CartPole-v1"),
        ("Taxi-v4", "", "action mask in info"),
        (f"{__name__}:OneWay", "", "cannot be used for .*OneWay: an action is none of the env's"),
    ],
)
def test_data_that_does_not_fit_is_refused_with_one_line(
    env: str, dataset: str, why: str, monkeypatch: Any, tmp_path: Path
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config, _ = make(env=env, **{"bc.dataset": dataset or rule_plays_cartpole()})
    with pytest.raises(ConfigError, match=why) as caught:
        coterie.train(replace(config, out=str(tmp_path / "run")), quiet=True)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(4, start=-1),
        spaces.MultiDiscrete([3, 2], start=[1, 0]),
        spaces.MultiBinary(3),
        spaces.Box(np.array([-2.0, 0.0]), np.array([6.0, math.inf]), dtype=np.float64),
        spaces.Box(np.array([-2.0, 1.0], np.float32), np.array([6.0, 1.0], np.float32)),
        spaces.Box(2, 5, (2,), np.int64),
        spaces.Dict(
            {"aim": spaces.Box(-1, 3, (2,)), "both": spaces.Tuple((spaces.Discrete(3), spaces.MultiBinary(2)))}
        ),
    ],
)
def test_actions_of_a_data_set_become_a_policys(space: Any):
    found = action_map("env", space)
    space.seed(1)
    taken = [space.sample() for _ in range(5)]
    batch = concatenate(space, taken, create_empty_array(space, 5))
    chosen = found.from_env(batch)
    assert chosen.shape == (5, *found.spec.shape)
    assert chosen.dtype == found.spec.dtype
    assert np.isfinite(chosen).all()
    back = list(iterate(batch_space(space, 5), found.nested(found.to_env(chosen))))
    for one, other in zip(back, taken, strict=True):
        np.testing.assert_allclose(spaces.flatten(space, one), spaces.flatten(space, other), atol=1e-6)


def test_the_example_clones_a_data_set_and_goes_on_with_ppo(tmp_path: Path):
    printed = run_example("warm_start.py", tmp_path, "6000", TMPDIR=str(tmp_path))
    scores = [float(x) for x in re.findall(r"^(?:cloned|and PPO): (\d+) of 500$", printed, re.MULTILINE)]
    assert len(scores) == 2
    assert min(scores) > 400
