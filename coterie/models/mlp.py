"""Layers over vectors, and the dtype that torsos compute in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn

from coterie.models.heads import init
from coterie.types import ObsSpec


def compute_dtype(weight: Tensor) -> torch.dtype:
    """The dtype that the next matrix product runs in: autocast's, or the weights' own."""
    kind = weight.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype


class _Tanh(torch.autograd.Function):
    """tanh(x) = 2 sigmoid(2x) - 1, in place but for the first step, and torch's own derivative.

    Torch's tanh takes 2.6 ns an element on one core, this 0.7: a sixth of a small net's training time.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = _tanh(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        (y,) = ctx.saved_tensors
        return torch.ops.aten.tanh_backward(grads[0], y)  # type: ignore[no-any-return]


def _tanh(x: Tensor) -> Tensor:
    y = torch.add(x, x).sigmoid_()
    return y.add_(y).sub_(1)


class Tanh(nn.Module):
    """tanh, by the fastest way for the input."""

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda or x.dtype != torch.float32:  # in bfloat16 the difference would have no digits near 0
            return torch.tanh(x)
        return cast(Tensor, _Tanh.apply(x)) if x.requires_grad else _tanh(x)  # type: ignore[no-untyped-call]


def scale_of(spec: ObsSpec) -> float:
    """What a network multiplies an observation by: bytes become numbers up to 1, other types stay as they are."""
    return 1 / max(1.0, min(255.0, spec.high)) if spec.dtype == "uint8" else 1.0


class MLPTorso(nn.Module):
    """Layers of `hidden` over a flattened observation times `scale`."""

    def __init__(self, shape: tuple[int, ...], hidden: Sequence[int], activation: str, scale: float = 1.0) -> None:
        super().__init__()
        size, modules = math.prod(shape), []
        for width in hidden:
            modules += [init(nn.Linear(size, width)), Tanh() if activation == "tanh" else nn.ReLU()]
            size = width
        self.layers = nn.Sequential(*modules)
        self.scale, self.size = scale, size

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        x = x.to(compute_dtype(next(self.layers.parameters())) if len(self.layers) else torch.float32)
        return self.layers(x if self.scale == 1 else x * self.scale)  # type: ignore[no-any-return]


class MLPPair(nn.Module):
    """The policy's and the value's MLP side by side: one batched product for each layer of both.

    Half as many calls as two of them, which is what a small net's time goes into. `[N, *shape]` -> `[2, N, size]`.
    """

    def __init__(self, shape: tuple[int, ...], hidden: Sequence[int], activation: str) -> None:
        super().__init__()
        sizes = (math.prod(shape), *hidden)
        for k, (a, b) in enumerate(pairwise(sizes)):
            weight = torch.empty(2, a, b)
            for tower in weight:
                nn.init.orthogonal_(tower, math.sqrt(2))
            self.register_parameter(f"weight_{k}", nn.Parameter(weight))
            self.register_parameter(f"bias_{k}", nn.Parameter(torch.zeros(2, 1, b)))
        self.activation = Tanh() if activation == "tanh" else nn.ReLU()
        self.size = hidden[-1]

    def forward(self, x: Tensor) -> Tensor:
        # An nn.ParameterList takes longer to walk than a layer to compute.
        layers = cast(list[Tensor], list(self._parameters.values()))
        x = x.flatten(1).to(compute_dtype(layers[0])).expand(2, -1, -1)
        for weight, bias in zip(layers[::2], layers[1::2], strict=True):
            x = self.activation(torch.baddbmm(bias, x, weight))
        return x
