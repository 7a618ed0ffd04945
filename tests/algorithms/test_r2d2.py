"""R2D2: stored states, targets and priorities of sequences."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from coterie.algorithms.r2d2 import R2D2
from coterie.build.resources import resolve_config
from coterie.ops.q import rescale, unscale
from coterie.roles.learner_process import LearnerProcess
from tests.algorithms.harness import CORE, build, drawn, moved
from tests.conftest import VECTOR, after, make_config, make_rollout


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize(("kept", "begins"), [(300, range(10)), (5, range(7, 10))], ids=["whole", "wrapped"])
def test_a_stored_state_is_the_acting_state_at_the_first_row_of_the_burn_in(stored, kept, begins):
    """With unchanged weights the learner's values are those that acted, from the first row on, over resets; with zeros
    in the place of the stored state they are not. `kept`: rollouts of each env that the ring has room for, of 12.
    """
    config = make_config(
        env="coterie.envs.testing:CountingEnv",
        **{
            **CORE, "env.num_envs": 4, "env.groups": 1, "env.threads": 1, "algo.unroll_length": 3, "r2d2.length": 6,
            "r2d2.burn_in": 3, "r2d2.stride": 3, "model.last_action_reward": True, "replay.capacity": 4 * kept * 3,
            "q.learn_start": 1000, "q.epsilon_end": 0.5, "device": "cpu",
        },
    )  # fmt: skip
    learner, stop = LearnerProcess(resolve_config(config)), after(12)
    states, values = [], []  # those that acted, `[rollouts, envs, ...]`

    def look(rollout):
        states.append(rollout.core_state.clone())
        values.append(rollout.behavior_value[:-1].clone())
        return stop(rollout)

    learner.run(look)
    ring = learner.algorithm.replay
    learner.close()
    picks = ring.priorities.draw(40)
    drawn = [*zip((picks.index // ring.ring).tolist(), picks.stamp.tolist(), strict=True)]
    assert {*drawn} == {(env, begin) for env in range(4) for begin in begins}
    rows = ring.gather(picks)
    state = rows.core_state if stored else torch.zeros_like(rows.core_state)
    with torch.no_grad():
        params, _, _ = learner.model(rows.inputs, state)
    value = params[:-1].gather(-1, rows.action[..., None])[..., 0]
    acted = torch.stack([torch.cat([x[:, env] for x in values[i : i + 3]]) for env, i in drawn], 1)
    assert rows.inputs.is_first[1:-1].any()
    if stored:
        assert torch.equal(state, torch.stack([states[i][env] for env, i in drawn]))
        torch.testing.assert_close(value, acted, atol=1e-5, rtol=1e-5)
    else:
        assert (value - acted).abs().max() > 1e-3


def test_r2d2s_loss_and_priorities_are_the_definitions():
    algorithm, model = build(**CORE, **{"q.n_step": 2, "replay.alpha": 0.9, "q.double": True})
    batch = drawn(algorithm, model)[-1]
    target, model = algorithm.target_model, moved(model)
    (part,) = batch.parts()
    loss = algorithm.loss(model, part)
    rows, burn = batch.rows, 6
    online, frozen = (net(rows.inputs, rows.core_state)[0].detach() for net in (model, target))
    assert online.shape == (19, 4, 4)
    total = 0.0
    for i in range(4):
        errors = []
        for t in range(burn, 18):
            if not rows.mask[t, i]:
                errors.append(0.0)
                continue
            gain, discount, at = 0.0, 1.0, t
            for _ in range(2):
                if at == 18:
                    break
                gain += discount * float(rows.reward[at, i])
                discount *= 0.9 * float(~rows.terminated[at, i])
                at += 1
                if rows.terminated[at - 1, i] or at == 18 or not rows.mask[at, i]:
                    break
            best = online[at, i].argmax()
            wanted = rescale(gain + discount * unscale(frozen[at, i, best]))
            errors.append(float(online[t, i, rows.action[t, i]] - wanted))
        errors = np.array(errors)
        total += float(rows.weight[i]) * (errors**2).sum() / 2
        priority = 0.9 * np.abs(errors).max() + 0.1 * np.abs(errors).mean()
        assert float(loss.priority[i]) == pytest.approx(priority, abs=1e-4)
    assert float(loss.total.detach()) == pytest.approx(total / (12 * 4), abs=1e-4)


@pytest.mark.parametrize(("stride", "room"), [(18, 4), (18, 5), (96, 17), (96, 18)])
def test_a_replay_that_is_empty_at_times_is_refused(stride, room):
    """It overwrites a sequence before the next one, `stride` rows later, is whole. `room`: in rollouts of each env."""
    algorithm, model = build(**{**CORE, "r2d2.stride": stride, "replay.capacity": 8 * 6 * room})
    found = [x.field for x in R2D2.refusals if x.applies(algorithm.config, VECTOR)]
    refused = room < (18 + stride) // 6 - 1
    assert ("replay.capacity" in found) == refused
    sizes, last = [], None
    for i in range(40):
        rollout = make_rollout(VECTOR, 6, 8, i, core_size=8)
        if last is not None:
            rollout.obs[0] = last  # it goes on from the one before
        last = rollout.obs[-1]
        list(algorithm.batches(model, rollout))
        sizes.append(algorithm.replay.size)
    assert (0 in sizes[2:]) == refused
