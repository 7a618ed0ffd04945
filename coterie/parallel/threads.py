"""A team of threads in which each member runs torch on one core.

Torch's own intra-op threads synchronize after every operation. On a busy machine each of those hundreds of barriers
costs a time slice (measured: a training step 4 to 20 times slower with two threads than with one). A team synchronizes
once for each batch or rollout, which is also faster on an idle machine. Torch's calls release the interpreter lock.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")

making_alone = threading.RLock()  # the threads of a process share torch's own random numbers


@contextmanager
def making(seed: int = 0) -> Iterator[None]:
    """For making a network: torch draws its own random numbers from `seed`, for this thread alone, and computes with
    one thread. With 16 on a process's only core, orthogonal weights of 512 x 3136 take 84 s instead of 0.1: the threads
    wait for each other without giving the core away.
    """
    with making_alone, torch.random.fork_rng(devices=[]):
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            torch.manual_seed(seed)
            yield
        finally:
            torch.set_num_threads(before)


def set_torch(deterministic: bool) -> Callable[[], None]:
    """Set one thread per operation and, if asked, torch's deterministic algorithms; returns what undoes it."""
    threads, mode = torch.get_num_threads(), torch.get_deterministic_debug_mode()
    torch.set_num_threads(1)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it as it starts
        torch.set_deterministic_debug_mode("error")

    def undo() -> None:
        torch.set_num_threads(threads)
        if deterministic:
            torch.set_deterministic_debug_mode(mode)

    return undo


class Team:
    """`size` threads, the caller's among them."""

    def __init__(self, size: int) -> None:
        self.size = max(1, size)
        self._pool = None
        if self.size > 1:  # without a number of its own, a thread takes the process's as it first computes
            self._pool = ThreadPoolExecutor(self.size - 1, "coterie-team", torch.set_num_threads, (1,))

    def run(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """Make all calls, in parallel as far as there are members; raises the first exception once all have ended."""
        if self._pool is None or len(calls) == 1:
            return [call() for call in calls]
        others = [self._pool.submit(call) for call in calls[1:]]
        try:
            first = calls[0]()
        finally:
            wait(others)
        return [first, *(f.result() for f in others)]

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False)  # a thread that hangs delays the exit of Python, not the last checkpoint


ALONE = Team(1)
