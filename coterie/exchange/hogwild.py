"""Lock-free shared weights (A3C: Mnih et al. 2016; A3C with GAE): every worker writes whenever it has a gradient.

A rollout is acted and its gradient taken on a snapshot of the shared weights; the update rule is then applied to the
shared tensors themselves, from that local gradient, handed over explicitly. Two workers that write at once may undo a
part of each other's work: that is the algorithm. The statistics of the rule are shared too, or each worker's own.
"""

from __future__ import annotations

from types import TracebackType

import torch
from torch import Tensor

from coterie.exchange.shared_weights import Central, Shift
from coterie.exchange.solo import Guard, Rule
from coterie.parallel.board import BoardSteps, OwnSteps, Staleness
from coterie.parallel.params import FlatParams


class Hogwild:
    """The exchange of one worker on the weights of all."""

    def __init__(
        self, params: FlatParams, rule: Rule, guard: Guard, central: Central,
        steps: OwnSteps | BoardSteps, own_statistics: bool, shift: Shift | None = None,
    ) -> None:  # fmt: skip
        self.rule, self.guard, self.central, self.steps = rule, guard, central, steps
        self.state = rule.state(params.data) if own_statistics else central.state
        self.shared, self.staleness, self.shift = not own_statistics, Staleness(steps), shift

    def __enter__(self) -> Hogwild:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.central.close()

    def pull(self, params: FlatParams) -> None:
        """A snapshot of the shared weights, in which others may be writing."""
        if self.shift is not None:
            self.shift.begin()
        params.data.copy_(self.central.data)
        self.staleness.snapshot()

    @torch.no_grad()
    def step(self, params: FlatParams, lr: float) -> float:
        """Update the shared weights without a lock from the local gradient."""
        norm, fine = self.guard.clip(params)
        self.staleness.update()
        if fine:
            self.rule.update(self.central.data, params.grad, self.state, lr)
            params.grad.zero_()
        self.pull(params)
        return norm

    def after_rollout(self, params: FlatParams) -> None:
        self.central.share_moments()
        if self.shift is not None:
            self.shift.end()

    def agree(self, order: bool, stop: bool) -> tuple[bool, bool]:
        return order, stop

    def gauges(self) -> dict[str, float]:
        return self.staleness.gauges()

    def state_dict(self) -> dict[str, Tensor]:
        return {name: x.clone() for name, x in self.state.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.central.rebase()
        if not self.shared:  # what is shared was filled in before any worker began
            for name, tensor in state.items():
                self.state[name].copy_(tensor)
