"""Locks on shared memory that die with their holder."""

from __future__ import annotations

import errno
import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager

from coterie.errors import CoterieError
from coterie.parallel.clock import awake


class Locks:
    """Locks that the kernel frees when their holder dies: byte ranges of one file, one byte for each."""

    def __init__(self, fd: int, timeout: float) -> None:
        self.fd, self.timeout = fd, timeout

    def take(self, k: int, wait: bool = True) -> bool:
        """Lock number `k`; False if another process has it and `wait` is False."""
        end = awake() + self.timeout
        while True:
            try:
                fcntl.lockf(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, k)
                return True
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EAGAIN):  # anything else would never be free
                    raise
                if not wait:
                    return False
            if awake() > end:
                raise CoterieError(f"a lock on shared memory was not free for {self.timeout:g} s: its holder hangs")
            time.sleep(5e-5)

    def queue(self, k: int) -> None:
        """Lock number `k`, asleep until it is free, without a time-out."""
        fcntl.lockf(self.fd, fcntl.LOCK_EX, 1, k)

    def free(self, k: int) -> None:
        fcntl.lockf(self.fd, fcntl.LOCK_UN, 1, k)

    @contextmanager
    def held(self, k: int) -> Iterator[None]:
        self.take(k)
        try:
            yield
        finally:
            self.free(k)
