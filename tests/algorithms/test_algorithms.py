"""A2C and PPO as functions of a rollout: chunks, masks, states, the two algorithms against each other."""

from __future__ import annotations

import shutil
from dataclasses import replace as swap

import pytest
import torch

from coterie.algorithms.a2c import A2C
from coterie.algorithms.base import Compute, autocast
from coterie.algorithms.ppo import PPO
from coterie.algorithms.table import unroll_length
from coterie.config import Model, Schedule
from coterie.learner import Gradients
from coterie.models.build import Network
from coterie.parallel.params import FlatParams
from coterie.parallel.threads import Team
from coterie.runs.config_io import replace
from coterie.types import Inputs
from tests.conftest import IMAGE, VECTOR, make_config, make_rollout

FP32 = autocast(torch.device("cpu"), torch.float32)


def gradient(config, spec, rollout, *, kind=A2C, chunk=0, ways=1, seed=0, first_batch_only=False):
    """The flat gradient of all batches of a rollout (weights unchanged), and the summed metrics."""
    torch.manual_seed(seed)
    model = Network(spec, config.model)
    params = FlatParams(model)
    algorithm = kind(config, spec, Compute(chunk=chunk))
    team = Team(ways)
    gradients = Gradients(model, params, team, FP32)
    metrics = []
    for batch in algorithm.batches(model, rollout):
        batch.metrics = gradients.compute(algorithm, batch)
        metrics.append(batch.metrics)
        if first_batch_only:
            break
    team.close()
    return params.grad.clone(), metrics


@pytest.mark.parametrize("core", ["none", "lstm"])
@pytest.mark.parametrize(("chunk", "ways"), [(7, 1), (24, 1), (0, 2), (5, 3)])
def test_parts_and_threads_add_up_to_the_whole_batch(core, chunk, ways):
    config = make_config(**{"model.core": core, "model.core_size": 8, "algo.gae_lambda": 0.9})
    rollout = make_rollout(VECTOR, 6, 8, core_size=8 if core == "lstm" else 0)
    whole, (metrics,) = gradient(config, VECTOR, rollout)
    parts, (split,) = gradient(config, VECTOR, rollout, chunk=chunk, ways=ways)
    torch.testing.assert_close(parts, whole, atol=1e-6, rtol=1e-5)
    assert split == pytest.approx(metrics, abs=1e-5)


def test_threads_give_the_same_bits_every_time():
    config, rollout = make_config(), make_rollout(IMAGE, 6, 8)
    first, _ = gradient(config, IMAGE, rollout, chunk=5, ways=2)
    assert all(torch.equal(first, gradient(config, IMAGE, rollout, chunk=5, ways=2)[0]) for _ in range(3))


@pytest.mark.parametrize("kind", [A2C, PPO])
@pytest.mark.parametrize("core", ["none", "lstm"])
def test_the_fake_step_changes_no_gradient(kind, core):
    """Whatever stands in a masked row (its action, log-prob, value, and what leads to it) is without effect."""
    config = make_config(
        **{
            "model.core": core,
            "model.core_size": 8,
            "algo.gae_lambda": 0.9,
            "algo.normalize_advantage": True,
            "ppo.epochs": 1,
            "ppo.minibatch_size": 80,
        }
    )
    rollout = make_rollout(VECTOR, 10, 8, core_size=8 if core == "lstm" else 0)
    masked = ~rollout.mask
    assert 5 < int(masked.sum()) < 40
    before, _ = gradient(config, VECTOR, rollout, kind=kind)
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
    after, _ = gradient(config, VECTOR, changed, kind=kind)
    torch.testing.assert_close(after, before, atol=1e-7, rtol=1e-6)
    valid = rollout.mask.nonzero()[0]
    action[1:][tuple(valid)] = (action[1:][tuple(valid)] + 1) % 4
    assert not torch.allclose(gradient(config, VECTOR, swap(rollout, action=action[1:]), kind=kind)[0], before)


def test_truncation_bootstraps_from_the_final_observation_and_termination_does_not():
    config = make_config(**{"algo.gamma": 0.9})
    base = make_rollout(VECTOR, 3, 2)
    no = torch.zeros(3, 2, dtype=torch.bool)
    first = torch.zeros(4, 2, dtype=torch.bool)
    first[2] = True  # row 1 is the fake step from the final observation
    truncated, terminated = no.clone(), no.clone()
    truncated[0, 0], terminated[0, 1] = True, True
    reward = torch.tensor([[1.0, 1.0], [0.0, 0.0], [2.0, 2.0]])
    value = torch.tensor([[0.5, 0.5], [10.0, 10.0], [3.0, 3.0], [4.0, 4.0]])
    rollout = swap(
        base, is_first=first, truncated=truncated, terminated=terminated, reward=reward, behavior_value=value
    )
    torch.manual_seed(0)
    batch = A2C(config, VECTOR).prepare(Network(VECTOR, config.model), rollout)
    advantage = batch.advantage.view(3, 2)
    assert advantage[0].tolist() == pytest.approx([1 + 0.9 * 10 - 0.5, 1 - 0.5])
    assert advantage[1].tolist() == [0, 0]
    assert advantage[2].tolist() == pytest.approx([2 + 0.9 * 4 - 3] * 2)


def test_ppos_first_pass_is_a_policy_gradient_step():
    """At the weights that acted the ratio is 1, so the clipped objective's gradient is A2C's."""
    config = make_config(**{"ppo.epochs": 1, "ppo.minibatch_size": 48, "algo.gae_lambda": 0.95})
    rollout = make_rollout(VECTOR, 6, 8)
    torch.manual_seed(0)
    model = Network(VECTOR, config.model)
    algorithm = A2C(config, VECTOR)
    with torch.no_grad():
        seen = Inputs(rollout.obs[:6], rollout.is_first[:6], rollout.prev_action[:6], rollout.prev_reward[:6])
        params, _, _ = model(seen)
        rollout = swap(rollout, behavior_log_prob=algorithm.dist.log_prob(params, rollout.action))
    a2c, _ = gradient(config, VECTOR, rollout)
    ppo, (metrics,) = gradient(config, VECTOR, rollout, kind=PPO)
    torch.testing.assert_close(ppo, a2c, atol=1e-6, rtol=1e-4)
    assert metrics["kl"] == pytest.approx(0, abs=1e-6)
    assert metrics["clip_fraction"] == 0


def test_every_sample_is_in_each_epoch_once():
    config = make_config(**{"ppo.epochs": 3, "ppo.minibatch_size": 20})
    rollout = make_rollout(VECTOR, 6, 10)
    rollout.behavior_log_prob = torch.arange(60.0).view(6, 10)
    torch.manual_seed(0)
    model = Network(VECTOR, config.model)
    batches = [b.behavior_log_prob for b in PPO(config, VECTOR).batches(model, rollout)]
    assert [len(b) for b in batches] == [20] * 9
    epochs = [torch.cat(batches[i : i + 3]) for i in (0, 3, 6)]
    assert all(e.sort()[0].tolist() == list(range(60)) for e in epochs)
    assert not torch.equal(epochs[0], epochs[1])


def test_ppo_stops_its_epochs_past_the_target_kl():
    config = make_config(**{"ppo.epochs": 5, "ppo.minibatch_size": 24, "ppo.target_kl": 0.01})
    model = Network(VECTOR, config.model)
    algorithm = PPO(config, VECTOR)
    seen = 0
    for batch in algorithm.batches(model, make_rollout(VECTOR, 6, 4)):
        seen += 1
        batch.metrics = {"kl": 0.014 if seen < 3 else 0.016}
    assert seen == 3


def test_the_horizon_shrinks_at_a_fixed_batch_size():
    config = make_config(algorithm="ppo", **{"ppo.batch_size": 2048})
    for num_envs, length in ((8, 256), (512, 4)):
        assert unroll_length(replace(config, {"env.num_envs": num_envs})) == length
    assert unroll_length(config) == 512


@pytest.mark.parametrize(("clip", "seen"), [("none", [-3.0, 0.5]), ("sign", [-1.0, 1.0]), ("clamp", [-1.0, 0.5])])
def test_reward_clipping(clip, seen):
    config = make_config(**{"reward.clip": clip, "reward.scale": 2.0})
    rollout = make_rollout(VECTOR, 2, 1)
    rollout.reward = torch.tensor([[-3.0], [0.5]])
    assert A2C(config, VECTOR).rewards.clipped(rollout).flatten().tolist() == [2 * x for x in seen]


def test_normalizers_change_only_after_a_rollout():
    config = make_config(**{"reward.normalize": True, "model.normalize_obs": True})
    model = Network(VECTOR, config.model)
    algorithm, rollout = A2C(config, VECTOR), make_rollout(VECTOR, 20, 8)
    list(algorithm.batches(model, rollout))
    assert float(model.obs_norm["obs_"].count) == float(model.return_norm.count) == 0
    algorithm.after_rollout(model, rollout)
    valid = int(rollout.mask.sum())
    assert float(model.obs_norm["obs_"].count) == float(model.return_norm.count) == valid
    torch.testing.assert_close(model.obs_norm["obs_"].mean.float(), rollout.obs[:20][rollout.mask].mean(0))
    scaled = algorithm.prepare(model, rollout)
    plain = A2C(make_config(), VECTOR).prepare(model, rollout)
    assert not torch.allclose(scaled.value_target, plain.value_target)


def test_entropy_coefficient_follows_its_schedule():
    schedule = Schedule("steps", at=(50,), factors=(0.0,))
    config = make_config(steps=100, **{"algo.entropy_coef": 0.5, "algo.entropy_schedule": schedule})
    algorithm = A2C(config, VECTOR)
    assert algorithm.entropy_coef() == 0.5
    algorithm.clock.env_steps = 50
    assert algorithm.entropy_coef() == 0


def test_greedy_takes_the_likeliest_and_sampling_follows_the_seed():
    model = Network(VECTOR, Model(hidden=(8,)))
    algorithm = A2C(make_config(), VECTOR)
    seen = Inputs(torch.randn(64, 3), torch.zeros(64, dtype=torch.bool), torch.zeros(64).long(), torch.zeros(64))
    params = model(seen)[0]
    greedy, _ = algorithm.act(model, seen, None, None, torch.Generator())
    assert torch.equal(greedy.action, params.argmax(-1))
    draws = [
        algorithm.act(model, seen, None, torch.ones(64), torch.Generator().manual_seed(s))[0].action for s in (1, 1, 2)
    ]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.filterwarnings("ignore")  # inductor's own
def test_a_compiled_forward_gives_the_same_gradient():
    config, rollout = make_config(), make_rollout(VECTOR, 6, 8)
    eager, _ = gradient(config, VECTOR, rollout)
    torch.manual_seed(0)
    model = Network(VECTOR, config.model)
    params = FlatParams(model)
    model.compile(mode="default", dynamic=False)
    algorithm, gradients = A2C(config, VECTOR), Gradients(model, params, Team(1), FP32)
    for batch in algorithm.batches(model, rollout):
        gradients.compute(algorithm, batch)
    torch.testing.assert_close(params.grad, eager, atol=1e-6, rtol=1e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_gradient_on_a_gpu_is_the_cpu_s():
    config, rollout = make_config(), make_rollout(VECTOR, 6, 8)
    eager, _ = gradient(config, VECTOR, rollout)
    torch.manual_seed(0)
    model = Network(VECTOR, config.model).cuda()
    params = FlatParams(model)
    moved = swap(rollout, **{k: v.cuda() for k, v in vars(rollout).items() if isinstance(v, torch.Tensor)})
    algorithm, gradients = A2C(config, VECTOR), Gradients(model, params, Team(1), FP32)
    for batch in algorithm.batches(model, moved):
        gradients.compute(algorithm, batch)
    torch.testing.assert_close(params.grad.cpu(), eager, atol=1e-5, rtol=1e-3)
