"""What the tests of the central store share: a store over given memory, and one step with a given gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from coterie.exchange.base import Guard
from coterie.exchange.shared_weights import Central
from coterie.exchange.store import Store, Turns
from coterie.models.heads import Moments, Normalizer
from coterie.parallel.board import Board, BoardSteps
from coterie.parallel.params import FlatParams
from coterie.parallel.shm import SharedArrays

BETAS = (0.8, 0.95)
NOTHING = torch.zeros(0, dtype=torch.float64)


def store(
    shared: SharedArrays, params: FlatParams, rule: object, chunks: int, *, local_steps: int = 1, rank: int = 0,
    board: Board | None = None, turns: bool = False, clip: float = 0.0, skip: bool = False, timeout: float = 20.0,
    norms: tuple[Normalizer, ...] = (),
) -> Store:  # fmt: skip
    board = board or Board(4)
    central = Central(shared, Moments(norms), chunks, timeout)
    return Store(
        params, rule, Guard(clip, skip), central, BoardSteps(board, rank), local_steps, BETAS,
        Turns(board, rank, timeout) if turns else None,
    )  # fmt: skip


def apply(exchange: Store, params: FlatParams, grad: Tensor, lr: float = 1e-2) -> float:
    params.grad.copy_(grad)
    norm = exchange.step(params, lr)
    assert not params.grad.any()
    return norm
