"""Machines of learners: whose cores and GPUs are whose, how fast they are, and what goes between them."""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

import numpy as np
import simpy

from coterie.parallel.affinity import place
from coterie.tools.plan.costs import Costs, Services
from coterie.tools.plan.des import Cores, Link, Process
from coterie.tools.plan.layout import Hardware, Layout


class Machine:
    """Where some of the learners are."""

    def __init__(self, sim: simpy.Environment, layout: Layout) -> None:
        h = layout.hardware
        self.places = place(layout.learners // h.machines, range(h.cores), layout.gpus)
        self.pools: dict[tuple[int, ...], Cores] = {}
        for key in map(key_of, self.places):
            count = len({c for p in self.places if key_of(p) == key for c in p.cores})
            self.pools.setdefault(key, Cores(sim, count, "learner cores"))
        self.gpus = [Cores(sim, 1, "gpu") for _ in range(layout.gpus)]
        self.links = [Link(sim, h.latency, h.bandwidth) for _ in range(2)]  # in, out


def key_of(p: Any) -> tuple[int, ...]:
    return (-1, p.gpu) if p.gpu >= 0 else tuple(p.cores)


class Across:
    """An all-reduce between machines: a ring's messages, one after the other (exchange/ring.py)."""

    def __init__(self, h: Hardware, services: Services, links: list[Link]) -> None:
        messages = 2 * (h.machines - 1)
        self.links, self.sent = links, messages * services.weight_bytes / h.machines / h.bandwidth
        self.seconds = messages * h.latency + self.sent
        self.one = 2 * h.latency + services.weight_bytes / h.bandwidth if messages else 0.0  # of gossip's, by the first

    def book(self) -> None:
        """Every machine sends and receives as much."""
        for link in self.links:
            link.busy += self.sent


class Telling:
    """A learner's messages to other machines, which the first machine passes on: one at a time, others are left out."""

    def __init__(
        self, sim: simpy.Environment, pool: Cores, own: Machine, machines: list[Machine], services: Services,
        costs: Costs,
    ) -> None:  # fmt: skip
        self.sim, self.pool, self.own, self.first = sim, pool, own, machines[0]
        self.others = [machine for machine in machines if machine is not own]
        self.size = services.weight_bytes
        self.half = costs.wire(self.size / max(1.0, services.obs_bytes)) / 2
        self.on_its_way = False

    def __call__(self) -> None:
        if not self.on_its_way:
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
    """How many times as long each of so many cores takes: evenly spread, with that coefficient of variation."""
    if count < 2 or not uneven:
        return [1.0] * count
    marks = np.array([NormalDist().inv_cdf((k + 0.5) / count) for k in range(count)])
    return [max(0.1, float(1 + uneven * x)) for x in marks / marks.std(ddof=1)]
