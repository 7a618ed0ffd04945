"""A clock for deadlines, waits that grow, and budgets that recover."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Iterator

_HOUR_S = 3600.0
_GAP_S = 2.0  # between two readings in a process that waits; more than that, and it was stopped

_lock = threading.Lock()
_last, _stopped = time.monotonic(), 0.0


def awake() -> float:
    """Monotonic seconds without the time for which this process was suspended: no deadline passes during Ctrl-Z,
    SIGSTOP, a frozen container or a paused machine. A wait reads it at least every two seconds.
    """
    global _last, _stopped
    with _lock:
        now = time.monotonic()
        _stopped += max(0.0, now - _last - _GAP_S)
        _last = now
        return now - _stopped


class Budget:
    """How often something may happen within an hour. `total`: how often it did so far."""

    def __init__(self, limit: int) -> None:
        self.limit, self.total = limit, 0
        self._times = deque[float]()

    def spend(self, count: int = 1) -> bool:
        """Count it; returns whether the budget allows it."""
        self.total += count
        self._times.extend([time.monotonic()] * count)
        return self.left >= 0

    @property
    def left(self) -> int:
        while self._times and time.monotonic() - self._times[0] > _HOUR_S:
            self._times.popleft()
        return self.limit - len(self._times)


def back_off() -> Iterator[float]:
    """Seconds to wait before each next attempt, random so that clients of a lost server return apart."""
    longest = 0.1
    while True:
        yield random.uniform(longest / 2, longest)
        longest = min(10.0, longest * 2)
