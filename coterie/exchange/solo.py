"""One learner that agrees with nobody: clip, check, update. And what every exchange has in common."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol

import torch
from torch import Tensor

from coterie.ops.optim import flat_norm_clip
from coterie.parallel.board import OwnSteps
from coterie.parallel.params import FlatParams
from coterie.types import CoterieError


class Rule(Protocol):
    """An update rule on flat tensors (`ops/optim.py`)."""

    def state(self, param: Tensor) -> dict[str, Tensor]: ...
    def update(self, param: Tensor, grad: Tensor, state: dict[str, Tensor], lr: float) -> None: ...


class Steps(Protocol):
    """The env steps of the whole run, as far as a learner knows."""

    @property
    def total(self) -> int: ...
    def add(self, rows: int) -> None: ...
    def start(self, own: int, total: int) -> None: ...


class NonFinite(CoterieError):
    """A gradient or weight that is NaN or infinite; the message names the tensor."""


class Guard:
    """Clips a gradient, and lets none pass that is not finite: it raises, or is dropped and counted in `skipped`."""

    def __init__(self, max_grad_norm: float, skip: bool) -> None:
        self.max_grad_norm, self.skip, self.skipped = max_grad_norm, skip, 0

    def clip(self, params: FlatParams) -> tuple[float, bool]:
        """The norm before clipping, and whether the gradient may be used; one that may not is cleared."""
        norm = float(flat_norm_clip(params.grad, self.max_grad_norm))
        if norm - norm == 0:  # neither NaN nor infinity
            return norm, True
        self.refuse(params.nonfinite(params.grad), params)
        return norm, False

    def refuse(self, name: str | None, params: FlatParams) -> None:
        """Clear a gradient that is not finite."""
        params.grad.zero_()
        if not self.skip:
            raise NonFinite(f"the gradient of {name or 'the whole net (its norm overflows)'} is not finite")
        self.skipped += 1


class Solo:
    """The exchange of a lone learner, and what a learner of several does alone."""

    def __init__(self, params: FlatParams, rule: Rule, guard: Guard) -> None:
        self.rule, self.guard, self.steps = rule, guard, OwnSteps()
        self.state = rule.state(params.data)

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
        """Apply the accumulated gradient and clear it; returns its norm before clipping."""
        norm, fine = self.guard.clip(params)
        if fine:
            self.rule.update(params.data, params.grad, self.state, lr)
            params.grad.zero_()
        return norm

    def after_rollout(self, params: FlatParams) -> None:
        """The running normalizers are this learner's own."""

    def agree(self, order: bool, stop: bool) -> tuple[bool, bool]:
        """Whether all learners are to carry out the order, and to stop, now."""
        return order, stop

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, tensor in state.items():
            self.state[name].copy_(tensor)
