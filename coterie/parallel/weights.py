"""A learner's weights for its actors: a versioned copy in shared memory that cannot be read torn.

One writer, any number of readers, no lock. There are two copies. The writer fills the older one, and a reader that was
overtaken while it copied copies again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from coterie.errors import CoterieError
from coterie.parallel.clock import awake
from coterie.parallel.seqlock import Seqlock
from coterie.parallel.shm import InSharedMemory
from coterie.types import Array


class Weights(InSharedMemory):
    """`size` float32 weights and `moments` float64 sums of the running normalizers."""

    def __init__(self, size: int, moments: int) -> None:
        layout = {
            "weights": ((2, size), "float32"),
            "moments": ((2, max(1, moments)), "float64"),
            "version": ((2,), "int64"),
            "writes": ((2,), "int64"),
            "newest": ((1,), "int64"),  # the copy to read; -1: nothing was published
        }
        super().__init__(layout, "coterie-weights")
        self._newest[0] = -1

    def _bind(self, arrays: Mapping[str, Array]) -> None:
        self._weights, self._moments = torch.from_numpy(arrays["weights"]), torch.from_numpy(arrays["moments"])
        self._version, self._newest, self._lock = arrays["version"], arrays["newest"], Seqlock(arrays["writes"])

    @property
    def version(self) -> int:
        """The newest copy's; -1 before the first."""
        newest = int(self._newest[0])
        return -1 if newest < 0 else int(self._version[newest])

    def publish(self, weights: Tensor, moments: Tensor, version: int) -> None:
        """Writer: make these the newest."""
        into = 1 - max(0, int(self._newest[0]))
        with self._lock.writing(into):
            self._weights[into].copy_(weights)
            self._moments[into, : len(moments)].copy_(moments)
            self._version[into] = version
        self._newest[0] = into

    def read(self, weights: Tensor, moments: Tensor, timeout: float = 60.0) -> int:
        """Copy the newest weights out; returns their version. Waits for the first publication."""
        end = awake() + timeout
        while True:
            newest = int(self._newest[0])
            version = self._lock.read(newest, partial(self._copy, newest, weights, moments)) if newest >= 0 else None
            if version is not None:
                return version
            if awake() > end:
                raise CoterieError(f"no weights were published for {timeout:g} s: the learner hangs")
            time.sleep(1e-4)

    def read_version(self, version: int, weights: Tensor, moments: Tensor) -> bool:
        """Copy out the weights of this version, if they are among the last two that were published."""
        copies = (self._lock.read(k, partial(self._copy, k, weights, moments)) for k in range(2))
        return any(found == version for found in copies)

    def _copy(self, which: int, weights: Tensor, moments: Tensor) -> int:
        weights.copy_(self._weights[which])
        moments.copy_(self._moments[which, : len(moments)])
        return int(self._version[which])
