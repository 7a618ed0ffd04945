"""Lock-free shared weights (A3C: Mnih et al. 2016; A3C with GAE): every worker writes whenever it has a gradient.

A worker acts and computes its gradient with a snapshot of the shared weights; the update rule is then applied to the
shared tensors with the local gradient. Two workers that write at once may undo a part of each other's work: that is the
algorithm. The rule's statistics are also shared, or kept per worker.
"""

from __future__ import annotations

import torch
from torch import Tensor

from coterie.config import Refusal
from coterie.exchange.base import ExchangeKind, Setup
from coterie.exchange.shared_weights import OTHERS, CoreTurns, SharedWeights, Staleness, restore, shared_memory_for
from coterie.exchange.solo import Solo
from coterie.parallel.params import FlatParams
from coterie.parallel.shm import SharedArrays


class Hogwild(Solo):
    """The exchange of one worker on the weights of all."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        peers = setup.peers
        self.shared = SharedWeights(peers.memory or memory(setup), setup.moments, 1, setup.timeout)
        self.shared_statistics = setup.config.hogwild.statistics == "shared"
        if self.shared_statistics:
            self.state = self.shared.states[0]
        self.staleness = Staleness(self.board, self.rank)
        self.turns: CoreTurns | None = None
        if peers.core >= 0:  # bytes 0 and 1 of the memory are the locks of the weights and of the normalizers
            self.turns = CoreTurns(self.shared.locks, 2 + peers.core, peers.board, peers.rank)

    def __exit__(self, *error: object) -> None:
        self.shared.close()

    def pull(self, params: FlatParams) -> None:
        """A snapshot of the shared weights, in which others may be writing."""
        if self.turns is not None and self.shared.fd >= 0:  # not after `close`
            self.turns.begin()
        params.data.copy_(self.shared.data)
        self.staleness.snapshot()

    @torch.no_grad()
    def step(self, params: FlatParams, lr: float) -> float:
        """Update the shared weights without a lock from the local gradient."""
        norm, fine = self.guard.clip(params)
        self.staleness.update()
        if fine:
            self.rule.update(self.shared.data, params.grad, self.state, lr)
            params.grad.zero_()
        self.pull(params)
        return norm

    def after_rollout(self, params: FlatParams) -> None:
        self.shared.share_moments()
        if self.turns is not None:
            self.turns.end()

    def gauges(self) -> dict[str, float]:
        return self.staleness.gauges()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.shared.rebase()
        if not self.shared_statistics:  # those were restored before any worker started
            super().load_state_dict(state)


def memory(setup: Setup) -> SharedArrays:
    return shared_memory_for(setup.params.data.cpu(), setup.rule, 1, setup.moments.read())


KIND = ExchangeKind(
    Hogwild,
    memory,
    restore,
    shared_weights=True,
    on_gpu=False,
    refusals=(
        OTHERS,
        Refusal(
            lambda c, s: c.device == "cuda",
            "device",
            "must be cpu or auto: hogwild writes into shared memory of the host",
        ),
    ),
    simulation="coterie.tools.plan.learners:SimHogwild",
)
