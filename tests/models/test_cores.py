"""Recurrent cores as a GPU runs them, against how a CPU does."""

from __future__ import annotations

import pytest
import torch

from coterie.models.cores import GRUCore, LSTMCore


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("kind", [LSTMCore, GRUCore])
def test_packed_episodes_are_the_stretches_between_resets(kind, share):
    """In output, last state and gradients; the first is what a GPU runs."""
    core, (t, b, f) = kind(5, 7), (13, 4, 5)
    x, state, is_first = torch.randn(t, b, f, requires_grad=True), torch.randn(b, *core.shape), torch.rand(t, b) < share
    found = []
    for run in (core._packed, core._stretches):
        y, after = run(x, is_first, state, ~is_first.reshape(t, b, *(1 for _ in core.shape)))
        grads = torch.autograd.grad((y**2).sum() + after.sum(), [x, *core.parameters()])
        found.append((y, after, *grads))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
