"""Targets and losses of value learning. Rows `[N]` or time `[T, B]`, float32; no graph but through what is trained.

DQN (Mnih et al. 2015), double DQN (arXiv 1509.06461), C51 (arXiv 1707.06887), R2D2 (Kapturowski et al. 2019) as SEED RL
(arXiv 1910.06591) has it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_EPS = 1e-3  # of `rescale`


def rescale(x: Tensor) -> Tensor:
    """h(x) = sign(x) (sqrt(|x| + 1) - 1) + 0.001 x: values of any size become small ones (Pohlen et al. 2018)."""
    return x.sign() * ((x.abs() + 1).sqrt() - 1) + _EPS * x


def unscale(x: Tensor) -> Tensor:
    """The inverse of `rescale`. In float64 inside: the root takes the digits of large values."""
    y = x.double()
    root = (1 + 4 * _EPS * (y.abs() + 1 + _EPS)).sqrt()
    out: Tensor = y.sign() * (((root - 1) / (2 * _EPS)) ** 2 - 1)
    return out.to(x.dtype)


@torch.no_grad()
def project(probs: Tensor, n_step: Tensor, discount: Tensor, z: Tensor) -> Tensor:
    """Move `probs` `[N, atoms]` from the support `z` to `n_step + discount z` and share it out to `z` again (C51,
    algorithm 1). What lies beyond the ends goes to the ends; no mass is lost.
    """
    step = z[1] - z[0]
    moved = (n_step[:, None] + discount[:, None] * z).clamp(z[0], z[-1])
    # m_i = sum_j p_j max(0, 1 - |moved_j - z_i| / step)
    near = (1 - (moved[:, None, :] - z[None, :, None]).abs() / step).clamp_(min=0)
    shared: Tensor = (near * probs[:, None, :]).sum(-1)
    return shared


def cross_entropy(target: Tensor, logits: Tensor) -> Tensor:
    """-sum m log p, `[N]`. Its gradient is that of the divergence of p from the target m."""
    found: Tensor = -(target * logits.log_softmax(-1)).sum(-1)
    return found


@torch.no_grad()
def divergence(target: Tensor, logits: Tensor) -> Tensor:
    """KL(m || p) `[N]`, which is C51's priority: clamped to at least 0."""
    found: Tensor = cross_entropy(target, logits) + torch.special.xlogy(target, target).sum(-1)
    return found.clamp_(min=0)


def huber(error: Tensor, delta: float) -> Tensor:
    """Squared below `delta`, linear beyond, half of the square to begin with; `delta` 0: squared everywhere."""
    return F.huber_loss(error, torch.zeros_like(error), reduction="none", delta=delta) if delta else error**2 / 2


@torch.no_grad()
def n_step_targets(
    reward: Tensor, terminated: Tensor, mask: Tensor, gamma: float, n: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Within a rollout: sum of rewards `[T, B]`, discount of what follows, and the row of that (`[T, B]` int64).

    The sum goes over at most `n` steps and stops at an episode's end, a masked row, or the rollout's last row.
    """
    t = len(reward)
    ends = terminated.clone()
    ends[:-1] |= ~mask[1:]  # the fake step after an end, or an env that was replaced: the window stops before it
    total, factor = torch.zeros_like(reward), torch.ones_like(reward)
    row = torch.arange(t, device=reward.device)[:, None].expand_as(mask).clone()
    going = mask.clone()
    begin = row.clone()
    for i in range(n):
        at = (begin + i).clamp(max=t - 1)
        going = going & (begin + i < t)
        total += torch.where(going, factor * reward.gather(0, at), 0.0)
        factor = torch.where(going, factor * gamma * ~terminated.gather(0, at), factor)
        row = torch.where(going, begin + i + 1, row)
        going = going & ~ends.gather(0, at)
    return total, torch.where(mask, factor, 0.0), row
