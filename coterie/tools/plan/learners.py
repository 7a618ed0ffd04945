"""Simulated learners, and how each exchange agrees between them: `exchange/*.py`, in seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import simpy

from coterie.algorithms.base import slices
from coterie.tools.plan.costs import Costs
from coterie.tools.plan.des import Bell, Cores, Meeting, Process
from coterie.tools.plan.layout import RunLayout
from coterie.tools.plan.machines import Ring


@dataclass(frozen=True)
class Acted:
    """Columns that were acted, and the weights that chose the actions: the mean and the oldest learner step."""

    columns: int
    version: float
    oldest: int


def training(layout: RunLayout, costs: Costs) -> list[float]:
    """Core-seconds of an optimizer step's forward and backward, for each thread that takes part."""
    ways = layout.train_threads
    sizes = [at.stop - at.start for at in slices(round(layout.samples), layout.chunk, ways)]
    return [sum(map(costs.train, sizes[k::ways])) for k in range(min(ways, len(sizes)))]


@dataclass
class Shared:
    """What the learners of a run share."""

    sim: simpy.Environment
    layout: RunLayout
    scale: float  # of an all-reduce's time, beside the measured one
    ring: Ring  # an all-reduce between machines
    meeting: Meeting
    locks: list[simpy.Resource]  # of a store's chunks
    turns: dict[int, simpy.Resource] = field(default_factory=dict)  # of cores that several learners share
    updates: int = 0  # of shared weights, by all learners


class SimLearner:
    """Learner `rank`. It acts and trains on `chip` at `costs`; `cores` are its machine's. `pace` changes the speed of
    those, at each rollout; `send` sends a gossip message to other machines.
    """

    def __init__(
        self, shared: Shared, rank: int, cores: Cores, chip: Cores, costs: Costs, pace: Callable[[], None],
        send: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self.shared, self.rank, self.cores, self.chip, self.costs = shared, rank, cores, chip, costs
        self.pace, self.send = pace, send
        self.sim, self.layout = shared.sim, shared.layout
        self.steps = self.rollouts = self.learned = self.produced = 0
        self.due = 0.0  # optimizer steps
        self.published = 0
        self.news, self.filled = Bell(shared.sim), Bell(shared.sim)  # new weights or room; a full slot
        self.lag_sum, self.lag_max, self.lag_rows = 0.0, 0, 0
        self.stale, self.snapshot = 0, 0  # updates of others between a snapshot and the update made with it
        self.training = 0.0  # seconds of training and agreeing, without waiting for others
        self.in_flight: Callable[[], int] = lambda: 0  # rows acted and not learned
        self.exchange = EXCHANGES[self.layout.exchange](self)

    def act(self, envs: int, beside: float = 0.0) -> Process:
        """A forward of so many envs; the calling thread has other work `beside` it, on a core."""
        if self.chip is not self.cores:
            yield self.cores.work(beside, "act")
            beside = 0.0
        yield self.chip.work(self.costs.act(envs) + beside, "act")

    def wait(self, event: simpy.Event) -> Process:
        """Wait for others in the middle of training."""
        begin = self.sim.now
        yield event
        self.training -= self.sim.now - begin

    def train(self, batch: Sequence[Acted]) -> Process:
        """Learn from a batch, in `layout.steps` optimizer steps."""
        begin, lay = self.sim.now, self.layout
        for acted in batch:
            rows = acted.columns * lay.unroll
            self.lag_sum += rows * (self.steps - acted.version)
            self.lag_rows += rows
            self.lag_max = max(self.lag_max, self.steps - acted.oldest)
            self.learned += rows
        self.due += lay.steps
        while self.due >= 1 - 1e-9:
            self.due -= 1
            yield self.sim.all_of([self.chip.work(x, "train") for x in training(lay, self.costs)])
            yield from self.exchange.step()
            self.steps += 1
        yield from self.exchange.after_rollout()
        self.rollouts += 1
        self.training += self.sim.now - begin
        self.pace()


class SimExchange:
    """A learner's clipping, update and agreement with the others: here, alone."""

    locked = False  # a lock for each chunk of shared weights
    shares_cores = False  # learners take turns if there are more of them than cores

    def __init__(self, learner: SimLearner) -> None:
        self.learner, self.shared, self.layout = learner, learner.shared, learner.layout
        self.costs = learner.costs.exchange

    def step(self) -> Process:
        yield from self.update("solo")

    def after_rollout(self) -> Process:
        yield from ()

    def update(self, kind: str, share: float = 1.0) -> Process:
        yield self.learner.chip.work(self.costs[kind] * share, "exchange")

    def extra(self, kind: str) -> float:
        """Seconds beside those of a lone learner."""
        return max(0.0, self.costs[kind] - self.costs["solo"])

    def count_update(self) -> None:
        """An update of shared weights, after which they are read again."""
        self.learner.stale += self.shared.updates - self.learner.snapshot
        self.shared.updates += 1
        self.learner.snapshot = self.shared.updates


class SimAllReduce(SimExchange):
    def step(self) -> Process:
        yield from self.learner.wait(self.shared.meeting.join())
        yield self.learner.sim.timeout(self.extra("allreduce") * self.shared.scale)
        if self.shared.ring.seconds:
            yield from self.learner.wait(self.learner.sim.timeout(self.shared.ring.seconds))
            if self.learner.rank == 0:
                self.shared.ring.book()
        yield from self.update("solo")


class SimHogwild(SimExchange):
    shares_cores = True

    def step(self) -> Process:
        yield from self.update("hogwild")
        self.count_update()


class SimStore(SimExchange):
    locked = True
    local_steps = 0  # since the last meeting with the store

    def step(self) -> Process:
        self.local_steps += 1
        if self.local_steps < self.layout.local_steps:
            yield from self.update("solo")
            return
        self.local_steps = 0
        locks = self.shared.locks
        todo = list(range(len(locks)))
        while todo:  # every chunk once, the free ones first
            k = next((k for k in todo if not locks[k].users), todo[0])
            todo.remove(k)
            with locks[k].request() as held:
                yield from self.learner.wait(held)
                yield from self.update("store", 1 / len(locks))
        self.count_update()


class SimGossip(SimExchange):
    updates = 0

    def step(self) -> Process:
        yield from self.update("solo")
        self.updates += 1
        if self.layout.mix_every and self.updates % self.layout.mix_every == 0:
            yield from self._mix()

    def after_rollout(self) -> Process:
        if not self.layout.mix_every:
            yield from self._mix()

    def _mix(self) -> Process:
        if self.layout.tau == 0:
            yield from self.learner.wait(self.shared.meeting.join())
            yield from self.learner.wait(self.learner.sim.timeout(self.shared.ring.round_trip))
        yield self.learner.chip.work(self.extra("gossip"), "exchange")
        self.learner.send()


EXCHANGES: dict[str, type[SimExchange]] = {
    "solo": SimExchange,
    "allreduce": SimAllReduce,
    "hogwild": SimHogwild,
    "store": SimStore,
    "gossip": SimGossip,
}
