"""PPO from rollouts of older weights: a proximal policy apart from the one that acted (Hilton et al. 2021)."""

from __future__ import annotations

import math
from dataclasses import replace as swap
from typing import Any

import pytest
import torch

from coterie.algorithms.a2c import A2C
from coterie.algorithms.base import Compute
from coterie.algorithms.ppo import PPO
from coterie.build import validity
from coterie.build.resources import resolve_config
from coterie.envs.make import make_spec
from coterie.errors import ConfigError
from coterie.models.build import Network
from tests.algorithms.harness import LSTM, gradient, move
from tests.conftest import VECTOR, make_config, make_rollout
from tests.support.crew import crewed


class Told:
    """A network that gives action 0 of each row the probability `p`, and every row the value 0."""

    recurrent = False

    def __init__(self, *p: float) -> None:
        self.p = torch.tensor(p)

    def __call__(self, inputs, core_state=None):
        rest = torch.log((1 - self.p) / 3)
        return torch.stack([self.p.log(), rest, rest, rest], -1), torch.zeros_like(self.p), None


def test_the_objective_is_the_papers_by_hand():
    """Four samples of action 0 that end their episodes, so that the advantage is the reward.

    | acting | proximal | new | rho       | ratio | A  | rho min(ratio A, clip(ratio) A) |
    |--------|----------|-----|-----------|-------|----|---------------------------------|
    | 0.2    | 0.4      | 0.6 | 2         | 1.5   | 1  | 2 x 1.2                         |
    | 0.1    | 0.5      | 0.3 | 5, so 4   | 0.6   | -1 | 4 x -0.8                        |
    | 0.8    | 0.4      | 0.44| 0.5       | 1.1   | 2  | 0.5 x 2.2                       |
    | 0.5    | 0.5      | 0.8 | 1         | 1.6   | -1 | 1 x -1.6                        |
    """
    acting, reward = torch.tensor([[0.2, 0.1, 0.8, 0.5]]), torch.tensor([[1.0, -1.0, 2.0, -1.0]])
    rollout = swap(
        make_rollout(VECTOR, 1, 4), action=torch.zeros(1, 4, dtype=torch.long), behavior_log_prob=acting.log(),
        reward=reward, terminated=torch.ones(1, 4, dtype=torch.bool), is_first=torch.zeros(2, 4, dtype=torch.bool),
        behavior_value=torch.zeros(2, 4),
    )  # fmt: skip
    changes = {"ppo.proximal": True, "ppo.rho_max": 4.0, "ppo.clip": 0.2, "ppo.epochs": 1, "ppo.minibatch_size": 4}
    changes["algo.entropy_coef"] = 0.0
    algorithm = PPO(make_config(**changes), VECTOR)
    (batch,) = algorithm.batches(Told(0.4, 0.5, 0.4, 0.5), rollout)
    assert sorted(batch.advantage.tolist()) == pytest.approx([-4, -1, 1, 2])
    new = {2: 0.6, -4: 0.3, 1: 0.44, -1: 0.8}  # the minibatch is shuffled
    model = Told(*(new[round(a)] for a in batch.advantage.tolist()))
    model.p.requires_grad_()
    loss = algorithm.loss(model, batch)
    assert float(loss.metrics["policy_loss"]) == pytest.approx(-(2.4 - 3.2 + 1.1 - 1.6) / 4)
    assert float(loss.metrics["rho"]) == pytest.approx((2 + 5 + 0.5 + 1) / 4)
    assert float(loss.metrics["rho_clipped"]) == 0.25
    assert float(loss.metrics["clip_fraction"]) == 0.75  # around the proximal policy
    loss.total.backward()
    assert sorted(batch.advantage[model.p.grad != 0].tolist()) == pytest.approx([-1, 1])  # the others are clipped


@pytest.mark.parametrize("core", [{}, LSTM], ids=["mlp", "lstm"])
def test_without_lag_it_is_ppo_bit_for_bit(core):
    """Where the learner's weights acted the importance weight is 1, and both policies are one."""
    more = {"ppo.epochs": 2, "ppo.minibatch_size": 18, "algo.gae_lambda": 0.9, "algo.normalize_advantage": True}
    config, rollout = make_config(**core, **more), make_rollout(VECTOR, 6, 8, core_size=8 if core else 0)
    torch.manual_seed(0)
    model, a2c = Network(VECTOR, config.model), A2C(config, VECTOR)
    with torch.no_grad():
        whole = a2c.prepare(model, rollout)
        log_prob = a2c.dist.log_prob(model(whole.inputs, whole.core_state)[0], whole.action)
    rollout.behavior_log_prob = log_prob.view(6, 8)
    plain, metrics = gradient(config, rollout, kind=PPO)
    decoupled, also = gradient(make_config(**core, **more, **{"ppo.proximal": True}), rollout, kind=PPO)
    assert torch.equal(plain, decoupled)
    assert [{k: v for k, v in m.items() if "rho" not in k} for m in also] == metrics
    assert all(m["rho_clipped"] == 0 for m in also)


@pytest.mark.parametrize("core", [{}, LSTM], ids=["mlp", "lstm"])
def test_parts_of_the_proximal_pass_add_up_and_masked_rows_weigh_nothing(core):
    more = {"ppo.epochs": 1, "ppo.minibatch_size": 48, "ppo.proximal": True}
    config, rollout = make_config(**core, **more), make_rollout(VECTOR, 6, 8, core_size=8 if core else 0)
    whole, _ = gradient(config, rollout, kind=PPO)
    parts, _ = gradient(config, rollout, kind=PPO, chunk=13)
    torch.testing.assert_close(parts, whole, atol=1e-6, rtol=1e-5)
    for nothing in (-math.inf, math.nan):
        log_prob = torch.where(rollout.mask, rollout.behavior_log_prob, nothing)
        assert torch.equal(gradient(config, swap(rollout, behavior_log_prob=log_prob), kind=PPO)[0], whole)


def test_the_first_ratio_is_one_in_mixed_precision_too():
    config = make_config(**{"ppo.epochs": 1, "ppo.minibatch_size": 48, "ppo.proximal": True})
    algorithm = PPO(config, VECTOR, Compute(torch.bfloat16))
    model = Network(VECTOR, config.model)
    move(model)
    (batch,) = algorithm.batches(model, make_rollout(VECTOR, 6, 8))
    with torch.autocast("cpu", torch.bfloat16):
        assert float(algorithm.loss(model, batch).metrics["kl"]) < 1e-12
    assert float(algorithm.loss(model, batch).metrics["kl"]) > 1e-9  # the other precision has other digits


@pytest.mark.parametrize("acting", ["decoupled", "central"])
def test_ppo_learns_from_actors_that_do_not_wait_for_it(acting):
    """Without `ppo.proximal` the same run is refused."""
    more: dict[str, Any] = {"ppo.minibatch_size": 16, "algo.unroll_length": 8, "actors": 1, "ppo.proximal": True}
    config = resolve_config(make_config(algorithm="ppo", acting=acting, **more))
    spec = make_spec(config.env, config.atari)
    validity.check(config, spec)
    with pytest.raises(
        ConfigError, match=f"^acting: .* needs --{acting}.lockstep True, .*, or --algorithm ppo --ppo.proximal True"
    ):
        validity.check(swap(config, ppo=swap(config.ppo, proximal=False)), spec)
    rollouts, far = 0, 0.0

    def watch(rollout):
        nonlocal rollouts, far
        p = learner.progress
        rollouts, far = rollouts + 1, max(far, abs(p.metrics["rho"] / p.batches - 1))
        p.metrics, p.batches = {}, 0
        return rollouts == 20

    with crewed(config) as learner:
        learner.run(watch)
    assert learner.progress.policy_lag_max > 0
    assert far > 1e-4  # the importance weights are those of older weights
