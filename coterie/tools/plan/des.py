"""Building blocks of a discrete event simulation: shared cores, links, meetings."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import Generator
from typing import Any

import simpy

Process = Generator[simpy.Event, Any, Any]  # simpy's


class Cores:
    """`count` cores under processor sharing: all jobs get the same rate, each at most one core.

    So a job is done when the work that a permanent job would have received reaches the job's mark.
    """

    def __init__(self, sim: simpy.Environment, count: int, name: str) -> None:
        self.sim, self.count, self.name = sim, count, name
        self.slow = 1.0  # factor on every job's work
        self.served: float = 0.0  # work that a permanent job has received up to `at`
        self.at: float = 0.0
        self.jobs: list[tuple[float, int, simpy.Event, str]] = []
        self.running = Counter[str]()
        self.busy = defaultdict[str, float](float)  # core-seconds by part
        self._numbers, self._alarm = itertools.count(), 0

    def work(self, seconds: float, part: str) -> simpy.Event:
        """An event: so many core-seconds are done."""
        done = self.sim.event()
        if seconds <= 0:
            return done.succeed()
        self.advance()
        heapq.heappush(self.jobs, (self.served + seconds * self.slow, next(self._numbers), done, part))
        self.running[part] += 1
        self._wake()
        return done

    def advance(self) -> None:
        """Account for the time up to now."""
        elapsed, self.at = self.sim.now - self.at, self.sim.now
        if elapsed and self.jobs:
            rate = min(1.0, self.count / len(self.jobs))
            self.served += elapsed * rate
            for part, n in self.running.items():
                if n:
                    self.busy[part] += elapsed * rate * n

    def _wake(self) -> None:
        """Set the alarm for the end of the next job; an earlier alarm is void."""
        self._alarm += 1
        if self.jobs:
            left = max(0.0, self.jobs[0][0] - self.served) / min(1.0, self.count / len(self.jobs))
            timer = self.sim.timeout(left, self._alarm)
            assert timer.callbacks is not None
            timer.callbacks.append(self._look)

    def _look(self, timer: simpy.Event) -> None:
        if timer.value != self._alarm:
            return
        self.advance()
        # At least the alarm's own job: rounding must not leave a rest of it.
        mark = max(self.served, self.jobs[0][0]) * (1 + 1e-12)
        while self.jobs and self.jobs[0][0] <= mark:
            _, _, done, part = heapq.heappop(self.jobs)
            self.running[part] -= 1
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


class Meeting:
    """A barrier of `count` processes."""

    def __init__(self, sim: simpy.Environment, count: int) -> None:
        self.sim, self.count, self.here = sim, count, 0
        self.begins = sim.event()

    def join(self) -> simpy.Event:
        begins = self.begins
        self.here += 1
        if self.here == self.count:
            self.here, self.begins = 0, self.sim.event()
            begins.succeed()
        return begins


class Bell:
    """Wakes all processes that wait for a change."""

    def __init__(self, sim: simpy.Environment) -> None:
        self.sim, self.next = sim, sim.event()

    def ring(self) -> None:
        rung, self.next = self.next, self.sim.event()
        rung.succeed()
