"""Who steps the envs and chooses actions, in seconds: inline, decoupled and central acting as acting/*.py do it."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import simpy

from coterie.tools.plan.costs import Costs, Services
from coterie.tools.plan.des import Cores, Link, Process
from coterie.tools.plan.learners import Acted, Learner

Draw = Callable[[int], list[float]]  # core-seconds of a step of each of so many envs


@dataclass(frozen=True)
class Place:
    """Where a producer works: its machine's cores, and the links to its learner where that is another machine."""

    cores: Cores
    costs: Costs
    up: Link | None = None
    down: Link | None = None


def step_envs(cores: Cores, draw: Draw, envs: int, threads: int) -> simpy.Event:
    """A step of so many envs: each goes to the thread that is free first."""
    draws = draw(envs)
    if threads == 1 or envs == 1:
        return cores.work(sum(draws), "env")
    loads = [0.0] * min(threads, envs)
    for x in draws:
        heapq.heapreplace(loads, loads[0] + x)
    return cores.sim.all_of([cores.work(x, "env") for x in loads])


def inline(learner: Learner, place: Place, draw: Draw) -> Process:
    """Act, then train: one or two groups of envs, by one thread in turns or one for each."""
    sim, lay, rows = learner.sim, learner.layout, learner.layout.width * learner.layout.unroll
    width, members = lay.width // lay.groups, min(lay.groups, lay.act_threads)
    turns = learner.room.turns.get(id(learner.cores))

    def member(k: int) -> Process:
        mine, stepping = range(k, lay.groups, members), dict[int, simpy.Event]()
        for row in range(lay.unroll):
            for g in mine:
                if row:
                    yield stepping[g]
                yield from learner.act(width, place.costs.env.fixed)
                stepping[g] = step_envs(place.cores, draw, width, lay.env_threads)
        for g in mine:
            yield stepping[g]
            yield learner.chip.work(learner.costs.unroll.each * width, "act")

    while True:
        held = None
        if turns is not None:
            yield (held := turns.request())
        learner.snapshot, version = learner.room.updates, learner.steps
        yield learner.chip.work(learner.costs.unroll.fixed, "act")
        if members == 1:
            yield from member(0)
        else:
            yield sim.all_of([sim.process(member(k)) for k in range(members)])
        learner.produced += rows
        yield from learner.train([Acted(lay.width, version, version)])
        if held is not None and turns is not None:
            turns.release(held)


class Slots:
    """Decoupled acting's batches: opened, filled by whoever is free in the order of opening, learned from, reopened."""

    def __init__(self, learner: Learner) -> None:
        lay = learner.layout
        self.learner, self.per_batch = learner, lay.batch // lay.width
        self.opened = deque[list[Acted | None]]()  # each batch's slots
        self.todo = deque[tuple[list[Acted | None], int, int]]()  # batch, slot, version that it needs
        self.free, self.moving = lay.batches, 0  # moving: rows on their way from another machine
        self.door = simpy.Resource(learner.sim)
        learner.in_flight = lambda: sum(x.columns for b in self.opened for x in b if x) * lay.unroll + self.moving

    def learn(self) -> Process:
        """The learner's process."""
        learner, lay = self.learner, self.learner.layout
        while True:
            if learner.steps - learner.published >= lay.publish_every:
                learner.published = learner.steps
            for _ in range(self.free):
                batch: list[Acted | None] = [None] * self.per_batch
                self.opened.append(batch)
                need = learner.published if lay.lockstep else 0
                self.todo.extend((batch, s, need) for s in range(self.per_batch))
            self.free = 0
            learner.news.ring()
            while any(x is None for x in self.opened[0]):
                yield learner.filled.next
            yield from learner.train([x for x in self.opened.popleft() if x is not None])
            self.free += 1

    def act(self, place: Place, draw_sum: Callable[[int], float]) -> Process:
        """An actor of the learner's machine: it waits for a slot, then an unroll is the work of its one core."""
        learner, lay = self.learner, self.learner.layout
        while True:
            while not self.todo or learner.published < self.todo[0][2]:
                yield learner.news.next
            batch, slot, _ = self.todo.popleft()
            version = learner.published
            yield from self._unroll(place, draw_sum)
            self._fill(batch, slot, Acted(lay.width, version, version))

    def act_far(self, place: Place, services: Services, draw_sum: Callable[[int], float]) -> Process:
        """An actor elsewhere: it acts into memory of its own, sends that, and waits until a slot has taken it."""
        learner, lay, up, down = self.learner, self.learner.layout, place.up, place.down
        assert up is not None
        assert down is not None
        rows, had = lay.width * lay.unroll, -1
        half = place.costs.wire(rows) / 2
        while True:
            yield up.send(0)
            version = learner.published
            yield down.send(services.weight_bytes if version > had else 0)
            had = version
            yield from self._unroll(place, draw_sum)
            self.moving += rows
            yield place.cores.work(half, "wire")
            yield up.send(services.obs_bytes * rows)
            with self.door.request() as mine:  # one thread puts them into slots, as they came
                yield mine
                while not self.todo:
                    yield learner.news.next
                batch, slot, _ = self.todo.popleft()
                yield learner.cores.work(half, "wire")
                self.moving -= rows
                self._fill(batch, slot, Acted(lay.width, version, version))
            yield down.send(0)

    def _unroll(self, place: Place, draw_sum: Callable[[int], float]) -> Process:
        lay, costs = self.learner.layout, place.costs
        forward = costs.act(lay.width // lay.groups) + costs.env.fixed
        yield place.cores.work(draw_sum(lay.width * lay.unroll), "env")
        yield place.cores.work(lay.unroll * lay.groups * forward + costs.unroll(lay.width), "act")
        self.learner.produced += lay.width * lay.unroll

    def _fill(self, batch: list[Acted | None], slot: int, acted: Acted) -> None:
        batch[slot] = acted
        self.learner.filled.ring()


@dataclass(eq=False)
class Seat:
    """What the learner keeps of a stream's envs."""

    width: int
    row: int = -1  # of the unfinished rollout; -1: there is none
    spare: int = 2  # rollouts that there is memory for and nobody writes or reads
    version: float = 0.0  # sum over the rows
    oldest: int = 0
    done: int = 0  # whole rollouts


@dataclass
class Central:
    """Central acting's side of a learner: who asks, what is whole, what can be trained on."""

    learner: Learner
    pending: dict[Seat, tuple[float, simpy.Event]] = field(default_factory=dict)
    seats: list[Seat] = field(default_factory=list)
    columns: int = 0  # whole, and not learned from
    publications: int = 0
    answering: float = 0.0  # seconds

    def __post_init__(self) -> None:
        sim, lay = self.learner.sim, self.learner.layout
        self.finished, self.ready, self.free = simpy.Store(sim), simpy.Store(sim), simpy.Store(sim)
        self.door = simpy.Resource(sim)  # the one thread that reads and writes messages
        self.free.items.extend(range(lay.batches))
        self.learner.in_flight = lambda: (
            self.columns * lay.unroll + sum(max(0, s.row - 1) * s.width for s in self.seats)
        )

    def host(self, place: Place, services: Services, draw: Draw) -> Process:
        """An env host: its groups in turns, each answer waited for."""
        learner, lay = self.learner, self.learner.layout
        width = lay.width // lay.groups
        seats = [Seat(width) for _ in range(lay.groups)]
        self.seats += seats
        half, ready = place.costs.wire(width) / 2, dict[int, simpy.Event]()
        while True:
            for g, seat in enumerate(seats):
                if g in ready:
                    yield ready[g]
                yield place.cores.work(place.costs.env.fixed, "env")
                yield place.cores.work(half, "wire")
                if place.up is not None:
                    yield place.up.send(services.obs_bytes * width)
                with self.door.request() as mine:
                    yield mine
                    yield learner.cores.work(half, "wire")
                answer = learner.sim.event()
                self.pending[seat] = (learner.sim.now, answer)
                learner.news.ring()
                yield answer
                if place.down is not None:
                    yield place.down.send(8.0 * width)
                ready[g] = step_envs(place.cores, draw, width, lay.env_threads)

    def infer(self) -> Process:
        """The inference thread."""
        learner, sim = self.learner, self.learner.sim
        while True:
            picked, wait = self._due()
            if not picked:
                yield learner.news.next if math.isinf(wait) else learner.news.next | sim.timeout(wait)
                continue
            begin, version = sim.now, learner.published
            answers = [self.pending.pop(seat)[1] for seat in picked]
            self._see(picked)
            yield from learner.act(sum(s.width for s in picked))
            for seat, answer in zip(picked, answers, strict=True):
                self._act(seat, answer, version)
            self.answering += sim.now - begin

    def _see(self, picked: list[Seat]) -> None:
        for seat in picked:
            if seat.row < 0:
                self._begin(seat)
            else:
                self.learner.produced += seat.width
            seat.row += 1

    def _begin(self, seat: Seat) -> None:
        seat.spare -= 1
        seat.row, seat.version, seat.oldest = 0, 0.0, self.learner.steps

    def _act(self, seat: Seat, answer: simpy.Event, version: int) -> None:
        lay = self.learner.layout
        if seat.row == lay.unroll + 1:  # the last row's consequence is there
            self.finished.put((seat, Acted(seat.width, seat.version / lay.unroll, seat.oldest)))
            self.columns += seat.width
            seat.done += 1
            seat.row = -1
            if lay.lockstep:
                self.pending[seat] = (self.learner.sim.now, answer)
                return
            self._begin(seat)
            seat.row = 1
        seat.version += version
        seat.oldest = min(seat.oldest, version)
        answer.succeed()

    def _due(self) -> tuple[list[Seat], float]:
        """Who is answered now, or how long to wait for more (acting/central.py)."""
        learner, lay = self.learner, self.learner.layout
        envs = lay.width * lay.producers
        if not self.publications:
            return [], math.inf
        if lay.lockstep:
            due = [s for s in self.seats if not (s.row < 0 and self.publications <= s.done)]
            there = len(self.seats) * (lay.width // lay.groups) == envs
            return (due if there and all(s in self.pending and self._may_go(s, True) for s in due) else []), math.inf
        room = self.columns < 2 * envs + lay.batches * lay.batch
        ready = [s for s in self.pending if self._may_go(s, room)]
        rows = sum(s.width for s in ready)
        if not ready:
            return [], math.inf
        left = lay.wait - (learner.sim.now - min(self.pending[s][0] for s in ready))
        if rows < min(lay.batch_min, envs) and left > 1e-9:
            return [], left
        most, picked, rows = lay.batch_max or rows, list[Seat](), 0
        for seat in ready:
            if picked and rows + seat.width > most:
                break
            picked.append(seat)
            rows += seat.width
        return picked, 0.0

    def _may_go(self, seat: Seat, room: bool) -> bool:
        begins = seat.row < 0 or (seat.row == self.learner.layout.unroll and not self.learner.layout.lockstep)
        return (room and seat.spare > 0) if begins else True

    def prefetch(self) -> Process:
        """Finished rollouts, side by side in batches."""
        lay, filling = self.learner.layout, list[Acted]()
        room = 0
        while True:
            seat, acted = yield self.finished.get()
            left = seat.width
            while left:
                if not room:
                    yield self.free.get()
                    filling, room = [], lay.batch
                n = min(left, room)
                filling.append(Acted(n, acted.version, acted.oldest))
                left, room = left - n, room - n
                if not room:
                    self.ready.put(filling)
            seat.spare += 1
            self.learner.news.ring()

    def learn(self) -> Process:
        """The training thread."""
        learner = self.learner
        while True:
            yield learner.chip.work(learner.costs.unroll.fixed, "act")
            learner.published = learner.steps
            self.publications += 1
            learner.news.ring()
            batch = yield self.ready.get()
            self.columns -= learner.layout.batch
            yield from learner.train(batch)
            self.free.put(0)
