"""Targets of value learning against loops over their definitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from coterie.ops.q import cross_entropy, divergence, huber, n_step_targets, project, rescale, unscale
from tests.conftest import VECTOR, make_rollout
from tests.ops.trajectories import GAMMA, Data, close, slow_n_step


def test_the_rescaling_of_values_is_undone_by_its_inverse():
    x = torch.cat((torch.linspace(-1e6, 1e6, 10_001), torch.linspace(-2, 2, 1001))).double()
    torch.testing.assert_close(unscale(rescale(x)), x, atol=1e-6, rtol=1e-9)
    torch.testing.assert_close(rescale(unscale(x)), x, atol=1e-11, rtol=1e-12)
    assert (rescale(x)[1:10_001].diff() > 0).all()
    single = x[::100].float()
    torch.testing.assert_close(unscale(rescale(single)), single, atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(rescale(unscale(x.float())), x.float(), atol=3e-7, rtol=3e-7)


@pytest.mark.parametrize("seed", range(3))
def test_projection_is_the_papers_algorithm(seed):
    rng = np.random.default_rng(seed)
    atoms, low, high = 11, -3.0, 5.0
    z, step = np.linspace(low, high, atoms), (high - low) / (atoms - 1)
    probs = rng.dirichlet(np.ones(atoms), 50)
    reward = rng.normal(scale=4, size=50)
    discount = np.where(rng.random(50) < 0.3, 0.0, 0.97)
    reward[:5], discount[:5] = z[:5], 0.0  # exactly on an atom
    reward[5:7], discount[5:7] = (99.0, -99.0), 0.0  # beyond the ends
    expected = np.zeros((50, atoms))
    for i in range(50):
        for j in range(atoms):
            b = (np.clip(reward[i] + discount[i] * z[j], low, high) - low) / step
            down, up = int(np.floor(b + 1e-9)), int(np.ceil(b - 1e-9))
            if down == up:
                expected[i, down] += probs[i, j]
            else:
                expected[i, down] += probs[i, j] * (up - b)
                expected[i, up] += probs[i, j] * (b - down)
    found = project(
        *(torch.tensor(x, dtype=torch.float32) for x in (probs, reward, discount)), torch.linspace(low, high, atoms)
    )
    np.testing.assert_allclose(found, expected, atol=2e-5)
    np.testing.assert_allclose(found.sum(1), 1, atol=1e-5)
    assert found[5].argmax() == atoms - 1
    assert found[6].argmax() == 0


def test_cross_entropy_and_divergence_are_torchs():
    target, logits = torch.rand(20, 7).softmax(-1), torch.randn(20, 7, requires_grad=True)
    target[0] = 0
    target[0, 3] = 1  # 0 log 0 is 0
    cross_entropy(target, logits).sum().backward()
    torch.testing.assert_close(logits.grad, logits.detach().softmax(-1) - target)
    p = logits.detach().softmax(-1)
    kl = torch.nn.functional.kl_div(p.log(), target, reduction="none").sum(-1)
    torch.testing.assert_close(divergence(target, logits), kl, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(divergence(p, logits.detach()), torch.zeros(20), atol=1e-5, rtol=0)


def test_huber_is_half_the_square_until_delta():
    x = torch.tensor([-3.0, -0.5, 0.0, 1.0, 2.0])
    assert huber(x, 1.0).tolist() == [2.5, 0.125, 0.0, 0.5, 1.5]
    assert huber(x, 0.0).tolist() == [4.5, 0.125, 0.0, 0.5, 2.0]


@pytest.mark.parametrize("n", [1, 3, 50])
@pytest.mark.parametrize("seed", range(5))
def test_n_step_targets_are_n_step_returns(n, seed):
    r = make_rollout(VECTOR, 12, 8, seed)
    value = r.behavior_value
    total, discount, row = n_step_targets(r.reward, r.terminated, r.mask, GAMMA, n)
    expected = slow_n_step(Data(value[:-1], r.reward, value, r.terminated, r.mask), n)
    found = torch.where(r.mask, total + discount * value.gather(0, row), 0.0)
    close(found, expected)
    assert not total[~r.mask].any()
    assert not discount[~r.mask].any()
