"""Clocks of the stages of a loop."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Sequence


class Stages:
    """Seconds spent in each stage, by one thread."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.first_step = math.inf  # unix time at which the first env step was done
        self._begin = 0.0

    def start(self) -> None:
        """Begin the next stage now: the time since the last `lap` belongs to none."""
        self._begin = time.perf_counter()

    def lap(self, stage: str) -> None:
        """Book the time since the last `start` or `lap`."""
        now = time.perf_counter()
        self.seconds[stage] += now - self._begin
        self._begin = now
        if stage == "env" and self.first_step == math.inf:
            self.first_step = time.time()

    def merge(self, others: Sequence[Stages]) -> None:
        """Take over what threads that ran side by side have booked: their mean."""
        for other in others:
            self.first_step = min(self.first_step, other.first_step)
            for stage, seconds in other.seconds.items():
                self.seconds[stage] += seconds / len(others)
            other.seconds.clear()
