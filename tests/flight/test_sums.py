"""Check sums of rollouts: each env's is its own, and each kind of difference shows."""

from __future__ import annotations

import pytest
import torch

from coterie.flight.sums import differing_envs, rollout_sums, weight_sums
from coterie.parallel.params import FlatParams
from tests.conftest import IMAGE, VECTOR, make_rollout


@pytest.mark.parametrize("spec", [VECTOR, IMAGE])
@pytest.mark.parametrize("field", ["reward", "terminated", "truncated", "obs"])
def test_an_env_that_differs_is_found(spec, field):
    rollout = make_rollout(spec, 6, 5)
    rollout.env_id = torch.arange(10, 15)
    first, sums = rollout_sums(rollout)
    assert rollout_sums(rollout) == (first, sums)
    changed = getattr(rollout, field)
    at = (-1, 3) if field == "obs" else (4, 3)
    changed[at] = ~changed[at] if changed.dtype == torch.bool else changed[at] + 1
    again, others = rollout_sums(rollout)
    assert again == first
    assert differing_envs(sums, others, rollout.env_id) == [13]


@pytest.mark.parametrize("field", ["action", "behavior_log_prob"])
def test_another_first_action_differs_in_the_first_sum(field):
    rollout = make_rollout(VECTOR, 6, 5)
    before = rollout_sums(rollout)
    getattr(rollout, field)[0, 2] += 1
    after = rollout_sums(rollout)
    assert (after[0] != before[0], after[1]) == (True, before[1])


def test_the_tensor_that_differs_is_found():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    params, moments = FlatParams(model), torch.zeros(3, dtype=torch.float64)
    before = weight_sums(params, moments)
    assert len(before) == len(params.slices) + 1
    with torch.no_grad():
        model[1].weight[0, 0] += 1e-7
    after = weight_sums(params, moments)
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, True, False, True, True]
