"""The lone learner's exchange: the NaN guard, clipping before the update, state that is restored."""

from __future__ import annotations

import pytest
import torch

from coterie.config import Optim
from coterie.exchange.base import NonFinite
from coterie.exchange.solo import Solo
from coterie.ops.optim import make_rule
from coterie.parallel.params import FlatParams
from tests.exchange.harness import make_setup


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_names_its_tensor_and_changes_nothing(small_model, bad):
    params = FlatParams(small_model)
    exchange = Solo(make_setup(params, make_rule(Optim()), clip=0.5))
    params.grad.fill_(0.1)
    exchange.step(params, 1e-3)
    weights, state = params.data.clone(), {k: v.clone() for k, v in exchange.state_dict().items()}
    params.grad.fill_(0.1)
    params.grad[params.slices["policy.weight"].start + 1] = bad
    with pytest.raises(NonFinite, match=r"the gradient of policy\.weight is not finite"):
        exchange.step(params, 1e-3)
    assert torch.equal(params.data, weights)
    assert all(torch.equal(v, state[k]) for k, v in exchange.state_dict().items())


def test_skipping_counts_and_goes_on(small_model):
    params = FlatParams(small_model)
    exchange = Solo(make_setup(params, make_rule(Optim()), clip=0.5, skip=True))
    weights = params.data.clone()
    params.grad[3] = float("nan")
    exchange.step(params, 1e-3)
    assert exchange.guard.skipped == 1
    assert torch.equal(params.data, weights)
    assert not params.grad.any()
    params.grad.fill_(1.0)
    exchange.step(params, 1e-3)
    assert not torch.equal(params.data, weights)


def test_step_equals_torchs_clip_and_rmsprop(small_model):
    params = FlatParams(small_model)
    reference = [p.detach().clone().requires_grad_() for p in small_model.parameters()]
    optimizer = torch.optim.RMSprop(reference, lr=1e-2, alpha=0.99, eps=1e-5)
    exchange = Solo(make_setup(params, make_rule(Optim(rule="rmsprop", alpha=0.99, eps=1e-5)), clip=0.5))
    rng = torch.Generator().manual_seed(0)
    for _ in range(5):
        for p, r in zip(small_model.parameters(), reference, strict=True):
            r.grad = torch.randn(r.shape, generator=rng)
            p.grad.copy_(r.grad)
        norm = torch.nn.utils.clip_grad_norm_(reference, 0.5)
        optimizer.step()
        assert exchange.step(params, 1e-2) == pytest.approx(float(norm), rel=1e-5)
        for p, r in zip(small_model.parameters(), reference, strict=True):
            torch.testing.assert_close(p, r, atol=1e-6, rtol=1e-5)
