"""Heads, their initial weights, and running normalizers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

Layer = TypeVar("Layer", nn.Linear, nn.Conv2d)


def init(layer: Layer, gain: float = math.sqrt(2)) -> Layer:
    """The layer, with orthogonal weights of `gain` and zero bias."""
    nn.init.orthogonal_(layer.weight, gain)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return layer


class NoisyLinear(nn.Module):
    """A layer with learned, factorised noise on its weights (NoisyNets, https://arxiv.org/abs/1706.10295). The noise is
    a buffer that only `resample` changes.
    """

    eps_in: Tensor
    eps_out: Tensor

    def __init__(self, in_size: int, out_size: int, sigma: float = 0.5) -> None:
        super().__init__()
        bound = in_size**-0.5
        self.weight = nn.Parameter(torch.empty(out_size, in_size).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(out_size).uniform_(-bound, bound))
        self.weight_sigma = nn.Parameter(torch.full((out_size, in_size), sigma * bound))
        self.bias_sigma = nn.Parameter(torch.full((out_size,), sigma * bound))
        self.register_buffer("eps_in", torch.zeros(in_size))
        self.register_buffer("eps_out", torch.zeros(out_size))

    @torch.no_grad()
    def resample(self, rng: torch.Generator | None) -> None:
        """None: no noise."""
        for eps in (self.eps_in, self.eps_out):
            if rng is None:
                eps.zero_()
                continue
            drawn = torch.randn(eps.shape, generator=rng, device=rng.device)
            eps.copy_(drawn.sign() * drawn.abs().sqrt())

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight + self.weight_sigma * torch.outer(self.eps_out, self.eps_in)
        return nn.functional.linear(x, weight, self.bias + self.bias_sigma * self.eps_out)


class QHead(nn.Module):
    """Features `[N, size]` -> values `[N, actions]`, or with `atoms` the logits of their distributions, side by side.

    With `dueling` units: Q = V + A - mean A, from two streams of one hidden layer each (arXiv 1511.06581), whose
    gradients into the features are scaled by the root of a half if `scaled` (SEED RL's R2D2 does not).
    """

    def __init__(self, size: int, actions: int, atoms: int, dueling: int, noisy: bool, scaled: bool = True) -> None:
        super().__init__()
        self.actions, self.atoms, self.scaled = actions, max(1, atoms), scaled

        def layer(inputs: int, outputs: int, gain: float) -> nn.Module:
            return NoisyLinear(inputs, outputs) if noisy else init(nn.Linear(inputs, outputs), gain)

        def stream(outputs: int) -> nn.Module:
            if not dueling:
                return layer(size, outputs, 0.01)
            return nn.Sequential(layer(size, dueling, 2**0.5), nn.ReLU(), layer(dueling, outputs, 0.01))

        self.value: nn.Module | None = None
        self.advantage = stream(actions * self.atoms)
        if dueling:
            self.value = stream(self.atoms)

    def forward(self, x: Tensor) -> Tensor:
        if self.value is None:
            return cast(Tensor, self.advantage(x))
        if x.requires_grad and self.scaled:
            x = x * 0.5**0.5 + x.detach() * (1 - 0.5**0.5)
        a = self.advantage(x).unflatten(-1, (self.actions, self.atoms))
        return cast(Tensor, (self.value(x)[..., None, :] + a - a.mean(-2, keepdim=True)).flatten(-2))


_NEAR, _RAISE = 10.0, 0.1  # deviations; the share of the variance that one row may add
_ABSURD = 1e6  # times the mean, or 1 where that is larger


class Normalizer(nn.Module):
    """Running mean and deviation over all rows seen, as buffers: saved and published with the parameters.

    Chan et al.'s parallel update, in float64, so that the order of batches does not matter beyond rounding. Absurd
    numbers, as a broken sensor gives, must not blind the policy in that input. Those in at most a quarter of a batch,
    beyond `_ABSURD` and `_NEAR` deviations of the other rows, do not count at all. Others are clamped to `_NEAR`
    deviations from the mean, or to where one row adds `_RAISE` of the variance if that is further: the more rows there
    are, the rarer a number may be that counts in full.
    """

    mean: Tensor
    m2: Tensor
    count: Tensor
    center: Tensor
    deviation: Tensor

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("m2", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        # What `forward` needs of them, computed once; buffers, so that copies and other devices have them.
        self.register_buffer("center", torch.zeros(shape), persistent=False)
        self.register_buffer("deviation", torch.ones(shape), persistent=False)
        self.register_load_state_dict_post_hook(_loaded)  # type: ignore[no-untyped-call]
        self.outliers = 0  # rows that did not count as they are

    @torch.no_grad()
    def update(self, x: Tensor) -> None:
        """Take in rows `[N, *shape]`."""
        if not len(x):
            return
        x = self._without_outliers(x.double())
        n, mean = len(x), x.mean(0)
        delta, total = mean - self.mean, self.count + n
        self.m2 += ((x - mean) ** 2).sum(0) + delta**2 * self.count * n / total
        self.mean += delta * n / total
        self.count.copy_(total)
        self.changed()

    @torch.no_grad()
    def count_as(self, rows: float) -> None:
        """Count all rows seen, if there are any, as at least this many, so that others move the mean slowly."""
        if 0 < self.count < rows:
            self.m2 *= rows / self.count
            self.count.fill_(rows)

    def _without_outliers(self, x: Tensor) -> Tensor:
        center = self.mean if self.count else x.sort(0).values[(len(x) - 1) // 2]
        most = max(_NEAR, (_RAISE * (float(self.count) + len(x))) ** 0.5)
        away, bound = (x - center).abs(), most * (self.m2 / self.count.clamp(min=1) + 1e-8).sqrt()
        if not (away > bound).any():
            return x
        usual = _NEAR * _deviation(away, len(x) - len(x) // 4)
        absurd = away > torch.maximum(torch.maximum(bound, usual), _ABSURD * center.abs().clamp(min=1))
        away[absurd] = 0
        # An input may begin to move: the deviation is at least that of this batch, without its furthest rows.
        bound = torch.maximum(bound, most * _deviation(away, len(x) - 1 - len(x) // 100))
        self.outliers += int((absurd | (away > bound)).reshape(len(x), -1).any(1).sum())
        return torch.where(absurd, center, x).clamp(center - bound, center + bound)

    @torch.no_grad()
    def changed(self) -> None:
        """Follow `mean`, `m2` and `count`. The deviation is 1 before the second row."""
        var = torch.where(self.count > 1, self.m2 / self.count.clamp(min=1), 1.0)
        self.center.copy_(self.mean)
        self.deviation.copy_((var + 1e-8).sqrt_())

    def forward(self, x: Tensor) -> Tensor:
        return ((x.float() - self.center) / self.deviation).clamp(-10, 10)


def _deviation(away: Tensor, nearest: int) -> Tensor:
    """Deviation of the `nearest` rows, where all others are at the center."""
    return (away.sort(0).values[:nearest].square().sum(0) / len(away)).sqrt()


def _loaded(normalizer: nn.Module, keys: object) -> None:  # a method would be the original's in a copy
    cast(Normalizer, normalizer).changed()


class Moments:
    """The rows that some normalizers have seen, as one vector of sums that learners can add up or average."""

    def __init__(self, normalizers: Sequence[Normalizer]) -> None:
        self.normalizers = list(normalizers)
        self.size = sum(2 * x.mean.numel() + 1 for x in self.normalizers)

    def read(self) -> Tensor:
        """`[size]` float64 on the CPU: count, sums and sums of squares of each normalizer."""
        parts = [torch.zeros(0, dtype=torch.float64)]
        for x in self.normalizers:
            total = x.mean * x.count
            parts += [x.count.reshape(1), total.reshape(-1), (x.m2 + x.mean * total).reshape(-1)]
        return torch.cat([p.cpu() for p in parts])

    def write(self, sums: Tensor) -> None:
        at = 0
        for x in self.normalizers:
            n = x.mean.numel()
            count, total, squares = sums[at], sums[at + 1 : at + 1 + n], sums[at + 1 + n : at + 1 + 2 * n]
            mean = total / count.clamp(min=1e-12)
            x.count.copy_(count)
            x.mean.copy_(mean.view_as(x.mean))
            x.m2.copy_((squares - mean * total).clamp(min=0).view_as(x.m2))
            x.changed()
            at += 2 * n + 1
