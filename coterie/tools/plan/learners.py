"""The simulated learner: what it trains on, and how it agrees with the others (exchange/*.py, in seconds)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import simpy

from coterie.algorithms.base import slices
from coterie.tools.plan.costs import Costs
from coterie.tools.plan.des import Bell, Cores, Meeting, Process
from coterie.tools.plan.layout import Layout
from coterie.tools.plan.machines import Across


@dataclass(frozen=True)
class Acted:
    """Columns that were acted, and by which weights: learner steps, weighed by rows, and the oldest."""

    columns: int
    version: float
    oldest: int


def training(layout: Layout, costs: Costs) -> list[float]:
    """Core-seconds of an optimizer step's forward and backward, of each thread that has some of it."""
    ways = layout.train_threads
    sizes = [at.stop - at.start for at in slices(round(layout.samples), layout.chunk, ways)]
    return [sum(map(costs.train, sizes[k::ways])) for k in range(min(ways, len(sizes)))]


@dataclass
class Room:
    """What the learners share."""

    sim: simpy.Environment
    layout: Layout
    scale: float  # of an all-reduce's time, beside the one that was measured
    across: Across  # what it takes besides between machines
    meeting: Meeting
    locks: list[simpy.Resource]  # of a store's chunks
    turns: dict[int, simpy.Resource] = field(default_factory=dict)  # hogwild: of a core that several share
    updates: int = 0  # of shared weights, by all


class Learner:
    """Learner `rank`. `chip`: where it acts and trains, at `costs`; `cores`: its machine's. `pace`: how slow those are
    changes, at each rollout. `tell`: a mix's message to other machines.
    """

    def __init__(
        self, room: Room, rank: int, cores: Cores, chip: Cores, costs: Costs, pace: Callable[[], None],
        tell: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        self.room, self.rank, self.cores, self.chip, self.costs = room, rank, cores, chip, costs
        self.pace, self.tell = pace, tell
        self.sim, self.layout = room.sim, room.layout
        self.steps = self.rollouts = self.learned = self.produced = 0
        self.due = 0.0
        self.since = 0  # steps since the last mix, or meeting with a store
        self.published = 0
        self.news, self.filled = Bell(room.sim), Bell(room.sim)  # for who acts: weights and room; a slot is full
        self.lag_sum, self.lag_max, self.lag_rows = 0.0, 0, 0
        self.stale, self.snapshot = 0, 0  # updates of others between a snapshot and the update made with it
        self.training = 0.0  # seconds of training and agreeing, without the waits for others
        self.in_flight: Callable[[], int] = lambda: 0  # rows acted that nobody has learned from

    def act(self, envs: int, beside: float = 0.0) -> Process:
        """A forward of so many; the calling thread has something else to do `beside` it, on a core."""
        if self.chip is not self.cores:
            yield self.cores.work(beside, "act")
            beside = 0.0
        yield self.chip.work(self.costs.act(envs) + beside, "act")

    def _wait(self, event: simpy.Event) -> Process:
        """For others, in the middle of training."""
        begin = self.sim.now
        yield event
        self.training -= self.sim.now - begin

    def train(self, batch: Sequence[Acted]) -> Process:
        """Learn from a batch, in as many optimizer steps as it is worth."""
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
            yield from self._backward()
            yield from self._agree()
            self.steps += 1
        if lay.exchange == "gossip" and lay.mix_every == 0:
            yield from self._mix()
        self.rollouts += 1
        self.training += self.sim.now - begin
        self.pace()

    def _backward(self) -> Process:
        yield self.sim.all_of([self.chip.work(x, "train") for x in training(self.layout, self.costs)])

    def _agree(self) -> Process:
        """A learner step's update."""
        lay, room, costs = self.layout, self.room, self.costs.exchange
        own = costs["solo"]
        if lay.exchange == "allreduce":
            yield from self._wait(room.meeting.join())
            yield self.sim.timeout(max(0.0, costs["allreduce"] - own) * room.scale)
            if room.across.seconds:
                yield from self._wait(self.sim.timeout(room.across.seconds))
                if self.rank == 0:
                    room.across.book()
            yield self.chip.work(own, "exchange")
        elif lay.exchange == "hogwild":
            yield self.chip.work(costs["hogwild"], "exchange")
            self._counted()
        elif lay.exchange == "store":
            self.since += 1
            if self.since < lay.local_steps:
                yield self.chip.work(own, "exchange")
            else:
                self.since = 0
                yield from self._meet()
        else:
            yield self.chip.work(own, "exchange")
            self.since += 1
            if lay.exchange == "gossip" and lay.mix_every and self.since % lay.mix_every == 0:
                yield from self._mix()

    def _meet(self) -> Process:
        """Every chunk of the store once, whichever is free first."""
        locks = self.room.locks
        todo = list(range(len(locks)))
        while todo:
            k = next((k for k in todo if not locks[k].users), todo[0])
            todo.remove(k)
            with locks[k].request() as mine:
                yield from self._wait(mine)
                yield self.chip.work(self.costs.exchange["store"] / len(locks), "exchange")
        self._counted()

    def _mix(self) -> Process:
        if self.layout.tau == 0:
            yield from self._wait(self.room.meeting.join())
            yield from self._wait(self.sim.timeout(self.room.across.one))
        yield self.chip.work(max(0.0, self.costs.exchange["gossip"] - self.costs.exchange["solo"]), "exchange")
        if self.tell is not None:
            self.tell()

    def _counted(self) -> None:
        self.stale += self.room.updates - self.snapshot
        self.room.updates += 1
        self.snapshot = self.room.updates
