"""A discrete-event simulation of a run (simpy), in which processes wait for one another as in acting and exchange.

It leaves out faults, evaluations, checkpoints, a GPU's copies, differences between cores, contention between threads of
one process, their shares of an update, and how an env's or a net's cost changes while it learns.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import numpy as np
import simpy

from coterie.acting.table import ACTING
from coterie.errors import ConfigError, CoterieError
from coterie.exchange.table import EXCHANGES
from coterie.plugins import named
from coterie.tools.plan.acting import ProducerLocation, SimActing
from coterie.tools.plan.des import Cores
from coterie.tools.plan.layout import RunLayout
from coterie.tools.plan.learners import Shared, SimLearner
from coterie.tools.plan.services import Services

_ENOUGH, _LEAST, _MOST_EVENTS = 300_000, 6, 10_000_000  # rounds and events
_SATURATED = 0.95  # share of a part's time from which it is the bottleneck


@dataclass(frozen=True)
class Prediction:
    """The prediction for a layout."""

    layout: RunLayout
    env_steps_per_s: float
    frames_per_s: float
    lag_mean: float  # learner steps
    lag_max: int
    stale_mean: float  # hogwild, store: updates of others between a snapshot and the update made with it
    busy: dict[str, float]  # share of each part that is used
    parts: dict[str, dict[str, float]]  # of cores and GPUs: share of their time by what is done
    bottleneck: str
    dollars_per_billion_frames: float

    def to_json(self) -> dict[str, Any]:
        data = asdict(self)
        del data["layout"]["config"]
        if math.isinf(data["layout"]["hardware"]["bandwidth"]):  # JSON has no infinity
            data["layout"]["hardware"]["bandwidth"] = None
        return data


class World(Shared):
    """One simulated run."""

    def __init__(self, layout: RunLayout, services: Services, seed: int = 0) -> None:
        super().__init__(layout, services)
        self.events, self.began = 0, 0.0
        h, rng = layout.hardware, np.random.default_rng(seed)
        hosts = [Cores(self.sim, h.host_cores) for _ in range(layout.hosts)]
        gpus = [gpu for machine in self.machines for gpu in machine.gpus]
        self.pools = {"learner cores": [machine.cores for machine in self.machines], "gpu": gpus, "host cores": hosts}
        self.learners = [SimLearner(self, rank) for rank in range(layout.learners)]
        self.acting = list[SimActing]()
        make = named("acting", layout.kind.simulation)
        for learner in self.learners:
            machine = learner.machine
            places = [ProducerLocation(machine.cores)] * max(1, layout.producers)
            if hosts:
                numbers = [(k * layout.learners + learner.rank) % layout.hosts for k in range(layout.producers)]
                places = [ProducerLocation(hosts[i], machine.inward, machine.outward) for i in numbers]
            self.acting.append(make(learner, places, rng))

    def run(self, rollouts: int) -> None:
        """Run until the learners have learned from another `rollouts` batches."""
        goal = self.rollouts + rollouts
        while self.rollouts < goal:
            if self.events >= _MOST_EVENTS:
                raise CoterieError(f"plan: {self.layout.name} with {self.layout.envs} envs is too large to simulate")
            try:
                self.sim.step()
            except simpy.core.EmptySchedule:
                raise CoterieError(f"plan: no process of the layout {self.layout.name} can go on") from None
            self.events += 1

    @property
    def rollouts(self) -> int:
        return sum(x.rollouts for x in self.learners)

    def reset(self) -> None:
        """Measure from here on."""
        self.began = self.sim.now
        for pool in chain(*self.pools.values()):
            pool.busy.clear()
        for machine in self.machines:
            machine.inward.busy = machine.outward.busy = 0.0
        for learner in self.learners:
            learner.reset()
        for acting in self.acting:
            acting.answering = 0.0

    def shares(self) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
        """The busy share of each part of the run; of cores and GPUs also by purpose."""
        seconds, learners = self.sim.now - self.began, len(self.learners)
        parts: dict[str, dict[str, float]] = {}
        for name, pools in self.pools.items():
            whole = seconds * sum(pool.count for pool in pools)
            used = sorted({part for pool in pools for part in pool.busy})
            if pools:
                parts[name] = {part: sum(pool.busy[part] for pool in pools) / whole for part in used}
        busy = {name: min(1.0, sum(mine.values())) for name, mine in parts.items()}  # a job counts when it ends
        if self.layout.hosts or len(self.machines) > 1:  # of the fullest link
            busy["network in"] = max(machine.inward.busy for machine in self.machines) / seconds
            busy["network out"] = max(machine.outward.busy for machine in self.machines) / seconds
        busy["learner"] = sum(x.training for x in self.learners) / seconds / learners
        if self.layout.kind.hosted:
            busy["inference"] = sum(x.answering for x in self.acting) / seconds / learners
        return busy, parts


def is_simulated(acting: str, exchange: str) -> bool:
    """Whether both have a simulation. A registered one need not."""
    return bool(ACTING[acting].simulation and EXCHANGES[exchange].simulation)


def simulate(layout: RunLayout, services: Services, seed: int = 0) -> Prediction:
    """Rates, lag and shares over about 1200 rows of each env, or fewer in large layouts, after the layout's whole
    memory has been used once.
    """
    if layout.exchange not in (costs := services.chip(layout.gpus > 0).exchange):
        raise ConfigError(f"the services have no cost of exchange {layout.exchange}, only of {', '.join(costs)}")
    world = World(layout, services, seed)
    # Envs that began together end their unrolls together, and learners that meet go on together: a rate is only right
    # over whole rounds of all of them.
    rounds = max(8, min(60, 1200 // layout.unroll))
    cycle = max(1, math.ceil(layout.envs / (layout.batch * layout.learners))) * layout.learners
    world.run(cycle + (2 * layout.batches + 2) * layout.learners)
    world.reset()
    done = 0
    while done < rounds and (done < _LEAST or world.events < _ENOUGH):
        world.run(cycle)
        done += 1
    if not (seconds := world.sim.now - world.began):
        raise CoterieError("plan: nothing in the services costs any time")
    rate = done * cycle * layout.batch * layout.unroll / seconds * services.valid
    frames = rate * services.action_repeat
    busy, parts = world.shares()
    learners = world.learners
    return Prediction(
        layout=layout,
        env_steps_per_s=rate,
        frames_per_s=frames,
        lag_mean=sum(x.lag_sum for x in learners) / max(1, sum(x.lag_rollouts for x in learners)),
        lag_max=max(x.lag_max for x in learners),
        stale_mean=sum(x.stale for x in learners) / max(1, sum(x.updates for x in learners)),
        busy=busy,
        parts=parts,
        bottleneck=_bottleneck(busy, parts),
        dollars_per_billion_frames=layout.dollars_per_hour / (3600 * frames) * 1e9,
    )


def _bottleneck(busy: dict[str, float], parts: dict[str, dict[str, float]]) -> str:
    """The limit: cores, GPUs or a link that are full, else a thread that is always busy, else waiting."""
    threads = [k for k in busy if k in ("learner", "inference")]
    name = max((k for k in busy if k not in threads), key=lambda k: busy[k])
    if busy[name] < _SATURATED:
        thread = max(threads, key=lambda k: busy[k])
        if busy[thread] >= _SATURATED:
            name = thread
        elif busy[name] < _SATURATED - 0.1:
            return f"waiting ({name} {busy[name]:.0%} busy)"
    if name in parts:
        return f"{name}: {max(parts[name], key=lambda k: parts[name][k])}"
    return name
