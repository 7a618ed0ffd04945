"""Simulated acting, as `acting/*.py` do it: costs in time only."""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import simpy

from coterie.acting.window import Window, choose_batch, has_room, window_of
from coterie.tools.plan.des import Cores, Link, Process
from coterie.tools.plan.learners import Acted, SimLearner


@dataclass(frozen=True)
class ProducerLocation:
    """Where a producer works: its machine's cores, and the links to its learner if that is on another machine."""

    cores: Cores
    up: Link | None = None
    down: Link | None = None


class SimActing(ABC):
    """The acting for one learner; its processes run once it is made."""

    answering = 0.0  # seconds of an inference thread

    def __init__(self, learner: SimLearner, places: list[ProducerLocation], rng: np.random.Generator) -> None:
        self.learner, self.services, self.rng = learner, learner.shared.services, rng
        self.sim, self.layout, self.costs = learner.sim, learner.layout, self.services.costs
        self.finished = simpy.Store(self.sim)  # rollouts that the learner can take
        self.server = simpy.Resource(self.sim)  # the learner's thread that reads and writes messages
        self.sim.process(self.learn())
        for place in places:
            self.start(place)

    @abstractmethod
    def learn(self) -> Process:
        """The learner's thread, which runs before the producers'."""

    def start(self, place: ProducerLocation) -> None:
        """Start a producer."""

    def take(self, count: int) -> Process:
        """Wait for `count` finished rollouts; returns them."""
        batch = list[Acted]()
        while len(batch) < count:
            batch.append((yield self.finished.get()))
        return batch

    def env_seconds(self, steps: int) -> list[float]:
        """Gamma distributed seconds of env steps."""
        mean, cv = self.costs.env.each, self.services.env_cv
        if cv == 0 or mean == 0:
            return [mean] * steps
        return [float(x) for x in self.rng.gamma(cv**-2, mean * cv**2, steps)]

    def step(self, cores: Cores, envs: int) -> simpy.Event:
        """A step of a group of envs: each is done by the thread that is free first."""
        loads = [0.0] * min(self.layout.env_threads, envs)
        for seconds in self.env_seconds(envs):
            heapq.heapreplace(loads, loads[0] + seconds)
        return self.sim.all_of([self.sim.process(self.env(cores, x)) for x in loads])

    def env(self, cores: Cores, seconds: float, threads: int = 1) -> Process:
        """Env steps in a row, whose waits are spread over `threads`."""
        waits = self.services.env_waits
        yield cores.work(seconds * (1 - waits), "env")
        yield self.sim.timeout(seconds * waits / threads)

    def send(self, place: ProducerLocation, envs: float, size: float) -> Process:
        """A message from a producer: both ends spend time on it; the learner handles messages one at a time."""
        half = self.costs.wire(envs) / 2
        yield place.cores.work(half, "wire")
        if place.up is not None:
            yield place.up.send(size)
        with self.server.request() as turn:
            yield turn
            yield self.learner.cores.work(half, "wire")


class SimInline(SimActing):
    """Act, then train: one or two groups of envs, by one thread in turn or by a thread for each."""

    def learn(self) -> Process:
        learner, lay = self.learner, self.layout
        members = min(lay.groups, lay.act_threads)
        while True:
            learner.snapshot, version = learner.shared.updates, learner.steps
            yield learner.chip.work(learner.costs.unroll.fixed, "act")
            groups = [range(k, lay.groups, members) for k in range(members)]
            yield self.sim.all_of([self.sim.process(self._act(mine)) for mine in groups])
            yield from learner.train([Acted(version, version)])

    def _act(self, groups: range) -> Process:
        """An unroll of some of the groups, by one thread."""
        learner, lay = self.learner, self.layout
        width, stepping = lay.width // lay.groups, dict[int, simpy.Event]()
        for _ in range(lay.unroll):
            for g in groups:
                if g in stepping:
                    yield stepping[g]
                yield learner.cores.work(self.costs.env.fixed, "env")
                yield learner.chip.work(learner.costs.act(width), "act")
                stepping[g] = self.step(learner.cores, width)
        for g in groups:
            yield stepping[g]
            yield learner.chip.work(learner.costs.unroll.each * width, "act")


class SimDecoupled(SimActing):
    """Actors fill slots, from which the learner takes batches; then their slots are free again."""

    def learn(self) -> Process:
        learner, lay = self.learner, self.layout
        size = lay.batch // lay.width
        self.slots = simpy.Container(self.sim, init=lay.batches * size)
        while True:
            if learner.steps - learner.published >= lay.config.decoupled.publish_every:
                learner.published = learner.steps
            batch = yield from self.take(size)
            yield from learner.train(batch)
            yield self.slots.put(size)

    def start(self, place: ProducerLocation) -> None:
        self.sim.process(self._act(place, place.up, place.down))

    def _act(self, place: ProducerLocation, up: Link | None, down: Link | None) -> Process:
        """An actor: an unroll is the work of its one core. On the learner's machine it first waits for a slot;
        elsewhere it acts into its own memory, sends the rollout, and waits until a slot has taken it.
        """
        lay, costs = self.layout, self.costs
        rows, held_version = lay.width * lay.unroll, -1
        acting = lay.unroll * lay.groups * (costs.act(lay.width // lay.groups) + costs.env.fixed)
        while True:
            yield up.send(0) if up is not None else self.slots.get(1)
            version = self.learner.published
            if down is not None:
                yield down.send(self.services.weight_bytes if version > held_version else 0)
            held_version = version
            yield from self.env(place.cores, sum(self.env_seconds(rows)), lay.env_threads * lay.groups)
            yield place.cores.work(acting + costs.unroll(lay.width), "act")
            if down is not None:
                yield from self.send(place, rows, self.services.obs_bytes * rows)
                yield self.slots.get(1)
            self.finished.put(Acted(version, version))
            if down is not None:
                yield down.send(0)


@dataclass(frozen=True, eq=False)
class SimRequest:
    width: int
    since: float
    answer: simpy.Event


class SimCentral(SimActing):
    """Env hosts ask, the learner's inference thread answers; another one trains on finished rollouts in their order."""

    def learn(self) -> Process:
        learner, lay = self.learner, self.layout
        self.pending: list[SimRequest] = []
        self.columns = 0  # of rollouts that are begun and not learned
        self.publications = 0
        self.window = Window(0 if lay.lockstep else window_of(lay.config.max_lag, lay.batch, math.ceil(lay.steps)))
        self.sim.process(self._infer())
        while True:
            yield learner.chip.work(learner.costs.unroll.fixed, "act")
            learner.published = learner.steps
            self.publications += 1
            learner.news.ring()
            batch = yield from self.take(lay.batch)
            yield from learner.train(batch)
            self.window.trained(lay.batch)
            self.columns -= lay.batch
            learner.news.ring()

    def start(self, place: ProducerLocation) -> None:
        for _ in range(self.layout.groups):
            self.sim.process(self._collect(place))

    def _collect(self, place: ProducerLocation) -> Process:
        """One group of an env host."""
        learner, lay = self.learner, self.layout
        width, rollouts = lay.width // lay.groups, 0
        newest = lay.hosts > 0 and lay.config.central.newest_frame  # else they share memory with the learner
        sent = width * (lay.frame_share if newest else 1.0)
        while True:
            versions = list[int]()
            while self.publications <= (rollouts if lay.lockstep else 0) or not self._may_begin(width):
                yield learner.news.next
            ticket = self.window.begin(width)
            self.columns += width
            oldest = learner.steps
            for _ in range(lay.unroll):
                request = SimRequest(width, self.sim.now, self.sim.event())
                self.pending.append(request)
                learner.news.ring()
                versions.append((yield request.answer))
                if place.down is not None:
                    yield place.down.send(8.0 * width)
                yield self.step(place.cores, width)
                yield place.cores.work(self.costs.env.fixed, "env")
                yield from self.send(place, sent, self.services.obs_bytes * sent)
            self.window.finish(ticket)
            for _ in range(width):
                self.finished.put(Acted(sum(versions) / lay.unroll, min(oldest, *versions)))
            rollouts += 1

    def _may_begin(self, width: int) -> bool:
        """Real streams have memory for two rollouts each: the limit of finished and unfinished ones is the same."""
        lay = self.layout
        room = has_room(self.columns, lay.width * lay.producers, lay.batches * lay.batch)
        return room and self.window.may_begin(width)

    def _infer(self) -> Process:
        learner, lay = self.learner, self.layout
        envs, own = lay.width * lay.producers, lay.config.central
        least, wait = (envs, math.inf) if lay.lockstep else (min(own.batch_min, envs), own.wait)
        while True:
            # A wait that is over by rounding is over.
            picked, left = choose_batch(self.pending, self.sim.now + 1e-9, least, own.batch_max, wait)
            if not picked:
                news = learner.news.next
                yield news if math.isinf(left) else news | self.sim.timeout(left)
                continue
            begin, version = self.sim.now, learner.published
            self.pending = [request for request in self.pending if request not in picked]
            yield learner.chip.work(learner.costs.act(sum(request.width for request in picked)), "act")
            for request in picked:
                request.answer.succeed(version)
            self.answering += self.sim.now - begin
