"""Made-up trajectories, and the papers' sums over them, written slowly."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.ops.vtrace import Clips, VTrace, vtrace

GAMMA = 0.9
INF = math.inf


@dataclass
class Data:
    log_ratio: Tensor
    reward: Tensor
    value: Tensor
    terminated: Tensor
    mask: Tensor

    @property
    def rows(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What `gae` takes."""
        return self.reward, self.value, self.terminated, self.mask

    def vtrace(self, gamma: float = GAMMA, **options: Any) -> VTrace:
        return vtrace(self.log_ratio, *self.rows, gamma, Clips(**options))


def make(seed: int, t: int = 9, b: int = 5, ends: float = 0.15) -> Data:
    """Flags and masks that are independent of each other: more than what a rollout can hold."""
    rng = np.random.default_rng(seed)
    floats = [rng.normal(size=(rows, b)).astype(np.float32) for rows in (t, t, t + 1)]
    flags = [rng.random((t, b)) < ends, rng.random((t, b)) > ends]
    return Data(*map(torch.from_numpy, floats + flags))


def slow_vtrace(
    d: Data, gamma: float, rho_bar: float, c_bar: float, pg_rho_bar: float, lam: float, q_from: str
) -> tuple[np.ndarray, np.ndarray, float]:
    """Both outputs as sums over each row's future, and the largest term of any sum, which rounding goes by."""
    value, reward = d.value.double().numpy(), d.reward.double().numpy()
    ratio, mask = np.exp(d.log_ratio.double().numpy()), d.mask.numpy()
    steps, envs = reward.shape
    target, advantage, largest = value.copy(), np.zeros((steps, envs)), 1.0
    for i in range(envs):
        for s in reversed(range(steps)):
            weight = 1.0
            for t in range(s, steps):
                if not mask[t, i]:
                    break
                discount = 0.0 if d.terminated[t, i] else gamma
                delta = min(rho_bar, ratio[t, i]) * (reward[t, i] + discount * value[t + 1, i] - value[t, i])
                target[s, i] += weight * delta
                largest = max(largest, abs(weight * delta))
                weight *= discount * lam * min(c_bar, ratio[t, i])
            if mask[s, i]:
                after = target[s + 1, i] if q_from == "target" else value[s + 1, i]
                q = reward[s, i] + (0.0 if d.terminated[s, i] else gamma) * after
                advantage[s, i] = min(pg_rho_bar, ratio[s, i]) * (q - value[s, i])
                largest = max(largest, abs(advantage[s, i]), min(pg_rho_bar, ratio[s, i]) * largest)
    return target[:-1], advantage, largest


def slow_n_step(d: Data, n: int) -> np.ndarray:
    """G_t = sum_i gamma^i r_{t+i} + gamma^m V_{t+m}, m <= n the steps until the episode's or the rollout's last obs."""
    reward, value, mask = d.reward.double().numpy(), d.value.double().numpy(), d.mask.numpy()
    out = np.zeros(reward.shape)
    for t, i in np.ndindex(*reward.shape):
        m, over = 0, False
        while m < n and t + m < len(reward) and mask[t + m, i] and not over:
            out[t, i] += GAMMA**m * reward[t + m, i]
            over = bool(d.terminated[t + m, i])
            m += 1
        if m and not over:
            out[t, i] += GAMMA**m * value[t + m, i]
    return out


def close(actual: Tensor, expected: np.ndarray | Tensor, atol: float = 1e-5) -> None:
    np.testing.assert_allclose(actual.numpy(), np.asarray(expected), rtol=1e-5, atol=atol)
