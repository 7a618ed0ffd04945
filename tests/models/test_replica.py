"""Replicas of a model: the same weights, gradients apart."""

from __future__ import annotations

import torch

from coterie.config import Model
from coterie.models.build import Network
from coterie.parallel.params import FlatParams
from tests.conftest import VECTOR, make_rollout
from tests.models.test_models import inputs_of


def test_a_replica_shares_weights_and_buffers_but_not_gradients():
    model = Network(VECTOR, Model(hidden=(8,), normalize_obs=True))
    params = FlatParams(model)
    twin, grad = params.replica(model)
    seen = inputs_of(make_rollout(VECTOR, 4, 3), 4)
    params.data.add_(0.5)
    model.observe(seen.obs, torch.ones(4, 3, dtype=torch.bool))
    assert float(twin.obs_norm["obs_"].count) == 12
    out, value, _ = twin(seen)
    torch.testing.assert_close(out, model(seen)[0])
    (out.sum() + value.sum()).backward()
    assert not params.grad.any()
    out, value, _ = model(seen)
    (out.sum() + value.sum()).backward()
    assert params.grad.any()
    assert torch.equal(params.grad, grad)
