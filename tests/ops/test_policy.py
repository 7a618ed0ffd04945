"""Losses against the papers' formulas element by element, and the one reduction."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from coterie.ops.policy import (
    masked_mean,
    normalize,
    policy_gradient,
    ppo_clip,
    ppo_stats,
    value_loss,
    value_loss_clipped,
)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_policy_gradient_and_where_its_gradient_goes() -> None:
    log_prob, advantage = normal(0, 3, 4).requires_grad_(), normal(1, 3, 4).requires_grad_()
    loss = policy_gradient(log_prob, advantage)
    assert torch.equal(loss, -(log_prob * advantage))
    loss.sum().backward()
    assert advantage.grad is None
    assert torch.equal(log_prob.grad, -advantage.detach())  # type: ignore[arg-type]


@given(new=st.floats(-8, 0), old=st.floats(-8, 0), adv=st.floats(-5, 5), clip=st.sampled_from([0.1, 0.2, 0.5]))
def test_ppo_clip_is_the_papers_equation(new: float, old: float, adv: float, clip: float) -> None:
    ratio = np.exp(new - old)
    expected = -min(ratio * adv, float(np.clip(ratio, 1 - clip, 1 + clip)) * adv)
    args = [torch.tensor([x], dtype=torch.float64) for x in (new, old, adv)]
    assert ppo_clip(*args, clip).item() == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_ppo_gradient_is_the_policy_gradient_at_ratio_one_and_none_past_the_clip() -> None:
    old, adv = normal(2, 50), normal(3, 50)
    same = old.clone().requires_grad_()
    ppo_clip(same, old, adv, 0.2).sum().backward()
    torch.testing.assert_close(same.grad, -adv)
    moved = (old + 0.5 * adv.sign()).requires_grad_()  # every ratio already past the clip, the way A pushes it
    ppo_clip(moved, old, adv, 0.2).sum().backward()
    assert (moved.grad == 0).all()  # type: ignore[union-attr]


def test_the_ppo_gradient_is_that_of_the_equation() -> None:
    old, adv = normal(2, 500), normal(3, 500)
    ours, autograd = (normal(2, 500).add(0.3 * normal(4, 500)).requires_grad_() for _ in range(2))
    ppo_clip(ours, old, adv, 0.2).sum().backward()
    ratio = (autograd - old).exp()
    torch.minimum(ratio * adv, ratio.clamp(0.8, 1.2) * adv).sum().neg().backward()
    torch.testing.assert_close(ours.grad, autograd.grad)


@pytest.mark.parametrize("gap", [-1000.0, 1000.0])
@pytest.mark.parametrize("adv", [-1.0, 1.0])
def test_an_absurd_ratio_gives_finite_loss_and_gradient(gap: float, adv: float) -> None:
    new = torch.tensor([gap], requires_grad=True)
    loss = ppo_clip(new, torch.zeros(1), torch.tensor([adv]), 0.2)
    loss.sum().backward()
    assert torch.isfinite(loss).all()
    assert torch.isfinite(new.grad).all()  # type: ignore[arg-type]


def test_ppo_stats_estimate_the_kl_and_count_the_clipped() -> None:
    rng = np.random.default_rng(0)
    mu, pi = np.array([0.2, 0.5, 0.3]), np.array([0.3, 0.3, 0.4])
    a = rng.choice(3, size=200_000, p=mu)
    log_mu, log_pi = (torch.from_numpy(np.log(p)[a]) for p in (mu, pi))
    clipped, kl = ppo_stats(log_pi, log_mu, 0.35)
    assert (kl >= 0).all()
    assert kl.mean().item() == pytest.approx((mu * np.log(mu / pi)).sum(), rel=0.01)
    ratio = (pi / mu)[a]  # 1.5, 0.6, 1.33: the first two are clipped
    assert torch.equal(clipped, torch.from_numpy(np.abs(ratio - 1) > 0.35).float())
    assert clipped.mean().item() == pytest.approx(0.7, abs=0.01)


def test_value_losses_are_the_papers_formulas() -> None:
    value, old, target = (normal(s, 200) for s in (4, 5, 6))
    np.testing.assert_allclose(value_loss(value, target), (target.numpy() - value.numpy()) ** 2, rtol=1e-6)
    v, o, g = (x.double().numpy() for x in (value, old, target))
    expected = [max((a - c) ** 2, (b + min(max(a - b, -0.3), 0.3) - c) ** 2) for a, b, c in zip(v, o, g, strict=True)]
    np.testing.assert_allclose(value_loss_clipped(value, old, target, 0.3), expected, rtol=1e-5)
    torch.testing.assert_close(value_loss_clipped(value, value, target, 0.3), value_loss(value, target))


def test_targets_and_behavior_values_get_no_gradient() -> None:
    value, old, target = (normal(s, 9).requires_grad_() for s in (4, 5, 6))
    (value_loss(value, target) + value_loss_clipped(value, old, target, 0.3)).sum().backward()
    assert value.grad is not None
    assert old.grad is None
    assert target.grad is None


def test_normalize_has_mean_zero_and_deviation_one_on_valid_rows_only() -> None:
    mask = normal(7, 20, 8) > -0.5
    x = torch.where(mask, normal(8, 20, 8) * 3 + 5, torch.nan)
    out = normalize(x, mask)
    valid = out[mask].double()
    assert valid.mean().item() == pytest.approx(0, abs=1e-6)
    assert valid.std(correction=0).item() == pytest.approx(1, abs=1e-5)
    assert (out[~mask] == 0).all()
    torch.testing.assert_close(normalize(x[mask], torch.ones_like(x[mask], dtype=torch.bool)), out[mask])
    assert torch.equal(normalize(torch.full((3, 2), 4.0), torch.ones(3, 2, dtype=torch.bool)), torch.zeros(3, 2))
    assert torch.equal(normalize(torch.ones(3, 2), torch.zeros(3, 2, dtype=torch.bool)), torch.zeros(3, 2))


@settings(max_examples=30)
@given(seed=st.integers(0, 1000), sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_chunks_of_a_masked_mean_add_up(seed: int, sizes: list[int]) -> None:
    """Values and gradients, whatever the masks of the chunks are: valid rows spread unevenly."""
    n = sum(sizes)
    x, mask = normal(seed, n).requires_grad_(), normal(seed + 1, n) > 0
    masked_mean(x * x, mask, n).backward()
    whole, total = x.grad, masked_mean(x * x, mask, n).item()
    x.grad = None
    parts = 0.0
    for rows, part in zip(x.split(sizes), mask.split(sizes), strict=True):
        loss = masked_mean(rows * rows, part, n)
        loss.backward()
        parts += loss.item()
    assert parts == pytest.approx(total, rel=1e-5, abs=1e-6)
    assert torch.equal(x.grad, whole)  # type: ignore[arg-type]


def test_masked_rows_that_are_not_finite_add_nothing() -> None:
    x = torch.tensor([1.0, torch.nan, torch.inf, 3.0], requires_grad=True)
    mask = torch.tensor([True, False, False, True])
    loss = masked_mean(x, mask, 4)
    loss.backward()
    assert loss.item() == 1
    assert x.grad.tolist() == [0.25, 0, 0, 0.25]  # type: ignore[union-attr]


def test_masked_mean_keeps_axes_before_the_masks() -> None:
    x, mask = torch.randn(5, 3, 2), torch.tensor([[True, False], [True, True], [False, True]])
    expected = torch.stack([masked_mean(row, mask, 6) for row in x])
    torch.testing.assert_close(masked_mean(x, mask, 6), expected)


def test_losses_refuse_shapes_that_differ() -> None:
    with pytest.raises(AssertionError):
        policy_gradient(torch.zeros(3, 2), torch.zeros(3, 1))
    with pytest.raises(AssertionError):
        masked_mean(torch.zeros(3, 2), torch.ones(3, dtype=torch.bool), 6)
