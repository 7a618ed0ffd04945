"""Simulated central acting, as `acting/central.py` does it: env hosts ask, the learner's process answers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import simpy

from coterie.acting.batching import choose_batch, choose_turn, has_room, may_go
from coterie.tools.plan.acting import Place, SimActing
from coterie.tools.plan.des import Process
from coterie.tools.plan.learners import Acted


@dataclass(eq=False)
class SimStream:
    """The envs of one group of a host, and its pending request. Two rollouts of memory: one is written while the other
    waits to be copied.
    """

    width: int
    row: int = -1  # of the unfinished rollout; -1: there is none
    spare: int = 2  # rollouts of memory that are free
    version: float = 0.0  # sum over the rows
    oldest: int = 0
    done: int = 0  # finished rollouts
    since: float = 0.0  # when it asked
    answer: simpy.Event | None = None


class SimCentral(SimActing):
    """Env hosts ask, an inference thread answers, a thread copies finished rollouts into batches, one trains."""

    def start(self, places: list[Place]) -> None:
        sim, lay = self.sim, self.layout
        self.streams: list[SimStream] = []
        self.pending: dict[SimStream, None] = {}  # in the order of their requests
        self.columns = 0  # finished and not learned
        self.publications = 0
        self.finished, self.ready, self.free = simpy.Store(sim), simpy.Store(sim), simpy.Store(sim)
        self.server = simpy.Resource(sim)  # the one thread that reads and writes messages
        self.free.items.extend(range(lay.batches))
        self.learner.in_flight = lambda: (
            self.columns * lay.unroll + sum(max(0, s.row - 1) * s.width for s in self.streams)
        )
        for work in (self._infer(), self._prefetch(), self._learn(), *map(self._host, places)):
            sim.process(work)

    def _host(self, place: Place) -> Process:
        """An env host: its groups in turn, each waits for its answer."""
        learner, lay = self.learner, self.layout
        width = lay.width // lay.groups
        streams = [SimStream(width) for _ in range(lay.groups)]
        self.streams += streams
        half, stepping = place.costs.wire(width) / 2, dict[int, simpy.Event]()
        while True:
            for g, stream in enumerate(streams):
                if g in stepping:
                    yield stepping[g]
                yield place.cores.work(place.costs.env.fixed, "env")
                yield place.cores.work(half, "wire")
                if place.up is not None:
                    yield place.up.send(self.services.obs_bytes * width)
                with self.server.request() as mine:
                    yield mine
                    yield self.cores.work(half, "wire")
                stream.answer = self.sim.event()
                self._ask(stream)
                learner.news.ring()
                yield stream.answer
                if place.down is not None:
                    yield place.down.send(8.0 * width)
                stepping[g] = self.times.step(place, width, lay.env_threads)

    def _ask(self, stream: SimStream) -> None:
        stream.since = self.sim.now
        self.pending[stream] = None

    def _infer(self) -> Process:
        while True:
            picked, wait = self._due()
            if not picked:
                news = self.learner.news.next
                yield news if math.isinf(wait) else news | self.sim.timeout(wait)
                continue
            begin, version = self.sim.now, self.learner.published
            for stream in picked:
                del self.pending[stream]
                if stream.row < 0:
                    self._begin(stream)
                else:
                    self.learner.produced += stream.width
                stream.row += 1
            yield from self.learner.act(sum(s.width for s in picked))
            for stream in picked:
                self._answer(stream, version)
            self.answering += self.sim.now - begin

    def _begin(self, stream: SimStream) -> None:
        stream.spare -= 1
        stream.row, stream.version, stream.oldest = 0, 0.0, self.learner.steps

    def _answer(self, stream: SimStream, version: int) -> None:
        lay = self.layout
        if stream.row == lay.unroll + 1:  # the consequence of the last row has arrived
            self.finished.put((stream, Acted(stream.width, stream.version / lay.unroll, stream.oldest)))
            self.columns += stream.width
            stream.done += 1
            stream.row = -1
            if lay.lockstep:
                self._ask(stream)
                return
            self._begin(stream)
            stream.row = 1
        stream.version += version
        stream.oldest = min(stream.oldest, version)
        assert stream.answer is not None
        stream.answer.succeed()

    def _due(self) -> tuple[list[SimStream], float]:
        """The streams to answer now, or how long to wait for more."""
        lay = self.layout
        envs = lay.width * lay.producers
        if not self.publications:
            return [], math.inf
        if lay.lockstep:
            return choose_turn(
                self.streams, envs, self._rests, lambda s: s in self.pending and self._may_go(s)
            ), math.inf
        room = has_room(self.columns, envs, lay.batches * lay.batch)
        ready = [s for s in self.pending if self._may_go(s, room)]
        # A wait that is over by rounding is over.
        return choose_batch(ready, self.sim.now + 1e-9, min(lay.batch_min, envs), lay.batch_max, lay.wait)

    def _rests(self, stream: SimStream) -> bool:
        return stream.row < 0 and self.publications <= stream.done

    def _may_go(self, stream: SimStream, room: bool = True) -> bool:
        return may_go(stream.row, self.layout.unroll, self.layout.lockstep, room and stream.spare > 0)

    def _prefetch(self) -> Process:
        """Finished rollouts, side by side in batches."""
        batch, filling, room = self.layout.batch, list[Acted](), 0
        while True:
            stream, acted = yield self.finished.get()
            left = stream.width
            while left:
                if not room:
                    yield self.free.get()
                    filling, room = [], batch
                n = min(left, room)
                filling.append(Acted(n, acted.version, acted.oldest))
                left, room = left - n, room - n
                if not room:
                    self.ready.put(filling)
            stream.spare += 1
            self.learner.news.ring()

    def _learn(self) -> Process:
        learner = self.learner
        while True:
            yield learner.chip.work(learner.costs.unroll.fixed, "act")
            learner.published = learner.steps
            self.publications += 1
            learner.news.ring()
            batch = yield self.ready.get()
            self.columns -= self.layout.batch
            yield from learner.train(batch)
            self.free.put(0)
