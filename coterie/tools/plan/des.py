"""Building blocks of a discrete event simulation that simpy does not have: shared cores, links, a barrier, a bell."""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Generator
from typing import Any

import simpy

Process = Generator[simpy.Event, Any, Any]  # simpy's


class Cores:
    """`count` cores under processor sharing: all jobs get the same rate, each at most one core.

    So a job is done when the work that a permanent job would have received reaches the job's mark.
    """

    def __init__(self, sim: simpy.Environment, count: int) -> None:
        self.sim, self.count = sim, count
        self.served: float = 0.0  # work that a permanent job has received up to `at`
        self.at: float = 0.0
        self.jobs: list[tuple[float, int, simpy.Event, str, float]] = []
        self.busy = defaultdict[str, float](float)  # core-seconds of finished jobs by part
        self._numbers, self._alarm = itertools.count(), 0

    def work(self, seconds: float, part: str) -> simpy.Event:
        """An event after `seconds` of one core's work."""
        done = self.sim.event()
        if seconds <= 0:
            return done.succeed()
        self._advance()
        heapq.heappush(self.jobs, (self.served + seconds, next(self._numbers), done, part, seconds))
        self._wake()
        return done

    @property
    def _rate(self) -> float:
        return min(1.0, self.count / max(1, len(self.jobs)))

    def _advance(self) -> None:
        self.served += (self.sim.now - self.at) * self._rate
        self.at = self.sim.now

    def _wake(self) -> None:
        """Set the alarm for the end of the next job; an earlier alarm is void."""
        self._alarm += 1
        if self.jobs:
            left = max(0.0, self.jobs[0][0] - self.served) / self._rate
            timer = self.sim.timeout(left, self._alarm)
            assert timer.callbacks is not None
            timer.callbacks.append(self._finish)

    def _finish(self, timer: simpy.Event) -> None:
        if timer.value != self._alarm:
            return
        self._advance()
        # At least the alarm's own job: rounding must not leave a rest of it.
        mark = max(self.served, self.jobs[0][0]) * (1 + 1e-12)
        while self.jobs and self.jobs[0][0] <= mark:
            _, _, done, part, seconds = heapq.heappop(self.jobs)
            self.busy[part] += seconds
            done.succeed()
        self._wake()


class Link:
    """One direction of a network: messages go one after the other at `bandwidth`, and arrive `latency` later."""

    def __init__(self, sim: simpy.Environment, latency: float, bandwidth: float) -> None:
        self.sim, self.latency, self.bandwidth = sim, latency, bandwidth
        self.free, self.busy = 0.0, 0.0

    def send(self, size: float) -> simpy.Event:
        """An event: `size` bytes have arrived."""
        took = size / self.bandwidth
        self.free = max(self.free, self.sim.now) + took
        self.busy += took
        return self.sim.timeout(self.free - self.sim.now + self.latency)


class Bell:
    """Wakes all processes that wait for a change."""

    def __init__(self, sim: simpy.Environment) -> None:
        self.sim, self.next = sim, sim.event()

    def ring(self) -> None:
        rung, self.next = self.next, self.sim.event()
        rung.succeed()


class Barrier(Bell):
    """A barrier of `count` processes."""

    def __init__(self, sim: simpy.Environment, count: int) -> None:
        super().__init__(sim)
        self.count, self.waiting = count, 0

    def join(self) -> simpy.Event:
        begins = self.next
        self.waiting += 1
        if self.waiting == self.count:
            self.waiting = 0
            self.ring()
        return begins
