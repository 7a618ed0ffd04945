"""Simulated learners on their machines, and each exchange between them: `exchange/*.py`, costs in time only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import simpy

from coterie.algorithms.base import slices
from coterie.exchange.table import EXCHANGES
from coterie.plugins import named
from coterie.tools.plan.des import Barrier, Bell, Cores, Link, Process
from coterie.tools.plan.layout import RunLayout
from coterie.tools.plan.services import Costs, Services


@dataclass(frozen=True)
class Acted:
    """A rollout, by the weights that chose its actions: the mean and the oldest learner step."""

    version: float
    oldest: int


class SimMachine:
    """A machine of some of the learners."""

    def __init__(self, sim: simpy.Environment, layout: RunLayout) -> None:
        h = layout.hardware
        self.cores = Cores(sim, h.cores)
        self.gpus = [Cores(sim, 1) for _ in range(layout.gpus)]
        self.inward, self.outward = (Link(sim, h.latency, h.bandwidth) for _ in range(2))


class Shared:
    """What the learners of a run share."""

    def __init__(self, layout: RunLayout, services: Services) -> None:
        self.sim, self.layout, self.services = simpy.Environment(), layout, services
        self.machines = [SimMachine(self.sim, layout) for _ in range(layout.hardware.machines)]
        self.barrier = Barrier(self.sim, layout.learners)
        self.store = simpy.Resource(self.sim, layout.config.store.chunks)  # a lock for each chunk
        self.updates = 0  # of shared weights, by all learners


class SimLearner:
    """Learner `rank`. It acts and trains on `chip` at `costs`; `cores` are its machine's."""

    def __init__(self, shared: Shared, rank: int) -> None:
        self.shared, self.rank, self.sim, self.layout = shared, rank, shared.sim, shared.layout
        each = self.layout.learners // self.layout.hardware.machines
        self.machine = shared.machines[rank // each]
        self.cores, gpus = self.machine.cores, self.machine.gpus
        self.chip = gpus[rank % each % len(gpus)] if gpus else self.cores
        self.costs = shared.services.chip(bool(gpus))
        self.steps = self.rollouts = self.published = 0
        self.due = 0.0  # optimizer steps
        self.news = Bell(self.sim)  # requests, new weights, or room
        self.snapshot = 0  # updates of shared weights that it has read
        self.exchange: SimExchange = named("exchange", EXCHANGES[self.layout.exchange].simulation)(self)
        self.reset()

    def reset(self) -> None:
        """Measure from here on."""
        self.lag_sum, self.lag_max, self.lag_rollouts = 0.0, 0, 0
        self.updates, self.stale = 0, 0  # of shared weights; by others between a snapshot and the update made with it
        self.training = 0.0  # seconds of training and agreeing, without waiting for others

    def wait(self, event: simpy.Event) -> Process:
        """Wait for others in the middle of training."""
        begin = self.sim.now
        yield event
        self.training -= self.sim.now - begin

    def train(self, batch: Sequence[Acted]) -> Process:
        """Learn from a batch, in `layout.steps` optimizer steps."""
        begin, lay = self.sim.now, self.layout
        for acted in batch:
            self.lag_sum += self.steps - acted.version
            self.lag_rollouts += 1
            self.lag_max = max(self.lag_max, self.steps - acted.oldest)
        self.due += lay.steps
        while self.due >= 1 - 1e-9:
            self.due -= 1
            yield self.sim.all_of([self.chip.work(x, "train") for x in training(lay, self.costs)])
            yield from self.exchange.step()
            self.steps += 1
        yield from self.exchange.after_rollout()
        self.rollouts += 1
        self.training += self.sim.now - begin


def training(layout: RunLayout, costs: Costs) -> list[float]:
    """Core-seconds of an optimizer step's forward and backward, for each thread that takes part."""
    ways = layout.train_threads
    sizes = [at.stop - at.start for at in slices(round(layout.samples), layout.chunk, ways)]
    return [sum(map(costs.train, sizes[k::ways])) for k in range(min(ways, len(sizes)))]


class SimExchange:
    """A learner's clipping, update and agreement with the others: here, alone."""

    measured: Mapping[str, Any] = {}  # settings with which each of its steps costs the same

    def __init__(self, learner: SimLearner) -> None:
        self.learner, self.shared, self.layout = learner, learner.shared, learner.layout
        self.costs, self.weights = learner.costs.exchange, learner.shared.services.weight_bytes

    def step(self) -> Process:
        yield from self.update("solo")

    def after_rollout(self) -> Process:
        yield from ()

    def update(self, kind: str) -> Process:
        yield self.learner.chip.work(self.costs[kind], "exchange")

    def extra(self, kind: str) -> float:
        """Seconds beside those of a lone learner."""
        return max(0.0, self.costs[kind] - self.costs["solo"])

    def count_update(self) -> None:
        """An update of shared weights, after which they are read again."""
        self.learner.stale += self.shared.updates - self.learner.snapshot
        self.learner.updates += 1
        self.shared.updates += 1
        self.learner.snapshot = self.shared.updates


class SimAllReduce(SimExchange):
    """On each machine a measured time that grows with (L - 1) / L, then 2 (M - 1) messages between machines."""

    def step(self) -> Process:
        learner, h, measured = self.learner, self.layout.hardware, self.shared.services.learners
        each, messages = self.layout.learners // h.machines, 2 * (h.machines - 1)
        sent = messages * self.weights / h.machines / h.bandwidth
        scale = ((each - 1) / each + (h.machines - 1) / h.machines) * measured / (measured - 1)
        yield from learner.wait(self.shared.barrier.join())
        yield learner.sim.timeout(self.extra("allreduce") * scale)
        yield from learner.wait(learner.sim.timeout(messages * h.latency + sent))
        if learner.rank % each == 0:
            learner.machine.inward.busy += sent
            learner.machine.outward.busy += sent
        yield from self.update("solo")


class SimHogwild(SimExchange):
    def step(self) -> Process:
        yield from self.update("hogwild")
        self.count_update()


class SimStore(SimExchange):
    local_steps = 0  # since the last update of the store

    def step(self) -> Process:
        self.local_steps += 1
        if self.local_steps < self.layout.config.store.local_steps:
            yield from self.update("solo")
            return
        self.local_steps = 0
        with self.shared.store.request() as held:  # of one chunk after another, the free ones first
            yield from self.learner.wait(held)
            yield from self.update("store")
        self.count_update()


class SimGossip(SimExchange):
    """Without `tau` 0 it does not wait for messages, so those between machines are not simulated."""

    measured: Mapping[str, Any] = {"gossip.mix_every": 1}
    steps = 0

    def step(self) -> Process:
        yield from self.update("solo")
        self.steps += 1
        every = self.layout.config.gossip.mix_every
        if every and self.steps % every == 0:
            yield from self._mix()

    def after_rollout(self) -> Process:
        if not self.layout.config.gossip.mix_every:
            yield from self._mix()

    def _mix(self) -> Process:
        learner, h = self.learner, self.layout.hardware
        if self.layout.config.gossip.tau == 0:
            yield from learner.wait(self.shared.barrier.join())
            if h.machines > 1:  # two hops, through the first machine
                yield from learner.wait(learner.sim.timeout(2 * h.latency + self.weights / h.bandwidth))
        yield learner.chip.work(self.extra("gossip"), "exchange")
