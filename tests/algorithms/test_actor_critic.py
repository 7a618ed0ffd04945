"""A2C, PPO and V-trace as functions of a rollout: chunks, masks, rewards, entropy, one against the other."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace as swap

import pytest
import torch

from coterie.algorithms.a2c import A2C
from coterie.algorithms.base import Compute
from coterie.algorithms.ppo import PPO
from coterie.algorithms.vtrace import VTrace
from coterie.config import Model, Schedule
from coterie.learner import Gradients
from coterie.models.build import Network
from coterie.parallel.params import FlatParams
from coterie.runs.config_io import replace
from coterie.types import Inputs
from tests.algorithms.harness import LSTM, gradient
from tests.conftest import IMAGE, VECTOR, make_config, make_rollout, needs_gpu


@pytest.mark.parametrize("kind", [A2C, VTrace])
@pytest.mark.parametrize("core", [{}, LSTM], ids=["mlp", "lstm"])
@pytest.mark.parametrize(("chunk", "ways"), [(7, 1), (24, 1), (0, 2), (15, 3)])
def test_parts_and_threads_add_up_to_the_whole_batch(kind, core, chunk, ways):
    config = make_config(**{**core, "algo.gae_lambda": 0.9})
    rollout = make_rollout(VECTOR, 6, 8, core_size=8 if core else 0)
    whole, (metrics,) = gradient(config, rollout, kind=kind)
    parts, (split,) = gradient(config, rollout, kind=kind, chunk=chunk, ways=ways)
    torch.testing.assert_close(parts, whole, atol=1e-6, rtol=1e-5)
    assert split == pytest.approx(metrics, abs=1e-5)


@pytest.mark.parametrize("core", [{}, LSTM], ids=["mlp", "lstm"])
@pytest.mark.parametrize("kind", [A2C, VTrace])
def test_half_a_batch_is_that_of_half_of_the_envs(kind, core):
    rollout = make_rollout(VECTOR, 6, 8, core_size=8 if core else 0)
    algorithm = kind(make_config(**core), VECTOR)
    (batch,) = algorithm.batches(Network(VECTOR, algorithm.config.model), rollout)
    rows = torch.cat([part.action.flatten() for part in batch.half().parts()])
    assert rows.tolist() == rollout.action[:, :4].flatten().tolist()


@pytest.mark.parametrize("core", [{}, LSTM], ids=["mlp", "lstm"])
@pytest.mark.parametrize("pieces", [1, 3, 4])
def test_shuffled_minibatches_are_the_rows_in_that_order(core, pieces):
    rollout = make_rollout(VECTOR, 5, 8, core_size=8 if core else 0)
    algorithm = A2C(make_config(**core), VECTOR)
    (batch,) = algorithm.batches(Network(VECTOR, algorithm.config.model), rollout)
    order = torch.randperm(batch.mask.shape[-1])
    found = list(batch.shuffled(order, pieces))
    assert sum(x.count for x in found) == 40 == sum(x.mask.numel() for x in found)
    last = len(batch.mask.shape) - 1
    for name in ("action", "advantage", "behavior_log_prob", "mask"):
        assert torch.equal(torch.cat([getattr(x, name) for x in found], last), getattr(batch, name)[..., order])
    for k, whole in enumerate(batch.inputs):
        assert torch.equal(torch.cat([x.inputs[k] for x in found], last), whole.index_select(last, order))
    if core:
        assert torch.equal(torch.cat([x.core_state for x in found]), batch.core_state[order])
        return
    batch.log_rho, batch.inputs = torch.randn(40), batch.inputs._replace(obs={"a": batch.inputs.obs})
    found = list(batch.shuffled(order, pieces))
    assert torch.equal(torch.cat([x.log_rho for x in found]), batch.log_rho[order])
    assert torch.equal(torch.cat([x.inputs.obs["a"] for x in found]), batch.inputs.obs["a"][order])


def test_the_values_target_may_be_the_n_step_return_whatever_lambda_is():
    """A3C with GAE, Algorithm 1: R for the value, GAE for the policy."""
    rollout = make_rollout(VECTOR, 6, 8)

    def targets(**changes):
        algorithm = A2C(make_config(**changes), VECTOR)
        (batch,) = algorithm.batches(Network(VECTOR, algorithm.config.model), rollout)
        return batch.value_target[batch.mask], batch.advantage

    n_step, advantage = targets(**{"algo.gae_lambda": 0.5, "algo.value_target": "n-step"})
    torch.testing.assert_close(n_step, targets(**{"algo.gae_lambda": 1.0})[0])
    torch.testing.assert_close(advantage, targets(**{"algo.gae_lambda": 0.5})[1])


def test_threads_give_the_same_bits_every_time():
    config, rollout = make_config(), make_rollout(IMAGE, 6, 8)
    first, *others = (gradient(config, rollout, spec=IMAGE, chunk=5, ways=2)[0] for _ in range(4))
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("kind", [A2C, PPO, VTrace])
@pytest.mark.parametrize("core", [{}, LSTM], ids=["mlp", "lstm"])
def test_the_fake_step_changes_no_gradient(kind, core):
    """Whatever stands in a masked row (its action, log-prob, value, and what leads to it) is without effect."""
    more = {"algo.gae_lambda": 0.9, "algo.normalize_advantage": True, "ppo.epochs": 1, "ppo.minibatch_size": 80}
    config = make_config(**core, **more)
    rollout = make_rollout(VECTOR, 10, 8, core_size=8 if core else 0)
    masked = ~rollout.mask
    assert 5 < int(masked.sum()) < 40
    before, _ = gradient(config, rollout, kind=kind)
    action = rollout.prev_action.clone()
    action[1:][masked] = (action[1:][masked] + 1) % 4
    changed = swap(
        rollout,
        action=action[1:],
        behavior_log_prob=torch.where(masked, -7.0, rollout.behavior_log_prob),
        # the values of final observations of terminated episodes; those of truncated ones are bootstraps
        behavior_value=rollout.behavior_value.clone(),
    )
    ended = torch.zeros_like(masked)
    ended[1:] = rollout.terminated[:-1]
    changed.behavior_value[:-1][ended & masked] += 100.0
    after, _ = gradient(config, changed, kind=kind)
    torch.testing.assert_close(after, before, atol=1e-7, rtol=1e-6)
    valid = rollout.mask.nonzero()[0]
    action[1:][tuple(valid)] = (action[1:][tuple(valid)] + 1) % 4
    assert not torch.allclose(gradient(config, swap(rollout, action=action[1:]), kind=kind)[0], before)


def test_truncation_bootstraps_from_the_final_observation_and_termination_does_not():
    no, first = torch.zeros(3, 2, dtype=torch.bool), torch.zeros(4, 2, dtype=torch.bool)
    first[2] = True  # row 1 is the fake step from the final observation
    truncated, terminated = no.clone(), no.clone()
    truncated[0, 0], terminated[0, 1] = True, True
    reward = torch.tensor([[1.0, 1.0], [0.0, 0.0], [2.0, 2.0]])
    value = torch.tensor([[0.5, 0.5], [10.0, 10.0], [3.0, 3.0], [4.0, 4.0]])
    flags = {"is_first": first, "truncated": truncated, "terminated": terminated}
    rollout = swap(make_rollout(VECTOR, 3, 2), reward=reward, behavior_value=value, **flags)
    config = make_config(**{"algo.gamma": 0.9})
    advantage = A2C(config, VECTOR).prepare(Network(VECTOR, config.model), rollout).advantage.view(3, 2)
    expected = torch.tensor([[1 + 0.9 * 10 - 0.5, 1 - 0.5], [0.0, 0.0], [2 + 0.9 * 4 - 3] * 2])
    torch.testing.assert_close(advantage, expected)


# --- PPO ---


def test_ppos_first_pass_is_a_policy_gradient_step():
    """At the weights that acted the ratio is 1, so the clipped objective's gradient is A2C's."""
    config = make_config(**{"ppo.epochs": 1, "ppo.minibatch_size": 48, "algo.gae_lambda": 0.95})
    rollout = make_rollout(VECTOR, 6, 8)
    torch.manual_seed(0)
    model = Network(VECTOR, config.model)
    with torch.no_grad():
        params, _, _ = model(Inputs(rollout.obs, rollout.is_first, rollout.prev_action, rollout.prev_reward))
        log_prob = A2C(config, VECTOR).dist.log_prob(params[:-1], rollout.action)
    rollout = swap(rollout, behavior_log_prob=log_prob)
    a2c, _ = gradient(config, rollout)
    ppo, (metrics,) = gradient(config, rollout, kind=PPO)
    torch.testing.assert_close(ppo, a2c, atol=1e-6, rtol=1e-4)
    assert metrics["kl"] == pytest.approx(0, abs=1e-6)
    assert metrics["clip_fraction"] == 0


def test_every_sample_is_in_each_epoch_of_ppo_once():
    config = make_config(**{"ppo.epochs": 3, "ppo.minibatch_size": 20})
    rollout = make_rollout(VECTOR, 6, 10)
    rollout.behavior_log_prob = torch.arange(60.0).view(6, 10)
    model = Network(VECTOR, config.model)
    batches = [b.behavior_log_prob for b in PPO(config, VECTOR).batches(model, rollout)]
    assert [len(b) for b in batches] == [20] * 9
    epochs = [torch.cat(batches[i : i + 3]) for i in (0, 3, 6)]
    assert all(e.sort()[0].tolist() == list(range(60)) for e in epochs)
    assert not torch.equal(epochs[0], epochs[1])


def test_ppo_stops_its_epochs_past_the_target_kl():
    config = make_config(**{"ppo.epochs": 5, "ppo.minibatch_size": 24, "ppo.target_kl": 0.01})
    seen = 0
    for batch in PPO(config, VECTOR).batches(Network(VECTOR, config.model), make_rollout(VECTOR, 6, 4)):
        seen += 1
        batch.metrics = {"kl": 0.014 if seen < 3 else 0.016}
    assert seen == 3


def test_the_horizon_shrinks_at_a_fixed_batch_size():
    config = make_config(algorithm="ppo", **{"ppo.batch_size": 2048})
    assert [PPO.unroll_length(replace(config, {"env.num_envs": n})) for n in (4, 8, 512)] == [512, 256, 4]
    decoupled = replace(config, {"acting": "decoupled", "decoupled.batch_size": 8, "env.num_envs": 512})
    assert PPO.unroll_length(decoupled) == 256  # 8 envs in a batch


# --- rewards, normalizers and entropy ---


@pytest.mark.parametrize(
    ("clip", "expected"),
    [
        ("none", [-2.0, -0.5, 0.0, 0.5, 2.0]),
        ("sign", [-1.0, -1.0, 0.0, 1.0, 1.0]),
        ("clamp", [-1.0, -0.5, 0.0, 0.5, 1.0]),
        ("tanh", [-0.9640, -0.4621, 0.0, 0.4621, 0.9640]),
        ("asymmetric", [-0.2892, -0.1386, 0.0, 2.3106, 4.8201]),
    ],
)
def test_rewards_are_clipped_and_then_scaled(clip, expected):
    rollout = swap(make_rollout(VECTOR, 5, 1), reward=torch.tensor([[-2.0], [-0.5], [0.0], [0.5], [2.0]]))
    rewards = A2C(make_config(**{"reward.clip": clip, "reward.scale": 2.0}), VECTOR).rewards.clipped(rollout.reward)
    torch.testing.assert_close(rewards[:, 0], 2 * torch.tensor(expected), atol=2e-4, rtol=0)


def test_normalizers_change_only_after_a_rollout():
    config = make_config(**{"reward.normalize": True, "model.normalize_obs": True})
    model = Network(VECTOR, config.model)
    algorithm, rollout = A2C(config, VECTOR), make_rollout(VECTOR, 20, 8)
    list(algorithm.batches(model, rollout))
    assert float(model.obs_norm["obs_"].count) == float(model.return_norm.count) == 0
    algorithm.after_rollout(model, rollout)
    assert float(model.obs_norm["obs_"].count) == float(model.return_norm.count) == int(rollout.mask.sum())
    torch.testing.assert_close(model.obs_norm["obs_"].mean.float(), rollout.obs[:20][rollout.mask].mean(0))
    plain = A2C(make_config(), VECTOR).prepare(model, rollout)
    assert not torch.allclose(algorithm.prepare(model, rollout).value_target, plain.value_target)


def test_the_entropy_coefficient_follows_its_schedule():
    schedule = Schedule("steps", at=(50,), factors=(0.0,))
    algorithm = A2C(make_config(steps=100, **{"algo.entropy_coef": 0.5, "algo.entropy_schedule": schedule}), VECTOR)
    assert algorithm.entropy_coef() == 0.5
    algorithm.clock.env_steps = 50
    assert algorithm.entropy_coef() == 0


def test_the_entropy_bonus_moves_towards_its_target():
    config = make_config(**{"algo.entropy_target": 0.5, "algo.entropy_coef": 0.01})
    algorithm, again = VTrace(config, VECTOR), VTrace(config, VECTOR)
    batch = next(algorithm.batches(Network(VECTOR, config.model), make_rollout(VECTOR, 4, 2)))
    for entropy, up in ((0.3, True), (0.7, False)):
        before = algorithm.entropy_coef()
        batch.metrics = {"entropy": entropy * batch.valid / batch.count}
        for _ in range(20):
            algorithm.after_step(None, batch)
        assert (algorithm.entropy_coef() > before) == up
    again.load_state_dict(algorithm.state_dict())
    assert again.entropy_coef() == algorithm.entropy_coef()


@pytest.mark.parametrize("kind", [A2C, PPO, VTrace])
def test_the_entropy_that_is_adapted_is_the_valid_rows(kind):
    config = make_config(**{"algo.entropy_target": math.log(4), "vtrace.replay_capacity": 32, "ppo.minibatch_size": 16})
    model = Network(VECTOR, config.model)
    params = FlatParams(model)
    params.data.zero_()  # a uniform policy over four actions has the entropy that is asked for
    algorithm, gradients = kind(config, VECTOR), Gradients(model, params, Compute())
    for seed in range(2):  # the second batch of V-trace has old rollouts, too
        for batch in algorithm.batches(model, make_rollout(VECTOR, 6, 8, seed)):
            batch.metrics = gradients.compute(algorithm, batch)
            algorithm.after_step(model, batch)
    assert algorithm.entropy_coef() == pytest.approx(config.algo.entropy_coef, rel=1e-6)


def test_greedy_takes_the_likeliest_and_sampling_follows_the_seed():
    model, algorithm = Network(VECTOR, Model(hidden=(8,))), A2C(make_config(), VECTOR)
    seen = Inputs(torch.randn(64, 3), torch.zeros(64, dtype=torch.bool), torch.zeros(64).long(), torch.zeros(64))
    greedy, _ = algorithm.act(model, seen, None, None, torch.Generator())
    assert torch.equal(greedy.action, model(seen)[0].argmax(-1))
    rngs = [torch.Generator().manual_seed(s) for s in (1, 1, 2)]
    draws = [algorithm.act(model, seen, None, torch.ones(64), rng)[0].action for rng in rngs]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.filterwarnings("ignore")  # inductor's own
def test_a_compiled_forward_gives_the_same_gradient():
    config, rollout = make_config(), make_rollout(VECTOR, 6, 8)
    eager, _ = gradient(config, rollout)
    compiled, _ = gradient(config, rollout, prepare=lambda model: model.compile(mode="default", dynamic=False))
    torch.testing.assert_close(compiled, eager, atol=1e-6, rtol=1e-4)


@needs_gpu
def test_the_gradient_on_a_gpu_is_the_cpu_s():
    config, rollout = make_config(), make_rollout(VECTOR, 6, 8)
    eager, _ = gradient(config, rollout)
    there = swap(rollout, **{k: v.cuda() for k, v in vars(rollout).items() if isinstance(v, torch.Tensor)})
    found, _ = gradient(config, there, prepare=lambda model: model.cuda())
    torch.testing.assert_close(found.cpu(), eager, atol=1e-5, rtol=1e-3)
