"""What GALA measured during a run: distance to consensus beside its bound, and how alike the gradients are.

Learners leave what is needed in shared memory; the parent reads it when it writes a line of metrics. A learner never
waits for that, so now and then there is nothing consistent to read, and the line goes without.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np
import torch

from coterie.algorithms.base import AnyAlgorithm, AnyBatch
from coterie.config import Config
from coterie.exchange.gossip import RECENT
from coterie.exchange.mailboxes import Mailboxes
from coterie.exchange.topology import contraction
from coterie.learner import Observer
from coterie.parallel.params import FlatParams
from coterie.parallel.seqlock import Seqlock
from coterie.parallel.shm import SharedArrays
from coterie.types import Array


class Consensus:
    """Distance of the learners' weights to their mean, |X - Xbar| in the Frobenius norm, as of one and the same mix.

    With `gossip.tau` 0, also the bound of Proposition 1: b <- beta (b + |U|), with U what the updates since the last
    mix changed. There is no bound for a run that gossips with others: its distance includes their learners.
    """

    def __init__(self, shared: SharedArrays, sequence: Sequence[Array], config: Config) -> None:
        self.arrays, self.sequence, self.tau = shared.arrays, list(sequence), config.gossip.tau
        self.mailboxes, self.lock = Mailboxes(shared, len(self.sequence[0])), Seqlock(shared.arrays["writes"])
        self.betas = [contraction([p]) for p in self.sequence]
        self.bound, self.mixes = 0.0, 0
        self.lost = False  # the ring of update lengths went around faster than it was read

    def read(self) -> dict[str, float]:
        a = self.arrays
        if self.mailboxes.remote:
            return self._of_all_runs()
        self._advance(int(a["mixed"].min()))
        snapshot = self._snapshot()
        if snapshot is None:
            return {}
        number, before = snapshot
        mixed = self.sequence[number % len(self.sequence)] @ before if self.tau == 0 else before
        found = {"consensus/distance": float(np.linalg.norm(mixed - mixed.mean(0)))}
        self._advance(number + 1)
        if self.tau == 0 and not self.lost and self.mixes == number + 1:
            found["consensus/bound"] = self.bound
        return found

    def _of_all_runs(self) -> dict[str, float]:
        boxes = self.mailboxes
        found = [boxes.read(int(row)) for row in np.flatnonzero(boxes.present)]  # of different mixes: still a distance
        weights = np.array([message.weights for message in found if message is not None], np.float64)
        return {"consensus/distance": float(np.linalg.norm(weights - weights.mean(0)))} if len(weights) > 1 else {}

    def _advance(self, until: int) -> None:
        """Take in the lengths of the updates before mixes that all learners have published a message for."""
        moved = self.arrays["moved"]
        if until - self.mixes > RECENT:
            self.lost, self.mixes = True, until - RECENT // 2
        while self.mixes < until:
            length = math.sqrt(float(moved[:, self.mixes % RECENT].sum()))
            self.bound = self.betas[self.mixes % len(self.betas)] * (self.bound + length)
            self.mixes += 1

    def _snapshot(self) -> tuple[int, Array] | None:
        """The messages of all learners, in lockstep of the same number; None if they change meanwhile."""
        a, end = self.arrays, time.monotonic() + 0.05
        while time.monotonic() < end:
            published = a["published"].copy()
            if (published > a["joined"]).all() and (self.tau != 0 or (published == published[0]).all()):
                found = self.lock.read(slice(None), lambda: (a["published"].copy(), a["message"].astype(np.float64)))
                if found is not None and (found[0] == published).all():
                    return int(published[0]) - 1, found[1]
            time.sleep(2e-4)
        return None


def cosine_memory(learners: int, weights: int) -> SharedArrays:
    layout = {"grad": ((learners, weights), "float32"), "writes": ((learners,), "int64")}
    return SharedArrays(layout, name="coterie-cosines")


class GradientSamples(Observer):
    """Leaves this learner's gradient in shared memory every `every` of its env steps, as it is before the exchange."""

    def __init__(self, params: FlatParams, shared: SharedArrays, rank: int, every: int) -> None:
        self.params, self.rank, self.every, self.taken = params, rank, every, -1
        self.grad = torch.from_numpy(shared.arrays["grad"])[rank]
        self.lock = Seqlock(shared.arrays["writes"])

    def gradient(self, env_steps: int, algorithm: AnyAlgorithm, batch: AnyBatch) -> None:
        number = env_steps // self.every
        if number > self.taken:
            self.taken = number
            with self.lock.writing(self.rank):
                self.grad.copy_(self.params.grad)


class Cosines:
    """Pairwise cosine similarities of the learners' latest sampled gradients; peers and others apart."""

    def __init__(self, shared: SharedArrays, peers: Array) -> None:
        self.grads, self.lock = torch.from_numpy(shared.arrays["grad"]), Seqlock(shared.arrays["writes"])
        self.peers = (peers + peers.T) > 0
        self.seen = 0

    def read(self) -> dict[str, float]:
        latest = self.lock.read(slice(None), lambda: (int(self.lock.writes.sum()), self.grads.double()))
        if latest is None or latest[0] == self.seen:
            return {}
        self.seen, grads = latest
        unit = grads / grads.norm(dim=1, keepdim=True).clamp(min=1e-30)
        cosines = (unit @ unit.T).numpy()
        pairs = np.triu(np.ones_like(self.peers), 1)  # each pair once
        found = {f"cosine/{i}-{j}": float(cosines[i, j]) for i, j in np.argwhere(pairs)}
        for name, which in (("peers", pairs & self.peers), ("others", pairs & ~self.peers)):
            if which.any():
                found[f"cosine/{name}"] = float(cosines[which].mean())
        return found
