"""Clocks of the stages of a loop."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence


class Stages:
    """Seconds spent in each stage, by one thread."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._begin = 0.0

    def start(self) -> None:
        """Begin the next stage now: the time since the last `lap` belongs to none."""
        self._begin = time.perf_counter()

    def lap(self, stage: str) -> None:
        """Book the time since the last `start` or `lap`."""
        now = time.perf_counter()
        self.seconds[stage] += now - self._begin
        self._begin = now

    def merge(self, others: Sequence[Stages]) -> None:
        """Take over what threads that ran side by side have booked: their mean."""
        for other in others:
            for stage, seconds in other.seconds.items():
                self.seconds[stage] += seconds / len(others)
            other.seconds.clear()
