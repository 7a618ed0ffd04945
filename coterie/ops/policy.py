"""Losses of policies and values, per element: same shape in and out, no reduction but `masked_mean`.

All float32. Advantages, behavior terms and targets are constants: no gradient flows into them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # exp overflows at 88, and 0 * inf would make the gradient of a clipped element NaN


def _same(*tensors: Tensor) -> None:
    assert all(t.shape == tensors[0].shape for t in tensors), [tuple(t.shape) for t in tensors]


def policy_gradient(log_prob: Tensor, advantage: Tensor) -> Tensor:
    """-log pi(a|x) A (https://arxiv.org/abs/1602.01783)."""
    _same(log_prob, advantage)
    return log_prob * -advantage.detach()


class _PPOClip(torch.autograd.Function):
    """Its derivative is known with its value. Left to autograd, the backward pass is 15 calls instead of one."""

    @staticmethod
    def forward(
        ctx: Any, log_prob: Tensor, behavior_log_prob: Tensor, advantage: Tensor, clip: float | Tensor
    ) -> Tensor:
        log_ratio = log_prob - behavior_log_prob
        ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp_()
        plain, clipped = ratio * advantage, ratio.clamp(1 - clip, 1 + clip).mul_(advantage)  # type: ignore[arg-type]
        active = (plain <= clipped).logical_and_(log_ratio.abs_() <= MAX_LOG_RATIO)
        ctx.save_for_backward(torch.where(active, plain, 0.0).neg_())  # the derivative of the ratio is the ratio
        return torch.minimum(plain, clipped).neg_()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None]:
        (slope,) = ctx.saved_tensors
        return grads[0] * slope, None, None, None


def ppo_clip(log_prob: Tensor, behavior_log_prob: Tensor, advantage: Tensor, clip: float | Tensor) -> Tensor:
    """-min(ratio A, clip(ratio, 1 - clip, 1 + clip) A) (https://arxiv.org/abs/1707.06347, eq. 7)."""
    _same(log_prob, behavior_log_prob, advantage)
    return _PPOClip.apply(log_prob, behavior_log_prob, advantage, clip)  # type: ignore[no-any-return, no-untyped-call]


@torch.no_grad()
def ppo_stats(log_prob: Tensor, behavior_log_prob: Tensor, clip: float | Tensor) -> tuple[Tensor, Tensor]:
    """Whether each ratio is outside 1 +- clip (float 0 or 1), and a sample of KL(behavior, policy), in nats.

    The KL estimator is ratio - 1 - log ratio: unbiased and never negative (http://joschu.net/blog/kl-approx.html, k3).
    """
    _same(log_prob, behavior_log_prob)
    log_ratio = (log_prob - behavior_log_prob).clamp_(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    excess = log_ratio.expm1()
    return (excess.abs() > clip).float(), excess - log_ratio


def value_loss(value: Tensor, target: Tensor) -> Tensor:
    """(target - V)^2, without a half."""
    _same(value, target)
    return (value - target.detach()).square()


def value_loss_clipped(value: Tensor, behavior_value: Tensor, target: Tensor, clip: float) -> Tensor:
    """The larger squared error of V and of V moved at most `clip` from the behavior's (OpenAI baselines' PPO)."""
    _same(value, behavior_value, target)
    old = behavior_value.detach()
    near = old + (value - old).clamp(-clip, clip)
    return torch.maximum(value_loss(value, target), value_loss(near, target))


@torch.no_grad()
def normalize(advantage: Tensor, mask: Tensor) -> Tensor:
    """(A - mean) / (deviation + 1e-8) with the moments of the valid rows; masked rows are 0."""
    _same(advantage, mask)
    if bool(mask.all()):  # less than half as many calls
        deviation, mean = torch.std_mean(advantage, correction=0)
        return (advantage - mean) / (deviation + 1e-8)
    count = mask.sum().clamp_(min=1)
    centered = torch.where(mask, advantage, 0.0)
    centered = torch.where(mask, centered - centered.sum() / count, 0.0)
    return centered / ((centered.square().sum() / count).sqrt_() + 1e-8)


def masked_mean(x: Tensor, mask: Tensor, count: int) -> Tensor:
    """Sum of the valid elements over `count`, the T x B of the FULL batch: chunks and learners then add up exactly.

    `x` may have axes before those of the mask, which stay. Whatever a masked row holds, NaN included, adds nothing to
    the sum or the gradient at `x`.
    """
    assert x.shape[x.dim() - mask.dim() :] == mask.shape, (tuple(x.shape), tuple(mask.shape))
    return torch.where(mask, x, 0.0).flatten(x.dim() - mask.dim()).sum(-1) / count
