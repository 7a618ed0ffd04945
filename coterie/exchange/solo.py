"""One learner: clip, check, update."""

from __future__ import annotations

import torch
from torch import Tensor

from coterie.config import Refusal
from coterie.exchange.base import Exchange, ExchangeKind, Setup
from coterie.parallel.params import FlatParams


class Solo(Exchange):
    """Local updates only. Subclasses add how learners synchronize."""

    def __init__(self, setup: Setup) -> None:
        self.rule, self.guard = setup.rule, setup.guard
        self.board, self.rank = setup.peers.board, setup.peers.rank
        self.state = self.rule.state(setup.params.data)

    @torch.no_grad()
    def step(self, params: FlatParams, lr: float) -> float:
        """Apply the accumulated gradient and clear it; returns its norm before clipping."""
        norm, fine = self.guard.clip(params)
        if fine:
            self.rule.update(params.data, params.grad, self.state, lr)
            params.grad.zero_()
        return norm

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, tensor in state.items():
            self.state[name].copy_(tensor)


KIND = ExchangeKind(
    Solo,
    one_learner=True,
    refusals=(
        Refusal(
            lambda c, s: c.learners != 1,
            "learners",
            "must be 1 with exchange solo; for several use allreduce, hogwild, store or gossip",
        ),
    ),
    replay="coterie.exchange.solo:Solo",
    simulation="coterie.tools.plan.learners:SimExchange",
)
