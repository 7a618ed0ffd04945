"""Simulated inline and decoupled acting, as `acting/*.py` do it, in seconds."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass

import numpy as np
import simpy

from coterie.tools.plan.costs import Costs, Services
from coterie.tools.plan.des import Cores, Link, Process
from coterie.tools.plan.learners import Acted, SimLearner


@dataclass(frozen=True)
class Place:
    """Where a producer works: its machine's cores, and the links to its learner if that is on another machine."""

    cores: Cores
    costs: Costs
    up: Link | None = None
    down: Link | None = None


@dataclass(frozen=True)
class EnvTimes:
    """Gamma distributed core-seconds of env steps. `cv`: the coefficient of variation of one."""

    rng: np.random.Generator
    cv: float

    def each(self, mean: float, envs: int) -> list[float]:
        """A step of each of so many envs."""
        if self.cv == 0 or mean == 0:
            return [mean] * envs
        return [float(x) for x in self.rng.gamma(self.cv**-2, mean * self.cv**2, envs)]

    def total(self, mean: float, steps: int) -> float:
        """So many steps together."""
        return float(self.rng.gamma(steps * self.cv**-2, mean * self.cv**2)) if self.cv and mean else mean * steps

    def step(self, place: Place, envs: int, threads: int) -> simpy.Event:
        """A step of so many envs: each is done by the thread that is free first."""
        draws = self.each(place.costs.env.each, envs)
        if threads == 1 or envs == 1:
            return place.cores.work(sum(draws), "env")
        loads = [0.0] * min(threads, envs)
        for x in draws:
            heapq.heapreplace(loads, loads[0] + x)
        return place.cores.sim.all_of([place.cores.work(x, "env") for x in loads])


class SimActing:
    """The acting for one learner; its processes run once it is made."""

    answering = 0.0  # seconds of an inference thread

    def __init__(self, learner: SimLearner, places: list[Place], services: Services, times: EnvTimes) -> None:
        self.learner, self.services, self.times = learner, services, times
        self.sim, self.layout, self.cores = learner.sim, learner.layout, learner.cores
        self.start(places)

    def start(self, places: list[Place]) -> None:
        raise NotImplementedError


class SimInline(SimActing):
    """Act, then train: one or two groups of envs, by one thread in turn or by a thread for each."""

    def start(self, places: list[Place]) -> None:
        (self.place,) = places
        self.stepping: dict[int, simpy.Event] = {}
        self.sim.process(self._learn())

    def _learn(self) -> Process:
        learner, lay = self.learner, self.layout
        members = min(lay.groups, lay.act_threads)
        turns = learner.shared.turns.get(id(learner.cores))
        while True:
            held = turns.request() if turns is not None else None
            if held is not None:
                yield held
            learner.snapshot, version = learner.shared.updates, learner.steps
            yield learner.chip.work(learner.costs.unroll.fixed, "act")
            if members == 1:
                yield from self._act(range(lay.groups))
            else:
                groups = [range(k, lay.groups, members) for k in range(members)]
                yield self.sim.all_of([self.sim.process(self._act(mine)) for mine in groups])
            learner.produced += lay.width * lay.unroll
            yield from learner.train([Acted(lay.width, version, version)])
            if turns is not None and held is not None:
                turns.release(held)

    def _act(self, groups: range) -> Process:
        """An unroll of some of the groups, by one thread."""
        learner, lay, place = self.learner, self.layout, self.place
        width = lay.width // lay.groups
        for row in range(lay.unroll):
            for g in groups:
                if row:
                    yield self.stepping[g]
                yield from learner.act(width, place.costs.env.fixed)
                self.stepping[g] = self.times.step(place, width, lay.env_threads)
        for g in groups:
            yield self.stepping[g]
            yield learner.chip.work(learner.costs.unroll.each * width, "act")


@dataclass
class Slot:
    """A place for an actor's rollout in a batch. `need`: the version of the weights that it is acted with, at least."""

    need: int
    acted: Acted | None = None


class SimDecoupled(SimActing):
    """Batches of slots: opened, filled in that order by the actors that are free, learned from, opened again."""

    def start(self, places: list[Place]) -> None:
        lay = self.layout
        self.opened = deque[list[Slot]]()  # batches
        self.todo = deque[Slot]()
        self.moving = 0  # rows on their way from another machine
        self.server = simpy.Resource(self.sim)
        self.learner.in_flight = lambda: (
            sum(slot.acted.columns for batch in self.opened for slot in batch if slot.acted) * lay.unroll + self.moving
        )
        self.sim.process(self._learn())
        for place in places:
            self.sim.process(self._act(place) if place.up is None else self._act_far(place))

    def _learn(self) -> Process:
        learner, lay = self.learner, self.layout
        free = lay.batches
        while True:
            if learner.steps - learner.published >= lay.publish_every:
                learner.published = learner.steps
            for _ in range(free):
                need = learner.published if lay.lockstep else 0
                self.opened.append([Slot(need) for _ in range(lay.batch // lay.width)])
                self.todo.extend(self.opened[-1])
            learner.news.ring()
            while any(slot.acted is None for slot in self.opened[0]):
                yield learner.filled.next
            yield from learner.train([slot.acted for slot in self.opened.popleft() if slot.acted is not None])
            free = 1

    def _act(self, place: Place) -> Process:
        """An actor on the learner's machine: it waits for a slot; an unroll is the work of its one core."""
        learner = self.learner
        while True:
            while not self.todo or learner.published < self.todo[0].need:
                yield learner.news.next
            slot, version = self.todo.popleft(), learner.published
            yield from self._unroll(place)
            self._fill(slot, version)

    def _act_far(self, place: Place) -> Process:
        """An actor elsewhere: it acts into its own memory, sends the rollout, and waits until a slot has taken it."""
        learner, services = self.learner, self.services
        rows, held_version = self.layout.width * self.layout.unroll, -1
        half = place.costs.wire(rows) / 2
        assert place.up is not None
        assert place.down is not None
        while True:
            yield place.up.send(0)
            version = learner.published
            yield place.down.send(services.weight_bytes if version > held_version else 0)
            held_version = version
            yield from self._unroll(place)
            self.moving += rows
            yield place.cores.work(half, "wire")
            yield place.up.send(services.obs_bytes * rows)
            with self.server.request() as mine:  # one thread puts rollouts into slots, in the order of their arrival
                yield mine
                while not self.todo:
                    yield learner.news.next
                slot = self.todo.popleft()
                yield self.cores.work(half, "wire")
                self.moving -= rows
                self._fill(slot, version)
            yield place.down.send(0)

    def _unroll(self, place: Place) -> Process:
        lay, costs = self.layout, place.costs
        forward = costs.act(lay.width // lay.groups) + costs.env.fixed
        yield place.cores.work(self.times.total(costs.env.each, lay.width * lay.unroll), "env")
        yield place.cores.work(lay.unroll * lay.groups * forward + costs.unroll(lay.width), "act")
        self.learner.produced += lay.width * lay.unroll

    def _fill(self, slot: Slot, version: int) -> None:
        slot.acted = Acted(self.layout.width, version, version)
        self.learner.filled.ring()
