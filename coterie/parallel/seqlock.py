"""A sequence lock: readers copy what a writer may overwrite meanwhile; none waits, and none gets a torn copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from coterie.parallel.shm import fence
from coterie.types import Array

T = TypeVar("T")


class Seqlock:
    """`writes`: a count in shared memory for each part, which has one writer: odd during a write, 0 before any."""

    def __init__(self, writes: Array) -> None:
        self.writes = writes

    @contextmanager
    def writing(self, part: int) -> Iterator[None]:
        """The context in which `part` is written."""
        self.invalidate(part)
        fence()
        yield
        fence()
        self.writes[part] += 1

    def invalidate(self, part: int) -> None:
        """Make `part` unreadable until it is written."""
        self.writes[part] += 1 + self.writes[part] % 2  # odd, also where an earlier writer was killed half-way

    def is_whole(self, parts: int | slice) -> bool:
        """Whether these parts have been written, and none is being written."""
        writes = self.writes[parts]
        return bool(((writes > 0) & (writes % 2 == 0)).all())

    def read(self, parts: int | slice, copy: Callable[[], T]) -> T | None:
        """What `copy` returns; None where one of these parts is not whole, or was written meanwhile."""
        before = self.writes[parts].copy()
        if not self.is_whole(parts):
            return None
        fence()
        copied = copy()
        fence()
        return copied if (self.writes[parts] == before).all() else None
