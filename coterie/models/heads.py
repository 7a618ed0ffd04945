"""Heads and running normalizers."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def linear(in_size: int, out_size: int, gain: float) -> nn.Linear:
    """A layer with orthogonal weights of `gain` and zero bias."""
    layer = nn.Linear(in_size, out_size)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class Normalizer(nn.Module):
    """Running mean and deviation over all rows seen, as buffers: saved and published with the parameters.

    Chan et al.'s parallel update, in float64, so that the order of batches does not matter beyond rounding.
    """

    mean: Tensor
    m2: Tensor
    count: Tensor

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("m2", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    @torch.no_grad()
    def update(self, x: Tensor) -> None:
        """Take in rows `[N, *shape]`."""
        if not len(x):
            return
        x = x.double()
        n, mean = len(x), x.mean(0)
        delta, total = mean - self.mean, self.count + n
        self.m2 += ((x - mean) ** 2).sum(0) + delta**2 * self.count * n / total
        self.mean += delta * n / total
        self.count.copy_(total)

    def deviation(self) -> Tensor:
        """Float32; 1 before the second row."""
        var = torch.where(self.count > 1, self.m2 / self.count.clamp(min=1), torch.ones_like(self.m2))
        return (var + 1e-8).sqrt().float()

    def forward(self, x: Tensor) -> Tensor:
        return ((x.float() - self.mean.float()) / self.deviation()).clamp(-10, 10)
