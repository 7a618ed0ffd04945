"""A learner's weights for its actors: a versioned copy in shared memory that cannot be read torn.

One writer, any number of readers, no lock. There are two copies. The writer fills the older one, and a reader that was
overtaken while it copied copies again.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from coterie.parallel.shm import SharedArrays, fence
from coterie.types import CoterieError


class Weights:
    """`size` float32 weights and `moments` float64 sums of the running normalizers."""

    def __init__(self, size: int, moments: int) -> None:
        self._shared = SharedArrays(
            {
                "weights": ((2, size), "float32"),
                "moments": ((2, max(1, moments)), "float64"),
                "version": ((2,), "int64"),
                "writes": ((2,), "int64"),  # odd while a copy is being written
                "newest": ((1,), "int64"),  # the copy to read; -1: nothing was published
            },
            name="coterie-weights",
        )
        self._shared.arrays["newest"][0] = -1
        self._bind()

    def _bind(self) -> None:
        arrays = self._shared.arrays
        self._weights, self._moments = torch.from_numpy(arrays["weights"]), torch.from_numpy(arrays["moments"])
        self._version, self._writes, self._newest = arrays["version"], arrays["writes"], arrays["newest"]

    def __getstate__(self) -> dict[str, SharedArrays]:
        return {"_shared": self._shared}

    def __setstate__(self, state: dict[str, SharedArrays]) -> None:
        self._shared = state["_shared"]
        self._bind()

    @property
    def version(self) -> int:
        """Of the newest copy; -1 before the first."""
        newest = int(self._newest[0])
        return -1 if newest < 0 else int(self._version[newest])

    def publish(self, weights: Tensor, moments: Tensor, version: int) -> None:
        """Writer: make these the newest."""
        into = 1 - max(0, int(self._newest[0]))
        self._writes[into] += 1 + int(self._writes[into]) % 2  # odd, also where an earlier writer died half-way
        fence()
        self._weights[into].copy_(weights)
        self._moments[into, : len(moments)].copy_(moments)
        self._version[into] = version
        fence()
        self._writes[into] += 1
        self._newest[0] = into

    def read(self, weights: Tensor, moments: Tensor, timeout: float = 60.0) -> int:
        """Copy the newest weights out; returns their version. Waits for the first publication."""
        end = time.monotonic() + timeout
        while True:
            newest = int(self._newest[0])
            before = int(self._writes[newest]) if newest >= 0 else 1
            if before % 2 == 0:
                fence()
                weights.copy_(self._weights[newest])
                moments.copy_(self._moments[newest, : len(moments)])
                version = int(self._version[newest])
                fence()
                if int(self._writes[newest]) == before:
                    return version
            if time.monotonic() > end:
                raise CoterieError(f"no whole weights were published for {timeout:g} s: the learner hangs")
            time.sleep(1e-4)

    def close(self) -> None:
        self._shared.close()
