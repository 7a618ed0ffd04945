"""What the tests of gossip share: learners that gossip in one process, in lockstep or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from coterie.exchange.base import Peers
from coterie.exchange.gossip import Gossip, gossip_memory
from coterie.exchange.topology import matrices
from coterie.instruments.consensus import Changes, change_memory
from coterie.models.heads import Moments, Normalizer
from coterie.parallel.board import Board
from coterie.parallel.shm import SharedArrays
from coterie.types import Array
from tests.exchange.harness import flat, make_setup, together

SIZE = len(flat(4).data)  # weights of 4, with padding


@dataclass
class Crowd:
    """Learners that gossip in one process, all over the same memory."""

    learners: list[Gossip]
    shared: SharedArrays
    board: Board
    size: int  # weights of each, without padding

    @property
    def present(self) -> Array:
        return self.shared.arrays["present"]

    def weights(self) -> Array:
        """`[n, size]`, float64."""
        return weights(self.learners, self.size)

    def round(self) -> None:
        """All publish, then all receive: one mix in lockstep."""
        for x in self.learners:
            assert x.publish(x.params)
        for x in self.learners:
            assert x.receive()


def one(
    shared: SharedArrays, board: Board, sequence: Sequence[Array], rank: int, start: Array, *, tau: int = 0,
    mix_every: int = 1, rejoin: bool = False, **how,
) -> Gossip:  # fmt: skip
    params = flat(len(start))
    params.data[: len(start)] = torch.as_tensor(start, dtype=torch.float32)
    peers = Peers(rank, board, shared, mixing=list(sequence), rejoin=rejoin)
    return Gossip(make_setup(params, peers=peers, gossip__tau=tau, gossip__mix_every=mix_every, **how))


def crowd(start: Array, sequence: Sequence[Array], norms: Sequence[Sequence[Normalizer]] = (), **how) -> Crowd:
    n, size = start.shape
    board = Board(n)
    shared = gossip_memory(n, len(flat(size).data), Moments(norms[0]).size if norms else 0)
    learners = [
        one(shared, board, sequence, rank, start[rank], norms=norms[rank] if norms else (), **how) for rank in range(n)
    ]
    return Crowd(learners, shared, board, size)


def changes_of(c: Crowd) -> tuple[SharedArrays, list[Changes]]:
    """The observers of its learners, and their memory."""
    shared = change_memory(len(c.learners))
    return shared, [Changes(x.params, c.shared, shared, x.rank) for x in c.learners]


def linked(learners: int, start: Array, **how) -> tuple[SharedArrays, list[Gossip]]:
    """Memory and learners of a run that gossips with others."""
    memory, board = gossip_memory(learners, SIZE, 0, linked=True), Board(learners)
    settings = {"tau": -1, "timeout": 0.0, **how}
    sequence = matrices("ring", learners)
    return memory, [one(memory, board, sequence, rank, start[rank], **settings) for rank in range(learners)]


def weights(learners: Sequence[Gossip], size: int = 4) -> Array:
    """`[n, size]`, float64."""
    return np.stack([x.params.data[:size].double().numpy() for x in learners])


def step(x: Gossip, grad: Tensor | None = None, lr: float = 1.0) -> None:
    if grad is not None:
        x.params.grad.copy_(grad)
    x.step(x.params, lr)


def distance(x: Array) -> float:
    """How far the learners are from their mean."""
    return float(np.linalg.norm(x - x.mean(0)))


def lockstep(learners: Sequence[Gossip], count: int = 1) -> None:
    """Steps of all at once, without gradients."""

    def run(x: Gossip) -> None:
        for _ in range(count):
            step(x)

    together([partial(run, x) for x in learners])
