"""examples/pqn.py: its targets and loss against the paper's formulas, its torso, and it learns; an actor's epsilon."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import coterie
from coterie.build.factory import make_algorithm, make_model
from coterie.build.resources import resolve_config
from coterie.build.validity import check
from coterie.config import Model
from coterie.errors import ConfigError
from coterie.types import ActionSpec, Inputs, ObsSpec, Spec
from tests.conftest import make_rollout

SPEC = Spec("made-up", {"": ObsSpec((3,), "float32")}, ActionSpec("categorical", (4,)))


@pytest.fixture(autouse=True)
def folder(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))


def pqn(**overrides):
    return resolve_config(coterie.presets.make("pqn:pqn", "CartPole-v1", **overrides))


def test_targets_are_lambda_returns_of_the_best_values():
    """G_t = r_t + gamma (lambda G_{t+1} + (1 - lambda) max_a Q(s_{t+1}, a)), cut at the ends of episodes."""
    config = pqn(**{"ppo.epochs": 1, "ppo.minibatch_size": 60, "env.num_envs": 5, "algo.gamma": 0.9})
    algorithm, model, r = make_algorithm(config, SPEC), make_model(config, SPEC), make_rollout(SPEC, 12, 5)
    inputs = Inputs(r.obs, r.is_first, r.prev_action, r.prev_reward)
    values = model(inputs)[0].detach()
    for t in range(13):
        row = inputs.map(lambda x, t=t: x[t])
        r.behavior_value[t] = algorithm.act(model, row, None, torch.ones(5), torch.Generator())[0].value
    best = values.max(-1).values
    target = torch.zeros(12, 5)
    for t in reversed(range(12)):
        after = 0.05 * best[t + 1] + 0.95 * (target[t + 1] if t < 11 else best[t + 1])
        target[t] = 0.1 * r.reward[t] + 0.9 * ~r.terminated[t] * after
        target[t] = torch.where(r.mask[t], target[t], best[t])  # a step without meaning
    error = values[:-1].gather(-1, r.action[..., None])[..., 0] - target
    (batch,) = algorithm.batches(model, r)
    expected = 0.5 * (error.square() * r.mask).sum() / 60
    torch.testing.assert_close(algorithm.loss(model, batch).total, expected)


@pytest.mark.parametrize(
    ("shape", "dtype"), [((4, 84, 84), "uint8"), ((96, 96, 3), "uint8"), ((10, 10, 4), "bool"), ((5,), "float32")]
)
def test_the_torso_takes_images_large_and_small_and_vectors(shape, dtype):
    from pqn import Torso

    torso = Torso({"": ObsSpec(shape, dtype)}, Model(hidden=(16,)))
    assert torso(torch.zeros(2, *shape, dtype=getattr(torch, dtype))).shape == (2, torso.size) == (2, 16)


def test_it_learns(tmp_path):
    """A random policy has a mean return of 20."""
    small = {"env.num_envs": 16, "algo.unroll_length": 32, "model.hidden": (64,), "log.tensorboard": False}
    fast = {"optim.lr": 3e-3, "optim.schedule.warmup": 2_000, "q.epsilon_steps": 10_000, "q.epsilon_end": 0.05}
    config = pqn(steps=30_000, out=str(tmp_path / "run"), **small, **fast)
    assert coterie.train(config, quiet=True)["mean_return"] > 120


def test_an_actor_knows_the_epsilon_of_its_weights():
    """2,048 env steps are 64 learner steps; epsilon falls from 1 to 0.2 within 100,000."""
    algorithm = make_algorithm(pqn(acting="decoupled", actors=2, **{"decoupled.lockstep": True}), SPEC)
    algorithm.acts_at(64 * 10)
    assert algorithm.explore(torch.arange(1)).item() == pytest.approx(1 - 0.8 * 0.2048)


def test_it_refuses_continuous_actions():
    spec = Spec("made-up", SPEC.obs, ActionSpec("continuous", low=(-1.0,), high=(1.0,)))
    with pytest.raises(ConfigError, match=r"^algorithm: 'pqn:PQN' needs a Discrete action space"):
        check(pqn(), spec)
