"""V-trace as a function of a rollout: on-policy identity with A2C, the corrections, replay. More: test_actor_critic."""

from __future__ import annotations

import math
from dataclasses import replace as swap
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from coterie.algorithms.a2c import A2C
from coterie.algorithms.base import combine
from coterie.algorithms.off_policy import OffPolicy
from coterie.algorithms.vtrace import VTrace
from coterie.errors import ConfigError
from coterie.models.build import Network
from coterie.replay.trajectories import TrajectoryReplay
from coterie.types import Inputs
from tests.algorithms.harness import LSTM, gradient
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


@pytest.mark.parametrize("core", [{}, LSTM], ids=["mlp", "lstm"])
@pytest.mark.parametrize("correction", ["vtrace", "one-step", "none", "epsilon"])
def test_on_policy_every_correction_is_a2c(core, correction):
    config = make_config(**{**core, "vtrace.correction": correction})
    rollout = on_policy(make_rollout(VECTOR, 6, 8, core_size=8 if core else 0), config)
    ours, _ = gradient(config, rollout, kind=VTrace)
    theirs, _ = gradient(config, rollout, kind=A2C)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_off_policy_the_corrections_of_vtrace_differ():
    rollout = make_rollout(VECTOR, 6, 8)
    found = [
        gradient(make_config(**{"vtrace.correction": kind}), rollout, kind=VTrace)[0]
        for kind in ("vtrace", "one-step", "none")
    ]
    assert all(not torch.allclose(found[i], found[j], rtol=1e-2) for i in range(3) for j in range(i))


def test_a_lost_action_counts_for_nothing_but_without_a_correction():
    """What the policy would (almost) never do has a ratio of 0: V-trace learns nothing from it."""
    rollout = make_rollout(VECTOR, 1, 4)
    rollout = swap(rollout, behavior_log_prob=torch.full((1, 4), 15.0))  # pi / mu = e^-15 or less
    quiet = {"algo.entropy_coef": 0.0}
    corrected, _ = gradient(make_config(**quiet), rollout, kind=VTrace)
    not_corrected, _ = gradient(make_config(**quiet, **{"vtrace.correction": "none"}), rollout, kind=VTrace)
    assert float(corrected.norm()) < 1e-5 * float(not_corrected.norm())


@pytest.mark.parametrize(("bias", "share"), [(0.0, 1.0), (-12.0, 0.5), (-25.0, 0.0)])
def test_epsilon_weighs_the_gradient_by_how_far_the_probability_is_above_it(bias, share):
    """d log(pi + eps) = pi / (pi + eps) d log(pi): what the policy would never do again has no say (section 5.2.2)."""
    quiet = {"algo.entropy_coef": 0.0, "algo.value_coef": 0.0}
    rollout = make_rollout(VECTOR, 1, 4)
    rollout = swap(rollout, action=torch.zeros_like(rollout.action))

    def likely(model):
        model.policy.bias.data[0] = bias

    found = {
        kind: gradient(make_config(**quiet, **{"vtrace.correction": kind}), rollout, kind=VTrace, prepare=likely)[0]
        for kind in ("none", "epsilon")
    }
    torch.manual_seed(0)
    model = Network(VECTOR, make_config().model)
    likely(model)
    inputs = Inputs(rollout.obs, rollout.is_first, rollout.prev_action, rollout.prev_reward)
    prob = model(inputs, None)[0][:-1].softmax(-1)[..., 0].detach()
    expected = float((prob / (prob + 1e-6)).mean())
    ratio = float(found["epsilon"].norm() / found["none"].norm())
    assert found["none"].norm() > 1e-3
    assert ratio == pytest.approx(expected, rel=0.1)
    assert ratio == pytest.approx(share, abs=0.45)


def test_a_sum_is_the_mean_times_the_rows():
    rollout = make_rollout(VECTOR, 6, 8)
    mean, _ = gradient(make_config(), rollout, kind=VTrace)
    total, _ = gradient(make_config(**{"vtrace.loss": "sum"}), rollout, kind=VTrace)
    torch.testing.assert_close(total, mean * 48, rtol=1e-4, atol=1e-5)


def test_half_of_each_step_is_replayed_so_that_new_rollouts_make_twice_the_steps():
    """IMPALA, section 5.2.2: half of each batch is drawn from the replay; a batch keeps its size."""
    config = make_config(**{"vtrace.replay_capacity": 32, "vtrace.replay_share": 0.5})
    algorithm = VTrace(config, VECTOR)
    model = Network(VECTOR, config.model)
    rollouts = [make_rollout(VECTOR, 6, 8, seed=i) for i in range(3)]
    assert [(len(b.rollouts), b.count) for b in algorithm.batches(model, rollouts[0])] == [(1, 24)] * 2
    for number, batch in enumerate(algorithm.batches(model, rollouts[1])):
        assert batch.count == 48
        new, old = batch.rollouts
        assert torch.equal(new.inputs.obs, rollouts[1].obs[:, number::2])
        columns = rollouts[0].obs.unbind(1)
        assert all(any(torch.equal(x, column) for column in columns) for x in old.inputs.obs.unbind(1))
        assert sum(part.mask.numel() for part in batch.parts(3)) == 48


def test_minibatches_take_each_rollout_once_with_its_share_of_old_ones():
    changes = {"vtrace.minibatch": 6, "vtrace.replay_capacity": 32, "vtrace.replay_share": 2 / 3}
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
    few = make_config(**{"vtrace.replay_capacity": 10**5})
    VTrace.check_data(few, VECTOR)
    with pytest.raises(ConfigError, match=r"^vtrace\.replay_capacity: 100,000 rollouts of each learner need"):
        VTrace.check_data(swap(few, learners=10**5), VECTOR)


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"acting": "decoupled", "decoupled.batch_size": 1}, True),
        ({"vtrace.minibatch": 1}, True),
        ({"vtrace.replay_share": 0.05}, True),
        ({"vtrace.replay_share": 0.06, "vtrace.minibatch": 9}, False),
        ({"vtrace.replay_share": 0.0}, False),
        ({"vtrace.minibatch": 1, "vtrace.replay_capacity": 0}, False),
    ],
)
def test_a_share_too_small_for_a_replayed_rollout_is_refused(changes, refused):
    config = make_config(**{"algorithm": "vtrace", "env.num_envs": 8, "vtrace.replay_capacity": 100, **changes})
    found = [refusal.field for refusal in VTrace.refusals if refusal.applies(config, VECTOR)]
    assert found == ["vtrace.replay_share"] * refused


@pytest.mark.parametrize("replayed", [False, True])
def test_the_effective_sample_size_is_that_of_the_valid_rows_and_a_small_one_is_said_once(replayed):
    measure, valid, said = OffPolicy(replayed), torch.rand(6, 4) < 0.7, []
    log_ratio = torch.randn(6, 4) * 3
    weight = log_ratio[valid].clamp(max=math.log(1e3)).exp().double()
    for _ in range(120):
        watched = measure.diagnostics(log_ratio, clip=1.0)
        loss = combine({"none": (0.0, torch.zeros(6, 4))}, watched, valid, valid.numel()).metrics
        metrics = {k: float(x) * valid.numel() / int(valid.sum()) for k, x in loss.items()}  # as `Gradients` does
        batch: Any = SimpleNamespace(metrics=metrics)
        measure.measure(batch)
        said += [line] if (line := measure.warning()) else []
    assert batch.metrics["ess"] == pytest.approx(float(weight.sum() ** 2 / (weight**2).sum()) / len(weight), rel=1e-4)
    assert set(batch.metrics) == {"none", "rho", "rho_clipped", "ess"}
    share = float((log_ratio > 0)[valid].float().mean())
    bound = "set max_lag (0: no limit; not with hogwild or store)"
    advice = "vtrace.replay_share" if replayed else bound
    assert said == [
        f"off-policy: the samples of a batch count as {100 * batch.metrics['ess']:.0f}% of their number (ess), and "
        f"{100 * share:.0f}% of the importance weights are clipped. Set optim.lr lower, or {advice}"
    ]
