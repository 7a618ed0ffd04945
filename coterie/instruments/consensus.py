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
from coterie.exchange.mailboxes import Mailboxes
from coterie.exchange.topology import contraction
from coterie.learner import Observer
from coterie.parallel.params import FlatParams
from coterie.parallel.seqlock import Seqlock
from coterie.parallel.shm import SharedArrays, fence
from coterie.types import Array, Rollout

RECENT = 4096  # mixes for which the lengths of the updates before them are kept


def change_memory(learners: int) -> SharedArrays:
    layout = {
        "squares": ((learners, RECENT), "float64"),  # squared length of the updates before each mix
        "mixes": ((learners,), "int64"),  # for which these are known
    }
    return SharedArrays(layout, name="coterie-changes")


class Changes(Observer):
    """Measures how far the updates between two mixes move this learner's weights. In lockstep, which the bound needs,
    its last message in the memory of `gossip` is its weights before the last mix.
    """

    def __init__(self, params: FlatParams, gossip: SharedArrays, shared: SharedArrays, rank: int) -> None:
        self.params, self.rank, self.mixed = params, rank, gossip.arrays["mixed"]
        self.message = torch.from_numpy(gossip.arrays["message"])[rank]
        self.squares, self.mixes = shared.arrays["squares"][rank], shared.arrays["mixes"]
        self.start = params.data.clone()  # after the last mix; at first the run's: a resumed learner has moved

    def step(self) -> None:
        number = int(self.mixed[self.rank])
        if number > self.mixes[self.rank]:
            change = self.message.to(self.start.device) - self.start
            self.squares[(number - 1) % RECENT] = float(change.dot(change))
            self.start.copy_(self.params.data)
            fence()
            self.mixes[self.rank] = number

    def rollout(self, rollout: Rollout, lr: float) -> None:
        self.step()


class Consensus:
    """Distance of the learners' weights to their mean, |X - Xbar| in the Frobenius norm, as of their newest messages.

    With `gossip.tau` 0 of one and the same mix, with the bound of Proposition 1: b <- beta (b + |U|), with U the
    `Changes` before the mix. None is known for a run that gossips with others, whose distance includes their learners,
    and after a learner's restart.
    """

    def __init__(self, gossip: SharedArrays, changes: SharedArrays, sequence: Sequence[Array], config: Config) -> None:
        self.arrays, self.changes = gossip.arrays, changes.arrays
        self.sequence, self.tau = list(sequence), config.gossip.tau
        self.mailboxes, self.lock = Mailboxes(gossip, len(self.sequence[0])), Seqlock(gossip.arrays["writes"])
        self.betas = [contraction([p]) for p in self.sequence]
        self.bound, self.mixes = 0.0, 0
        self.lost = False  # the ring of squares went around faster than it was read

    def read(self) -> dict[str, float]:
        if self.mailboxes.remote:
            return self._of_all_runs()
        self._advance(int(self.changes["mixes"].min()))
        snapshot = self._snapshot()
        if snapshot is None:
            return {}
        number, before = snapshot
        mixed = self.sequence[number % len(self.sequence)] @ before if self.tau == 0 else before
        found = {"consensus/distance": float(np.linalg.norm(mixed - mixed.mean(0)))}
        if self.tau == 0 and not self.arrays["joined"].any():
            self._advance(number + 1)
            found |= {} if self.lost else {"consensus/bound": self.bound}
        return found

    def _of_all_runs(self) -> dict[str, float]:
        boxes = self.mailboxes
        found = [boxes.read(int(row)) for row in np.flatnonzero(boxes.present)]  # of different mixes: still a distance
        weights = np.array([message.weights for message in found if message is not None], np.float64)
        return {"consensus/distance": float(np.linalg.norm(weights - weights.mean(0)))} if len(weights) > 1 else {}

    def _advance(self, until: int) -> None:
        """Take in the changes before the first `until` mixes, which all learners have measured."""
        fence()
        if until - self.mixes > RECENT:
            self.lost, self.mixes = True, until - RECENT // 2
        while self.mixes < until:
            length = math.sqrt(float(self.changes["squares"][:, self.mixes % RECENT].sum()))
            self.bound = self.betas[self.mixes % len(self.betas)] * (self.bound + length)
            self.mixes += 1

    def _snapshot(self) -> tuple[int, Array] | None:
        """The messages of all learners, in lockstep those of one mix that all have made; None if they change."""
        a, end = self.arrays, time.monotonic() + 0.05
        while time.monotonic() < end:
            published = a["published"].copy()
            one_mix = len({*published.tolist(), *self.changes["mixes"].tolist()}) == 1
            if (published > a["joined"]).all() and (one_mix or self.tau != 0):
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
