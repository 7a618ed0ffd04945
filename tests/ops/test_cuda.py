"""What a GPU computes by another branch or kernel is what the CPU computes. Skipped where there is no GPU."""

from __future__ import annotations

import math

import pytest
import torch

from coterie.config import Optim
from coterie.ops.dist import Categorical
from coterie.ops.optim import flat_norm_clip, make_rule

DEVICE = "cuda"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.mark.parametrize("name", ["rmsprop", "rmsprop_tf", "adam", "adam_eps_hat"])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_rules(name: str, as_tensor: bool) -> None:
    g = torch.Generator().manual_seed(0)
    here, config = torch.randn(1000, generator=g), Optim(rule=name)  # type: ignore[arg-type]
    there, rules = here.to(DEVICE, copy=True), (make_rule(config), make_rule(config))
    states = rules[0].state(here), rules[1].state(there)
    for _ in range(30):
        grad = torch.randn(1000, generator=g)
        rules[0].update(here, grad, states[0], 1e-2)
        rules[1].update(there, grad.to(DEVICE), states[1], torch.tensor(1e-2, device=DEVICE) if as_tensor else 1e-2)
    torch.testing.assert_close(there.cpu(), here, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bad", [1.0, math.nan, math.inf])
@pytest.mark.parametrize("bound", [0.0, 0.5, 1e9])
def test_clip(bad: float, bound: float) -> None:
    here = torch.ones(1000)
    here[7] = bad
    there = here.to(DEVICE, copy=True)
    norms = flat_norm_clip(here, bound), flat_norm_clip(there, bound)
    torch.testing.assert_close(norms[1].cpu(), norms[0], equal_nan=True)
    torch.testing.assert_close(there.cpu(), here, equal_nan=True)


def test_samples_have_their_log_prob() -> None:
    params = torch.randn(500, 6, device=DEVICE)
    action, log_prob = Categorical(6).sample_with_log_prob(params, torch.Generator(DEVICE).manual_seed(0))
    torch.testing.assert_close(log_prob.cpu(), Categorical(6).log_prob(params.cpu(), action.cpu()))
