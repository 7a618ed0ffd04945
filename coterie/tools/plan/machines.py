"""Simulated machines of learners: their cores and GPUs, the speed of those, and messages between machines."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import simpy

from coterie.parallel.affinity import place
from coterie.tools.plan.costs import Costs, Services
from coterie.tools.plan.des import Cores, Link, Process
from coterie.tools.plan.layout import Hardware, RunLayout


class SimMachine:
    """A machine of some of the learners."""

    def __init__(self, sim: simpy.Environment, layout: RunLayout) -> None:
        h = layout.hardware
        places = place(layout.learners // h.machines, range(h.cores), layout.gpus)
        shared: dict[tuple[int, ...], set[int]] = {}
        keys = [(-1, p.gpu) if p.gpu >= 0 else tuple(p.cores) for p in places]
        for key, p in zip(keys, places, strict=True):
            shared.setdefault(key, set()).update(p.cores)
        self.pools = {key: Cores(sim, len(cores), "learner cores") for key, cores in shared.items()}
        self.gpus = [Cores(sim, 1, "gpu") for _ in range(layout.gpus)]
        #: The cores of each learner, and what it trains on.
        self.seats = [
            (self.pools[key], self.gpus[p.gpu] if p.gpu >= 0 else self.pools[key])
            for key, p in zip(keys, places, strict=True)
        ]
        self.links = [Link(sim, h.latency, h.bandwidth) for _ in range(2)]  # in, out


class Ring:
    """An all-reduce between machines: the messages of a ring, one after the other."""

    def __init__(self, h: Hardware, services: Services, links: list[Link]) -> None:
        messages = 2 * (h.machines - 1)
        self.links, self.sent = links, messages * services.weight_bytes / h.machines / h.bandwidth
        self.seconds = messages * h.latency + self.sent
        self.round_trip = 2 * h.latency + services.weight_bytes / h.bandwidth if messages else 0.0  # by the first one

    def book(self) -> None:
        """Every machine sends and receives the same number of bytes."""
        for link in self.links:
            link.busy += self.sent


class Messages:
    """A learner's gossip messages to other machines. The first machine passes them on, one at a time; a message that is
    due while one is on its way is left out.
    """

    def __init__(
        self, sim: simpy.Environment, pool: Cores, own: SimMachine, machines: list[SimMachine], services: Services,
        costs: Costs,
    ) -> None:  # fmt: skip
        self.sim, self.pool, self.own, self.first = sim, pool, own, machines[0]
        self.others = [machine for machine in machines if machine is not own]
        self.size = services.weight_bytes
        self.half = costs.wire(self.size / max(1.0, services.obs_bytes)) / 2
        self.on_its_way = False

    def send(self) -> None:
        if self.others and not self.on_its_way:
            self.on_its_way = True
            self.sim.process(self._send())

    def _send(self) -> Process:
        yield self.pool.work(self.half, "wire")
        if self.own is not self.first:
            yield self.own.links[1].send(self.size)
        for other in self.others:
            if other is not self.first:
                yield self.first.links[1].send(self.size)
            yield other.links[0].send(self.size)
            next(iter(other.pools.values())).work(self.half, "wire")
        self.on_its_way = False


def speeds(count: int, uneven: float) -> list[float]:
    """Relative times of `count` cores for the same work: evenly spread, with that coefficient of variation."""
    if count < 2 or not uneven:
        return [1.0] * count
    marks = np.array([NormalDist().inv_cdf((k + 0.5) / count) for k in range(count)])
    return [max(0.1, float(1 + uneven * x)) for x in marks / marks.std(ddof=1)]
