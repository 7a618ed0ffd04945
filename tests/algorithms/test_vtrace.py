"""V-trace as a function of a rollout: parts, masks, on-policy identity with A2C, the corrections, replay."""

from __future__ import annotations

import math
from dataclasses import replace as swap

import pytest
import torch

from coterie.algorithms.a2c import A2C
from coterie.algorithms.ppo import PPO
from coterie.algorithms.vtrace import VTrace
from coterie.learner import Gradients
from coterie.models.build import Network
from coterie.parallel.params import FlatParams
from coterie.parallel.threads import Team
from coterie.replay.trajectories import TrajectoryReplay
from coterie.types import ConfigError, Inputs
from tests.algorithms.test_algorithms import FP32, gradient
from tests.conftest import VECTOR, make_config, make_rollout


def on_policy(rollout, config):
    """The rollout as the policy itself would have acted it, with its values and log-probabilities."""
    torch.manual_seed(0)
    model = Network(VECTOR, config.model)
    inputs = Inputs(rollout.obs, rollout.is_first, rollout.prev_action, rollout.prev_reward)
    with torch.no_grad():
        params, value, _ = model(inputs, rollout.core_state)
        log_prob = VTrace(config, VECTOR).dist.log_prob(params[:-1], rollout.action)
    return swap(rollout, behavior_log_prob=log_prob, behavior_value=value)


@pytest.mark.parametrize("core", ["none", "lstm"])
@pytest.mark.parametrize(("chunk", "ways"), [(8, 1), (24, 1), (0, 2), (15, 3)])
def test_parts_and_threads_add_up_to_the_whole_batch(core, chunk, ways):
    config = make_config(**{"model.core": core, "model.core_size": 8})
    rollout = make_rollout(VECTOR, 6, 8, core_size=8 if core == "lstm" else 0)
    whole, (metrics,) = gradient(config, VECTOR, rollout, kind=VTrace)
    parts, (split,) = gradient(config, VECTOR, rollout, kind=VTrace, chunk=chunk, ways=ways)
    torch.testing.assert_close(parts, whole, atol=1e-6, rtol=1e-5)
    assert split == pytest.approx(metrics, abs=1e-5)


@pytest.mark.parametrize("core", ["none", "lstm"])
@pytest.mark.parametrize("correction", ["vtrace", "one-step", "none", "epsilon"])
def test_on_policy_every_correction_is_a2c(core, correction):
    config = make_config(**{"model.core": core, "model.core_size": 8, "vtrace.correction": correction})
    rollout = on_policy(make_rollout(VECTOR, 6, 8, core_size=8 if core == "lstm" else 0), config)
    ours, _ = gradient(config, VECTOR, rollout, kind=VTrace)
    theirs, _ = gradient(config, VECTOR, rollout, kind=A2C)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_off_policy_the_corrections_differ():
    rollout = make_rollout(VECTOR, 6, 8)
    found = [
        gradient(make_config(**{"vtrace.correction": kind}), VECTOR, rollout, kind=VTrace)[0]
        for kind in ("vtrace", "one-step", "none")
    ]
    assert all(not torch.allclose(found[i], found[j], rtol=1e-2) for i in range(3) for j in range(i))


def test_a_lost_action_counts_for_nothing_but_without_a_correction():
    """What the policy would (almost) never do has a ratio of 0: V-trace learns nothing from it."""
    rollout = make_rollout(VECTOR, 1, 4)
    rollout = swap(rollout, behavior_log_prob=torch.full((1, 4), 15.0))  # pi / mu = e^-15 or less
    quiet = {"algo.entropy_coef": 0.0}
    corrected, _ = gradient(make_config(**quiet), VECTOR, rollout, kind=VTrace)
    not_corrected, _ = gradient(make_config(**quiet, **{"vtrace.correction": "none"}), VECTOR, rollout, kind=VTrace)
    assert float(corrected.norm()) < 1e-5 * float(not_corrected.norm())


@pytest.mark.parametrize(("bias", "share"), [(0.0, 1.0), (-12.0, 0.5), (-25.0, 0.0)])
def test_epsilon_weighs_the_gradient_by_how_far_the_probability_is_above_it(bias, share):
    """d log(pi + eps) = pi / (pi + eps) d log(pi): what the policy would never do again has no say (section 5.2.2)."""
    quiet = {"algo.entropy_coef": 0.0, "algo.value_coef": 0.0}
    rollout = make_rollout(VECTOR, 1, 4)
    rollout = swap(rollout, action=torch.zeros_like(rollout.action))
    found = {}
    for kind in ("none", "epsilon"):
        config = make_config(**quiet, **{"vtrace.correction": kind})
        torch.manual_seed(0)
        model = Network(VECTOR, config.model)
        model.policy.bias.data[0] = bias
        params = FlatParams(model)
        algorithm = VTrace(config, VECTOR)
        (part,) = next(algorithm.batches(model, rollout)).parts()
        algorithm.loss(model, part).total.backward()
        found[kind] = params.grad.clone()
    inputs = Inputs(rollout.obs, rollout.is_first, rollout.prev_action, rollout.prev_reward)
    prob = model(inputs, None)[0][:-1].softmax(-1)[..., 0].detach()
    expected = float((prob / (prob + 1e-6)).mean())
    ratio = float(found["epsilon"].norm() / found["none"].norm())
    assert found["none"].norm() > 1e-3
    assert ratio == pytest.approx(expected, rel=0.1)
    assert ratio == pytest.approx(share, abs=0.45)


def test_the_fake_step_changes_no_gradient():
    config, rollout = make_config(), make_rollout(VECTOR, 10, 8)
    masked = ~rollout.mask
    before, _ = gradient(config, VECTOR, rollout, kind=VTrace)
    action = rollout.prev_action.clone()
    action[1:][masked] = (action[1:][masked] + 1) % 4
    log_prob = torch.where(masked, -7.0, rollout.behavior_log_prob)
    after, _ = gradient(config, VECTOR, swap(rollout, action=action[1:], behavior_log_prob=log_prob), kind=VTrace)
    torch.testing.assert_close(after, before, atol=1e-7, rtol=1e-6)


def test_a_sum_is_the_mean_times_the_rows():
    rollout = make_rollout(VECTOR, 6, 8)
    mean, _ = gradient(make_config(), VECTOR, rollout, kind=VTrace)
    total, _ = gradient(make_config(**{"vtrace.loss": "sum"}), VECTOR, rollout, kind=VTrace)
    torch.testing.assert_close(total, mean * 48, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("tanh", [-0.9640, -0.4621, 0.0, 0.4621, 0.9640]),
        ("asymmetric", [-0.2892, -0.1386, 0.0, 2.3106, 4.8201]),
        ("clamp", [-1.0, -0.5, 0.0, 0.5, 1.0]),
    ],
)
def test_rewards_are_squashed(kind, expected):
    rollout = swap(make_rollout(VECTOR, 5, 1), reward=torch.tensor([[-2.0], [-0.5], [0.0], [0.5], [2.0]]))
    rewards = A2C(make_config(**{"reward.clip": kind}), VECTOR).rewards.clipped(rollout)
    torch.testing.assert_close(rewards[:, 0], torch.tensor(expected), atol=1e-4, rtol=0)


def test_the_entropy_bonus_moves_towards_its_target():
    algorithm = VTrace(make_config(**{"algo.entropy_target": 0.5, "algo.entropy_coef": 0.01}), VECTOR)
    batch = next(algorithm.batches(Network(VECTOR, make_config().model), make_rollout(VECTOR, 4, 2)))
    valid = batch.valid / batch.count
    for entropy, up in ((0.3, True), (0.7, False)):
        before = algorithm.entropy_coef()
        batch.metrics = {"entropy": entropy * valid}
        for _ in range(20):
            algorithm.after_step(None, batch)
        assert (algorithm.entropy_coef() > before) == up
    again = VTrace(make_config(**{"algo.entropy_target": 0.5, "algo.entropy_coef": 0.01}), VECTOR)
    again.load_state_dict(algorithm.state_dict())
    assert again.entropy_coef() == algorithm.entropy_coef()


@pytest.mark.parametrize("kind", [A2C, PPO, VTrace])
def test_the_entropy_that_is_adapted_is_the_valid_rows(kind):
    config = make_config(**{"algo.entropy_target": math.log(4), "vtrace.replay_capacity": 32, "ppo.minibatch_size": 16})
    model = Network(VECTOR, config.model)
    params = FlatParams(model)
    params.data.zero_()  # a uniform policy over four actions has the entropy that is asked for
    algorithm, gradients = kind(config, VECTOR), Gradients(model, params, Team(1), FP32)
    for seed in range(2):  # the second batch of V-trace has old rollouts, too
        rollout = make_rollout(VECTOR, 6, 8, seed)
        assert not rollout.mask.all()
        for batch in algorithm.batches(model, rollout):
            batch.metrics = gradients.compute(algorithm, batch)
            algorithm.after_step(model, batch)
    assert abs(getattr(algorithm, "base", algorithm).entropy_adjustment) < 1e-6


def test_half_a_batch_is_replayed_and_counts_as_much():
    config = make_config(**{"vtrace.replay_capacity": 32, "vtrace.replay_share": 0.5})
    algorithm = VTrace(config, VECTOR)
    model = Network(VECTOR, config.model)
    rollouts = [make_rollout(VECTOR, 6, 8, seed=i) for i in range(3)]
    (first,) = algorithm.batches(model, rollouts[0])
    assert (len(first.rollouts), first.count) == (1, 48)
    (second,) = algorithm.batches(model, rollouts[1])
    assert second.count == 96
    new, old = second.rollouts
    assert new.inputs.obs is rollouts[1].obs
    columns = rollouts[0].obs.unbind(1)
    assert all(any(torch.equal(x, column) for column in columns) for x in old.inputs.obs.unbind(1))
    assert sum(part.mask.numel() for part in second.parts(3)) == 96


def test_minibatches_take_each_rollout_once_with_its_share_of_old_ones():
    changes = {"vtrace.minibatch": 2, "vtrace.replay_capacity": 32, "vtrace.replay_share": 2 / 3}
    algorithm = VTrace(make_config(**changes), VECTOR)
    model = Network(VECTOR, algorithm.config.model)
    first, second = (make_rollout(VECTOR, 6, 8, seed=i) for i in range(2))
    batches = list(algorithm.batches(model, first))
    assert [(len(b.rollouts), b.count) for b in batches] == [(1, 12)] * 4
    batches = list(algorithm.batches(model, second))
    assert [(len(b.rollouts), b.count) for b in batches] == [(2, 36)] * 4
    assert all(part.count == 36 for b in batches for part in b.rollouts)
    found = [x for b in batches for x in b.rollouts[0].inputs.obs.unbind(1)]
    columns = second.obs.unbind(1)
    assert sorted(next(c for c in range(8) if torch.equal(columns[c], x)) for x in found) == list(range(8))


@pytest.mark.parametrize("core", [0, 8])
def test_replayed_rollouts_are_what_they_were_and_the_oldest_leave(core):
    fifo = TrajectoryReplay(20, seed=0)
    rollouts = [make_rollout(VECTOR, 5, 8, core_size=core, seed=i) for i in range(4)]
    for rollout in rollouts:
        fifo.add(rollout)
    assert fifo.size == 20
    sample = fifo.sample(400, rollouts[0])
    known = [(i, c) for i in range(1, 4) for c in range(8)][4:]  # the last 20 columns
    seen = set()
    for k in range(400):
        (match,) = [at for at in known if torch.equal(rollouts[at[0]].obs[:, at[1]], sample.obs[:, k])]
        i, c = match
        seen.add(match)
        for name in ("is_first", "prev_action", "prev_reward", "action", "reward", "terminated", "behavior_log_prob"):
            assert torch.equal(getattr(sample, name)[:, k], getattr(rollouts[i], name)[:, c]), name
        if core:
            assert torch.equal(sample.core_state[k], rollouts[i].core_state[c])
    assert seen == set(known)


def test_replay_that_does_not_fit_is_refused_with_the_number():
    with pytest.raises(ConfigError, match=r"^vtrace\.replay_capacity: 100,000,000,000 rollouts need [\d.]+ GiB"):
        TrajectoryReplay(10**11, 0).add(make_rollout(VECTOR, 5, 8))
