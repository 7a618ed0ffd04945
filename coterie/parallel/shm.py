"""Anonymous shared memory: numpy arrays over one memory file that has no name, so nothing is left behind.

The file descriptor is inherited by (or sent to) the processes that share it. The memory is freed when the last of them
ends, also if it is killed. This file imports without torch: env workers load it.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from multiprocessing import reduction
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from coterie.types import Array

Layout = Mapping[str, tuple[tuple[int, ...], DTypeLike]]  # name -> (shape, dtype)
_ALIGN = 64  # a cache line: no two arrays share one
LOCKS = (threading.Lock(), threading.Lock())


def fence(locks: Sequence[AbstractContextManager[object]] = LOCKS) -> None:
    """A full memory barrier, for processors that reorder memory accesses (Arm).

    An access before a lock's release may not move behind it, and one after an acquisition not before that. The release
    of the first lock and the acquisition of the second keep their order, so no access passes both ways.
    """
    for lock in locks:
        with lock:
            pass


def _place(layout: Layout) -> tuple[dict[str, int], int]:
    """Offset of each array, and the bytes of all."""
    offsets, end = {}, 0
    for name, (shape, dtype) in layout.items():
        offsets[name] = end
        end += -(-math.prod(shape) * np.dtype(dtype).itemsize // _ALIGN) * _ALIGN
    return offsets, max(end, _ALIGN)


def _memory_file(name: str, size: int) -> int:
    """A descriptor of zeroed memory (an unlinked file where the system has no memfd)."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
    else:  # pragma: no cover
        with tempfile.TemporaryFile(prefix=name) as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, size)
    return fd


class SharedArrays:
    """Named arrays in one anonymous shared memory. `arrays[name]` is writable in every process that maps it.

    Without `fd` the memory is made, zeroed, and `fd` is this object's to close; with `fd` an existing one of the same
    layout is mapped and the descriptor is taken over.
    """

    def __init__(self, layout: Layout, fd: int | None = None, name: str = "coterie") -> None:
        offsets, size = _place(layout)
        self.layout, self.name = dict(layout), name
        self.fd = _memory_file(name, size) if fd is None else fd
        if os.fstat(self.fd).st_size < size:
            raise ValueError(f"shared memory holds {os.fstat(self.fd).st_size} bytes, the layout needs {size}")
        memory = mmap.mmap(self.fd, size)  # unmapped when the last array over it dies
        self.memory: Array = np.frombuffer(memory, np.uint8)  # all of it
        self.arrays: dict[str, Array] = {
            key: np.ndarray(shape, dtype, memory, offsets[key]) for key, (shape, dtype) in layout.items()
        }

    def __reduce__(self) -> tuple[Any, ...]:
        """As an argument of a process that is being started, it becomes the same memory there."""
        return _attach, (self.layout, reduction.DupFd(self.fd), self.name)

    def close(self) -> None:
        """Release the memory. Arrays that are still referenced stay readable; the last one frees it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            # Never `mmap.close()`: numpy does not keep the map open for its arrays, and reading one would crash.
            self.arrays, self.memory = {}, np.zeros(0, np.uint8)

    def __del__(self) -> None:  # of one that was not closed, in a program that trains again and again
        if getattr(self, "fd", -1) >= 0:
            os.close(self.fd)


class InSharedMemory:
    """Base of objects over `SharedArrays`: passed to a process that is being started, one has the same memory there."""

    def __init__(self, layout: Layout, name: str) -> None:
        self._shared = SharedArrays(layout, name=name)
        self._bind(self._shared.arrays)

    def _bind(self, arrays: Mapping[str, Array]) -> None: ...  # set the attributes that are views of these

    def __getstate__(self) -> dict[str, object]:
        return {"_shared": self._shared}

    def __setstate__(self, state: Mapping[str, object]) -> None:
        vars(self).update(state)
        self._bind(self._shared.arrays)

    def release(self) -> None:
        """Close the descriptor: no process will be started with it any more. Those that have the memory keep it."""
        self._shared.close()


def _attach(layout: Layout, fd: Any, name: str) -> SharedArrays:
    return SharedArrays(layout, fd.detach(), name)
