"""A model's parameters and gradients as views of two flat tensors.

An update rule, a clip, a published copy or a gossip mix is then a handful of calls whatever the number of layers.
"""

from __future__ import annotations

import copy
from itertools import pairwise

import torch
from torch import Tensor, nn

from coterie.errors import ConfigError, CoterieError

_ALIGN = 16  # floats; every parameter starts on a 64-byte line
_TAIL = 16  # floats behind the gradient, for what an exchange sends along with it


def pieces(n: int, count: int) -> list[slice]:
    """`n` weights in `count` slices that begin on a cache line."""
    bounds = [n * k // count // _ALIGN * _ALIGN for k in range(count)] + [n]
    return [slice(a, b) for a, b in pairwise(bounds)]


class FlatParams:
    """`data` and `grad`, `[n]` float32, with the model's parameters and their gradients as views.

    `bucket` is `grad` with a short `tail` behind it, zero unless an exchange uses it: both travel in one message.
    Padding between parameters stays zero in both, so norms and updates over the whole are exact.
    """

    def __init__(self, model: nn.Module) -> None:
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        device = named[0][1].device
        self.slices: dict[str, slice] = {}
        end = 0
        for name, p in named:
            if p.dtype != torch.float32:
                raise ConfigError(f"model: parameter {name} is {p.dtype}; learned weights are float32")
            self.slices[name] = slice(end, end + p.numel())
            end += -(-p.numel() // _ALIGN) * _ALIGN
        self.data = torch.zeros(end, device=device)
        self.bucket = torch.zeros(end + _TAIL, device=device)
        self.grad, self.tail = self.bucket[:end], self.bucket[end:]
        self._ends, self._stepped = (named[0], named[-1]), False
        for name, p in named:
            at = self.slices[name]
            self.data[at].view_as(p).copy_(p.detach())
            p.data = self.data[at].view_as(p)
            p.grad = self.grad[at].view_as(p)

    def check_views(self) -> None:
        """Before a batch: raise a `CoterieError` where the views are gone; nothing would be trained from then on."""
        for name, p in self._ends:
            data, grad = (x.data_ptr() + 4 * self.slices[name].start for x in (self.data, self.grad))
            if p.grad is None or p.grad.data_ptr() != grad or p.data_ptr() != data:
                raise CoterieError("weights or gradients are other tensors (zero_grad, double, data =); set in place")

    def check_cleared(self) -> None:
        """After an exchange's first step: raise a `CoterieError` where the gradient is still there."""
        if not self._stepped and bool(self.grad.any()):
            raise CoterieError("exchange: step must set params.grad to zero (to add up several batches, keep a copy)")
        self._stepped = True

    def replica(self, model: nn.Module) -> tuple[nn.Module, Tensor]:
        """A second module on the very same weights and buffers, with a flat gradient of its own.

        Two threads can then run backward passes at once; the gradients add up.
        """
        shared: dict[int, Tensor] = {id(x): x for x in model.buffers()}
        shared |= {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in model.parameters()}
        twin, grad = copy.deepcopy(model, shared), torch.zeros_like(self.grad)
        named = dict(twin.named_parameters())
        for name, at in self.slices.items():
            named[name].grad = grad[at].view_as(named[name])
        return twin, grad

    def nonfinite(self, flat: Tensor) -> str | None:
        """The name of the first parameter whose part of `flat` (data or grad) holds a NaN or infinity."""
        for name, at in self.slices.items():
            if not bool(torch.isfinite(flat[at]).all()):
                return name
        return None
