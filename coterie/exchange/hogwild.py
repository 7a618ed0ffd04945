"""Lock-free shared weights (A3C: Mnih et al. 2016; A3C with GAE): every worker writes whenever it has a gradient.

A rollout is acted and its gradient taken on a snapshot of the shared weights; the update rule is then applied to the
shared tensors themselves, from that local gradient, handed over explicitly. Two workers that write at once may undo a
part of each other's work: that is the algorithm. The statistics of the rule are shared too, or each worker's own.
"""

from __future__ import annotations

from types import TracebackType

import torch
from torch import Tensor

from coterie.config import Refusal
from coterie.exchange.base import Exchange, ExchangeKind, Guard, Rule, Setup
from coterie.exchange.shared_weights import Central, Shift, central_memory, fill
from coterie.exchange.solo import Solo
from coterie.parallel.board import BoardSteps, OwnSteps, Staleness
from coterie.parallel.params import FlatParams
from coterie.parallel.shm import SharedArrays


class Hogwild(Solo):
    """The exchange of one worker on the weights of all."""

    def __init__(
        self, params: FlatParams, rule: Rule, guard: Guard, central: Central,
        steps: OwnSteps | BoardSteps, own_statistics: bool, shift: Shift | None = None,
    ) -> None:  # fmt: skip
        super().__init__(params, rule, guard, steps)
        self.central, self.shared = central, not own_statistics
        if self.shared:
            self.state = central.state
        self.staleness, self.shift = Staleness(steps), shift

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

    def gauges(self) -> dict[str, float]:
        return self.staleness.gauges()

    def state_dict(self) -> dict[str, Tensor]:
        return {name: x.clone() for name, x in self.state.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.central.rebase()
        if not self.shared:  # what is shared was filled in before any worker began
            super().load_state_dict(state)


def memory(setup: Setup) -> SharedArrays:
    return central_memory(setup.params.data.cpu(), setup.rule(), 1, setup.moments.read())


def connect(setup: Setup) -> Exchange:
    config, peers = setup.config, setup.peers
    central = Central(peers.memory or memory(setup), setup.moments, 1, setup.timeout)
    # Bytes 0 and 1 of the memory are the locks of the weights and of the normalizers.
    shift = Shift(central.locks, 2 + peers.core, peers.board, peers.rank) if peers.core >= 0 else None
    steps = BoardSteps(peers.board, peers.rank)
    make = setup.substitute(Hogwild)
    return make(setup.params, setup.rule(), setup.guard(), central, steps, config.hogwild.statistics == "own", shift)


KIND = ExchangeKind(
    connect,
    memory,
    fill,
    shared_weights=True,
    on_gpu=False,
    refusals=(
        Refusal(
            lambda c, s: c.device == "cuda",
            "device",
            "must be cpu or auto: hogwild writes into shared memory of the host",
        ),
    ),
)
