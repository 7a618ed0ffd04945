"""What the tests of gossip share: learners that gossip in one process, in lockstep or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from coterie.exchange.base import Circle, Guard
from coterie.exchange.gossip import Gossip, gossip_memory
from coterie.exchange.topology import matrices
from coterie.models.heads import Moments, Normalizer
from coterie.parallel.board import Board, BoardSteps
from coterie.parallel.shm import SharedArrays
from coterie.types import Array
from tests.exchange.harness import Sgd, flat, together

SIZE = len(flat(4).data)  # weights that `machine` gives a learner, with padding


@dataclass
class Crowd:
    """Learners that gossip in one process, all over the same memory."""

    learners: list[Gossip]
    shared: SharedArrays
    board: Board
    size: int  # weights of each, without padding

    @property
    def here(self) -> Array:
        return self.shared.arrays["here"]

    def weights(self) -> Array:
        """`[n, size]`, float64."""
        return np.stack([x.params.data[: self.size].double().numpy() for x in self.learners])

    def round(self) -> None:
        """Everybody tells, then everybody hears: one mix in lockstep."""
        for x in self.learners:
            assert x._tell(x.params)
        for x in self.learners:
            assert x._hear(x.params)


def one(
    shared: SharedArrays, board: Board, sequence: Sequence[Array], rank: int, start: Array, *, tau: int = 0,
    mix_every: int = 1, timeout: float = 30.0, rule: object = None, skip: bool = False, rejoin: bool = False,
    norms: Sequence[Normalizer] = (), first: int = 0,
) -> Gossip:  # fmt: skip
    params = flat(len(start))
    params.data[: len(start)] = torch.as_tensor(start, dtype=torch.float32)
    return Gossip(
        params, rule or Sgd(), Guard(0.0, skip), Moments(norms), shared, board, BoardSteps(board, rank), rank,
        Circle(first, list(sequence)), tau=tau, mix_every=mix_every, timeout=timeout, rejoin=rejoin,
    )  # fmt: skip


def crowd(start: Array, sequence: Sequence[Array], norms: Sequence[Sequence[Normalizer]] = (), **how) -> Crowd:
    n, size = start.shape
    board = Board(n)
    shared = gossip_memory(n, len(flat(size).data), Moments(norms[0]).size if norms else 0)
    shared.arrays["here"][:] = 1
    learners = [
        one(shared, board, sequence, rank, start[rank], norms=norms[rank] if norms else (), **how) for rank in range(n)
    ]
    return Crowd(learners, shared, board, size)


def machine(seats: int, own: list[int], start: Array, topology: str = "complete", **how) -> tuple[SharedArrays, list]:
    """Memory and learners of one machine of several, which nobody waits for."""
    memory, board = gossip_memory(seats, SIZE, 0), Board(len(own))
    memory.arrays["here"][own] = 1
    settings = {"tau": -1, "timeout": 0.0, **how}
    return memory, [
        one(memory, board, matrices(topology, seats), rank, start[seat], first=own[0], **settings)
        for rank, seat in enumerate(own)
    ]


def weights(learners: Sequence[Gossip]) -> Array:
    """`[n, 4]`, float64."""
    return np.stack([x.params.data[:4].double().numpy() for x in learners])


def step(x: Gossip, grad: Tensor | None = None, lr: float = 1.0) -> None:
    if grad is not None:
        x.params.grad.copy_(grad)
    x.step(x.params, lr)


def distance(x: Array) -> float:
    """How far the learners are from their mean."""
    return float(np.linalg.norm(x - x.mean(0)))


def lockstep(learners: Sequence[Gossip], count: int) -> None:
    def run(x: Gossip) -> None:
        for _ in range(count):
            step(x)

    together([partial(run, x) for x in learners])
