"""What the tests of the central store share: a store over given memory, and one step with a given gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from coterie.exchange.base import Peers
from coterie.exchange.store import Store
from coterie.parallel.board import Board
from coterie.parallel.params import FlatParams
from coterie.parallel.shm import SharedArrays
from tests.exchange.harness import make_setup

BETAS = (0.8, 0.95)
NOTHING = torch.zeros(0, dtype=torch.float64)


def store(
    shared: SharedArrays, params: FlatParams, rule: object, chunks: int, *, local_steps: int = 1, rank: int = 0,
    board: Board | None = None, **how,
) -> Store:  # fmt: skip
    peers = Peers(rank, board or Board(4), shared)
    changes = {"store__chunks": chunks, "store__local_steps": local_steps, "optim__beta1": BETAS[0]}
    return Store(make_setup(params, rule, peers=peers, optim__beta2=BETAS[1], **changes, **how))


def apply(exchange: Store, params: FlatParams, grad: Tensor, lr: float = 1e-2) -> float:
    params.grad.copy_(grad)
    norm = exchange.step(params, lr)
    assert not params.grad.any()
    return norm
