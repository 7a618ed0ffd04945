"""Two copies of a network for acting: one acts while the other takes new weights."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from coterie.models.base import Model
from coterie.parallel.gpu import finish_kernels

ActingCopy = tuple[Model, Callable[[], None]]  # a copy of the network for acting, and a call that updates it


class DoubleBufferedModel:
    """The newest weights for one acting thread, updated by another thread without waiting for it."""

    def __init__(self, copies: Sequence[ActingCopy], device: torch.device) -> None:
        self.copies, self.device = copies, device
        self.published = 0  # calls of `publish`
        self._newest, self._in_use, self._version = 0, -1, (0, 0)
        self._lock = threading.Lock()  # guards the three

    def publish(self, version: int) -> None:
        """Update the copy that is not in use, and act with it from the next batch on."""
        with self._lock:
            idle = 1 - self._in_use if self._in_use >= 0 else 1 - self._newest
            self.copies[idle][1]()
            finish_kernels(self.device)
            self.published += 1
            self._newest, self._version = idle, (version, self.published)

    @contextmanager
    def newest(self) -> Iterator[tuple[Model, int, int]]:
        """The copy to act with, its learner step, and which publication it is of. It keeps its weights until the end of
        the block. Normalizers change without a learner step, so that a step may be published again.
        """
        with self._lock:
            self._in_use, version = self._newest, self._version
        try:
            yield self.copies[self._in_use][0], *version
        finally:
            with self._lock:
                self._in_use = -1
