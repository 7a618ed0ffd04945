"""Sums over the learners of a machine, in their shared memory.

    each learner gives its tensor;  once all have given, each adds up one part;  once all parts are there, all read them

Not torch.distributed: each of its processes listens at a TCP port that takes any connection (1,100 silent ones ended a
run of two learners in 8 s), and a sum goes through loopback. Everything is there twice, in turns: the fastest learner
may give its next tensor while the slowest still reads.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from coterie.errors import CoterieError
from coterie.parallel.processes import PeerLost
from coterie.parallel.shm import SharedArrays, fence
from coterie.types import Array

# Up to this many numbers, and with two learners always, each learner adds up all of them: one synchronization less.
_SHORT = 4096
_LEAST_S, _MOST_S = 5e-5, 2e-3  # between polls of the others


def memory_for_sums(learners: int, tensors: Sequence[Tensor]) -> SharedArrays:
    """Shared memory for sums of any of these tensors."""
    size = -(-max(x.nbytes for x in tensors) // 64) * 64  # whole cache lines
    return SharedArrays(
        {
            "given": ((learners,), "int64"),  # how many tensors each has given
            "bytes": ((2, learners), "int64"),  # of its last two
            "added": ((learners,), "int64"),  # of how many it has added up its part
            "gone": ((learners,), "int64"),  # 1: it will give no more
            "tensors": ((2, learners, size), "uint8"),
            "sums": ((2, size), "uint8"),
        },
        name="coterie-sums",
    )


class SharedSum:
    """One learner's place in the sums."""

    def __init__(self, memory: SharedArrays, rank: int) -> None:
        arrays = memory.arrays
        self.rank, self.learners = rank, len(arrays["given"])
        self._given, self._bytes, self._added, self._gone = (arrays[k] for k in ("given", "bytes", "added", "gone"))
        self._tensors, self._sums = torch.from_numpy(arrays["tensors"]), torch.from_numpy(arrays["sums"])
        self._number = 0

    def add_up(self, x: Tensor) -> None:
        """`x` becomes the sum of all learners' `x`, of one shape and type, on any device. All get the same bits: the
        order is that of the ranks.

        Raises `PeerLost` if another learner is gone.
        """
        if x.nbytes > self._sums.shape[1]:
            raise CoterieError(
                f"allreduce: a sum of {x.nbytes:,} bytes, more than the {self._sums.shape[1]:,} of the weights"
            )
        self._number += 1
        turn, n = self._number % 2, x.numel()
        tensors = self._tensors[turn, :, : x.nbytes].view(x.dtype)
        tensors[self.rank].copy_(x.reshape(-1))
        self._bytes[turn, self.rank] = x.nbytes
        self._meet(self._given)
        if (self._bytes[turn] != x.nbytes).any():  # else what an earlier sum left there would count
            raise CoterieError("allreduce: the learners do not make the same number of steps in a rollout")
        if n <= _SHORT or self.learners == 2:
            total = added_up(list(tensors))
        else:
            total = self._sums[turn, : x.nbytes].view(x.dtype)
            part = slice(n * self.rank // self.learners, n * (self.rank + 1) // self.learners)
            total[part] = added_up([given[part] for given in tensors])
            self._meet(self._added)
        x.copy_(total.view(x.shape))

    def _meet(self, counts: Array) -> None:
        """Count this learner's progress, and wait for the others. The parent ends one that hangs, and then `leave` is
        called for it.
        """
        fence()  # what this learner has written comes before its count
        counts[self.rank] = self._number
        begin = time.perf_counter()
        while True:
            gone = self._gone != 0
            fence()  # the count of a learner that is gone is final from here on
            if not (missing := counts < self._number).any():
                break
            if (gone & missing).any():
                raise PeerLost("its process has ended")
            time.sleep(min(_MOST_S, max(_LEAST_S, (time.perf_counter() - begin) / 20)))
        fence()


def added_up(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of two or more, in this order."""
    total = tensors[0] + tensors[1]
    for x in tensors[2:]:
        total += x
    return total


def leave(memory: SharedArrays, rank: int) -> None:
    """The learner gives no more: the others stop waiting for it."""
    memory.arrays["gone"][rank] = 1
