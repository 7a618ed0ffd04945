"""One learner that agrees with nobody: clip, check, update."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol

import torch
from torch import Tensor

from coterie.ops.optim import flat_norm_clip
from coterie.parallel.params import FlatParams
from coterie.types import CoterieError


class Rule(Protocol):
    """An update rule on flat tensors (`ops/optim.py`)."""

    def state(self, param: Tensor) -> dict[str, Tensor]: ...
    def update(self, param: Tensor, grad: Tensor, state: dict[str, Tensor], lr: float) -> None: ...


class NonFinite(CoterieError):
    """A gradient that is NaN or infinite; the message names the tensor."""


class Solo:
    """The exchange of a lone learner. `skipped` counts batches whose gradient was not finite."""

    def __init__(self, params: FlatParams, rule: Rule, max_grad_norm: float, skip_nonfinite: bool) -> None:
        self.rule, self.max_grad_norm, self.skip_nonfinite = rule, max_grad_norm, skip_nonfinite
        self.state = rule.state(params.data)
        self.skipped = 0

    def __enter__(self) -> Solo:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def pull(self, params: FlatParams) -> None:
        """The local parameters are the only ones."""

    @torch.no_grad()
    def step(self, params: FlatParams, lr: float) -> float:
        """Apply the accumulated gradient and clear it; returns its norm before clipping.

        A gradient that is not finite changes nothing: it raises `NonFinite`, or is skipped and counted.
        """
        norm = float(flat_norm_clip(params.grad, self.max_grad_norm))
        if norm - norm != 0:  # NaN or infinity
            name = params.nonfinite(params.grad)
            params.grad.zero_()
            if not self.skip_nonfinite:
                raise NonFinite(f"the gradient of {name or 'the whole net (its norm overflows)'} is not finite")
            self.skipped += 1
            return norm
        self.rule.update(params.data, params.grad, self.state, lr)
        params.grad.zero_()
        return norm

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, tensor in state.items():
            self.state[name].copy_(tensor)
