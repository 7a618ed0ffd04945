"""Weights, rule state and normalizer sums that all learners of a machine share: `hogwild` and `store` use it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from coterie.config import Refusal
from coterie.models.heads import Moments
from coterie.ops.optim import Rule
from coterie.parallel.board import Board
from coterie.parallel.locks import Locks
from coterie.parallel.params import pieces
from coterie.parallel.shm import Layout, SharedArrays


def shared_memory_for(data: Tensor, rule: Rule, chunks: int, moments: Tensor) -> SharedArrays:
    """Shared memory that holds `data` and the fresh state of `rule` for it, whole (`chunks` 1) or chunk by chunk."""
    state = rule.state(data)
    layout: Layout = {
        "data": (tuple(data.shape), "float32"),
        "moments": ((max(1, len(moments)),), "float64"),
        **{f"state/{k}": (tuple(x.shape) or (chunks,), str(x.dtype).removeprefix("torch.")) for k, x in state.items()},
    }
    shared = SharedArrays(layout, name="coterie-central")
    shared.arrays["data"][:] = data.cpu().numpy()
    shared.arrays["moments"][: len(moments)] = moments.cpu().numpy()
    for k, x in state.items():
        shared.arrays[f"state/{k}"][...] = x.cpu().numpy()
    return shared


class CoreTurns:
    """Learners that share a core take turns, a rollout each, from the snapshot to the update.

    Without it the scheduler mixes them step by step: each finds its weights evicted from the cache, and its snapshot is
    as many updates old as there are learners. The watchdog over the board finds one that hangs.
    """

    def __init__(self, locks: Locks, k: int, board: Board, rank: int) -> None:
        self.locks, self.k, self.board, self.rank, self.held = locks, k, board, rank, False

    def begin(self) -> None:
        if not self.held:
            with self.board.blocked(self.rank):
                self.locks.queue(self.k)
            self.held = True

    def end(self) -> None:
        if self.held:
            self.locks.free(self.k)
            self.held = False
            time.sleep(1e-4)  # for a waiting learner: the scheduler picks the one that has run least


class SharedWeights:
    """One process's view of the shared memory. `chunks` slices `data`; `states[k]` is the rule's state of chunk k."""

    def __init__(self, shared: SharedArrays, moments: Moments, chunks: int, timeout: float) -> None:
        arrays = {k: torch.from_numpy(x) for k, x in shared.arrays.items()}
        self.data = arrays["data"]
        self.fd = os.dup(shared.fd)  # the kernel drops a process's locks when it closes any descriptor of the file
        self.locks = Locks(self.fd, timeout)
        self.slices = pieces(len(self.data), chunks)
        state = {k.removeprefix("state/"): x for k, x in arrays.items() if k.startswith("state/")}
        n = len(self.data)
        self.states = [
            {name: x[at] if len(x) == n else x[k] for name, x in state.items()} for k, at in enumerate(self.slices)
        ]
        self.moments, self._sums = moments, arrays["moments"][: moments.size]
        self._base = moments.read()

    def locked_chunks(self) -> Iterator[int]:
        """Every chunk once, while its lock is held, in whatever order they are free. Without locks after `close`, when
        the last checkpoint is written.
        """
        todo = list(range(len(self.slices)))
        if self.fd < 0:
            yield from todo
            return
        while todo:
            k = next((k for k in todo if self.locks.take(k, wait=False)), None)
            if k is None:
                k = todo[0]
                self.locks.take(k)
            todo.remove(k)
            try:
                yield k
            finally:
                self.locks.free(k)

    def share_moments(self) -> None:
        """Add this learner's new rows to the shared normalizers, and take the sums of all. After `close` only these."""
        if not self.moments.size:
            return
        if self.fd < 0:
            self.moments.write(self._sums)
            return
        new = self.moments.read() - self._base
        with self.locks.held(len(self.slices)):
            self._sums += new
            self._base = self._sums.clone()
        self.moments.write(self._base)

    def rebase(self) -> None:
        """Count from the present normalizers: they were set from a checkpoint, as the shared sums were."""
        self._base = self.moments.read()

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Staleness:
    """Env steps that other learners began between a snapshot of the weights and the update made with it."""

    def __init__(self, board: Board, rank: int) -> None:
        self.board, self.rank = board, rank
        self.sum = self.updates = self.most = 0
        self.snapshot()

    def _others(self) -> int:
        return self.board.sum("started") - self.board.read(self.rank)["started"]

    def snapshot(self) -> None:
        self.mark = self._others()

    def update(self) -> None:
        behind = self._others() - self.mark
        self.sum, self.updates, self.most = self.sum + behind, self.updates + 1, max(self.most, behind)

    def gauges(self) -> dict[str, float]:
        return {"staleness/mean": self.sum / max(1, self.updates), "staleness/max": self.most}


OTHERS = Refusal(
    lambda c, s: c.max_lag > 0,
    "max_lag",
    "must be 0 with hogwild and store: it cannot bound the steps of other learners on the shared weights",
)


def restore(shared: SharedArrays, state: dict[str, Tensor], moments: Tensor) -> None:
    """Put a checkpoint's rule state and normalizers into the shared memory, before any learner starts."""
    shared.arrays["moments"][: len(moments)] = moments.cpu().numpy()
    for name, x in state.items():
        target = shared.arrays.get(f"state/{name}")
        if target is not None:
            # A count for each chunk; the number of chunks may have changed.
            values = x.cpu().numpy().reshape(-1)
            target[...] = values.reshape(target.shape) if values.size == target.size else values.max()
