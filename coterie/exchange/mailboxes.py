"""Mailboxes of gossip between machines: the newest weights of each learner, of this run and of others.

A learner writes its own mailbox after every mix and reads those of the learners elsewhere; the run's connection
(`remote/gossip_hub.py`, `gossip_client.py`) carries messages between machines. A newer message overwrites an older one
that was not read, so no learner waits for a link.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from coterie.parallel.shm import Layout, SharedArrays, fence
from coterie.types import Array

REMOTE = 256  # learners of other runs at most; only the mailboxes that are used take memory


class Message(NamedTuple):
    version: int
    weights: Array
    moments: Array

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(self.weights), torch.from_numpy(self.moments)


def mailbox_arrays(rows: int, weights: int, moments: int) -> Layout:
    return {
        "mailbox/weights": ((rows, weights), "float32"),
        "mailbox/moments": ((rows, moments), "float64"),
        "mailbox/writes": ((rows,), "int64"),  # odd while a message is being written, and where there is none
    }


class Mailboxes:
    """Mailboxes in shared memory, by row: this run's learners first, then those of other runs. Each has one writer."""

    def __init__(self, shared: SharedArrays, learners: int) -> None:
        self.learners, self.present = learners, shared.arrays["present"]
        self.weights, self.moments, self._writes = (
            shared.arrays[f"mailbox/{name}"] for name in ("weights", "moments", "writes")
        )
        self.remote = range(learners, len(self.present))

    def peers(self) -> list[int]:
        """Rows of the remote learners that take part."""
        found: list[int] = (self.learners + np.flatnonzero(self.present[self.learners :])).tolist()
        return found

    def write(self, row: int, weights: Array, moments: Array) -> None:
        self.clear(row)
        fence()
        self.weights[row] = weights
        self.moments[row, : len(moments)] = moments
        fence()
        self._writes[row] += 1

    def clear(self, row: int) -> None:
        """Invalidate the message in this mailbox."""
        self._writes[row] += 1 + self._writes[row] % 2  # odd, also where a writer was killed half-way

    def has_message(self, row: int) -> bool:
        return bool(self._writes[row] > 0 and self._writes[row] % 2 == 0)

    def read(self, row: int, after: int = 0) -> Message | None:
        """The newest message, unless it is being written or its version is not above `after`."""
        version = int(self._writes[row])
        if version % 2 or version <= after:
            return None
        fence()
        weights, moments = self.weights[row].copy(), self.moments[row].copy()
        fence()
        return Message(version, weights, moments) if self._writes[row] == version else None
