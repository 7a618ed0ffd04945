"""A discrete-event simulation of a run (simpy), in which processes wait for one another as in acting and exchange.

What it does not know: faults, evaluations, checkpoints, games that end together, a GPU's copies, and how an env's or a
net's cost changes while it learns.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import simpy

from coterie.tools.plan.acting import EnvTimes, Place, SimActing, SimDecoupled, SimInline
from coterie.tools.plan.central import SimCentral
from coterie.tools.plan.costs import Costs, Services
from coterie.tools.plan.des import Cores, Meeting
from coterie.tools.plan.layout import RunLayout
from coterie.tools.plan.learners import EXCHANGES, Shared, SimLearner
from coterie.tools.plan.machines import Messages, Ring, SimMachine, speeds
from coterie.types import CoterieError

ACTINGS: dict[str, type[SimActing]] = {"inline": SimInline, "decoupled": SimDecoupled, "central": SimCentral}
_ENOUGH, _LEAST, _MOST_EVENTS = 300_000, 6, 10_000_000  # rounds and events
_SATURATED = 0.95  # share of a part's time from which it is the bottleneck


@dataclass(frozen=True)
class Result:
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
    counts: dict[str, int]  # rows since the beginning: produced, learned, in_flight

    def to_json(self) -> dict[str, Any]:
        data = asdict(self)
        if math.isinf(data["layout"]["hardware"]["bandwidth"]):  # JSON has no infinity
            data["layout"]["hardware"]["bandwidth"] = None
        return data


class World:
    """One simulated run."""

    def __init__(self, layout: RunLayout, services: Services, seed: int = 0) -> None:
        self.layout, self.services = layout, services
        self.sim = sim = simpy.Environment()
        self.rng = np.random.default_rng(seed)
        self.times = EnvTimes(self.rng, services.env_cv)
        self.events = 0
        h, n = layout.hardware, layout.learners
        self.machines = [SimMachine(sim, layout) for _ in range(h.machines)]
        self.pools = [pool for machine in self.machines for pool in machine.pools.values()]
        self.gpus = [gpu for machine in self.machines for gpu in machine.gpus]
        self.hosts = [Cores(sim, h.host_cores, "host cores") for _ in range(layout.hosts)]
        self.links = [machine.links for machine in self.machines if layout.hosts or h.machines > 1]
        exchange, each = EXCHANGES[layout.exchange], n // h.machines
        # Learners of one machine add up among themselves, and machines among each other.
        scale = ((each - 1) / each + (h.machines - 1) / h.machines) * services.learners / (services.learners - 1)
        locks = [simpy.Resource(sim) for _ in range(layout.chunks if exchange.locked else 0)]
        ring = Ring(h, services, [link for links in self.links for link in links])
        self.shared = Shared(sim, layout, scale, ring, Meeting(sim, n), locks)
        self.beside = beside(layout, services)
        chip_costs = services.accelerator if layout.gpus and services.accelerator is not None else self.beside
        single = [pool for pool in self.pools if pool.count == 1]
        self.slow = dict.fromkeys(map(id, self.pools), 1.0)  # several cores are as fast as they are on average
        self.slow |= dict(zip(map(id, single), speeds(len(single), services.uneven), strict=True))
        self.learners: list[SimLearner] = []
        self.acting: list[SimActing] = []
        for rank in range(n):
            machine = self.machines[rank // each]
            pool, chip = machine.seats[rank % each]
            if exchange.shares_cores and not layout.kind.apart and n > h.cores:
                self.shared.turns.setdefault(id(pool), simpy.Resource(sim))
            pace = partial(self._pace, pool)
            messages = Messages(sim, pool, machine, self.machines, services, self.beside)
            self.learners.append(SimLearner(self.shared, rank, pool, chip, chip_costs, pace, messages.send))
            pace()
        for learner in self.learners:
            places = self._places(learner)
            self.acting.append(ACTINGS[layout.acting](learner, places, services, self.times))

    def _pace(self, pool: Cores) -> None:
        """How slow a core is for a while."""
        cv = self.services.jitter if pool.count == 1 else 0.0
        pool.slow = self.slow[id(pool)] * (float(self.rng.gamma(cv**-2, cv**2)) if cv else 1.0)

    def _places(self, learner: SimLearner) -> list[Place]:
        """Where a learner's producers work."""
        lay = self.layout
        if not lay.hosts:
            return [Place(learner.cores, self.beside)] * max(1, lay.producers)
        far = distant(lay, self.services)
        links = self.machines[learner.rank * len(self.machines) // lay.learners].links
        numbers = [(k * lay.learners + learner.rank) % lay.hosts for k in range(lay.producers)]
        return [Place(self.hosts[i], far, *links) for i in numbers]

    def run(self, rollouts: int) -> None:
        """Run until the learners have learned from so many more rollouts."""
        goal = self.rollouts + rollouts
        while self.rollouts < goal:
            if self.events >= _MOST_EVENTS:
                raise CoterieError(
                    f"plan: {self.layout.name} with {self.layout.envs} envs is too large to be simulated"
                )
            try:
                self.sim.step()
            except simpy.core.EmptySchedule:
                raise CoterieError(f"plan: no process of the layout {self.layout.name} can go on") from None
            self.events += 1

    @property
    def rollouts(self) -> int:
        return sum(x.rollouts for x in self.learners)

    def counts(self) -> dict[str, int]:
        return {
            "produced": sum(x.produced for x in self.learners),
            "learned": sum(x.learned for x in self.learners),
            "in_flight": sum(x.in_flight() for x in self.learners),
        }

    def clocks(self) -> dict[str, float]:
        """Counters, of which the difference between two calls is a rate or a share of the time."""
        found = defaultdict[str, float](float, {"time": self.sim.now, **self.counts()})
        for cores in self.pools + self.gpus + self.hosts:
            cores.advance()
            for part, seconds in cores.busy.items():
                found[f"{cores.name}/{part}"] += seconds
        for k, links in enumerate(self.links):
            for name, link in zip(("network in", "network out"), links, strict=True):
                found[f"{name}/{k}"] = link.busy
        for learner in self.learners:
            found["learner"] += learner.training
            for name in ("lag_sum", "lag_rows", "stale", "steps"):
                found[name] += getattr(learner, name)
        found["inference"] = sum(x.answering for x in self.acting)
        return found


def simulate(layout: RunLayout, services: Services, seed: int = 0) -> Result:
    """Rates, lag and shares over about 1200 rows of each env, or fewer in large layouts, after all of the layout's
    memory has been used once.
    """
    world = World(layout, services, seed)
    # Envs that began together end their unrolls together, and learners that meet go on together: a rate is only right
    # over whole rounds of all of them.
    rounds = max(8, min(60, 1200 // layout.unroll))
    cycle = max(1, math.ceil(layout.envs / (layout.batch * layout.learners))) * layout.learners
    world.run(cycle + (2 * layout.batches + 2) * layout.learners)
    for learner in world.learners:
        learner.lag_max = 0
    before, done = world.clocks(), 0
    while done < rounds and (done < _LEAST or world.events < _ENOUGH):
        world.run(cycle)
        done += 1
    after = world.clocks()
    clocks = defaultdict[str, float](float, {k: after[k] - before.get(k, 0.0) for k in after})
    if not (seconds := clocks["time"]):
        raise CoterieError("plan: nothing in the services costs any time")
    rate = done * cycle * layout.batch * layout.unroll / seconds * services.valid
    frames = rate * services.action_repeat
    busy, parts = _shares(world, clocks)
    return Result(
        layout=layout,
        env_steps_per_s=rate,
        frames_per_s=frames,
        lag_mean=clocks["lag_sum"] / max(1, clocks["lag_rows"]),
        lag_max=max(x.lag_max for x in world.learners),
        stale_mean=clocks["stale"] / max(1, clocks["steps"]),
        busy=busy,
        parts=parts,
        bottleneck=_bottleneck(busy, parts),
        dollars_per_billion_frames=layout.dollars_per_hour / (3600 * frames) * 1e9,
        counts=world.counts(),
    )


def _shares(world: World, clocks: dict[str, float]) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """The busy share of each part of the run; of cores and GPUs also by purpose."""
    seconds, learners = clocks["time"], len(world.learners)
    parts: dict[str, dict[str, float]] = {}
    for name, pools in (("learner cores", world.pools), ("gpu", world.gpus), ("host cores", world.hosts)):
        whole = seconds * sum(x.count for x in pools)
        if whole:
            mine = {k.partition("/")[2]: v / whole for k, v in clocks.items() if k.startswith(name + "/")}
            parts[name] = mine
    busy = {name: sum(mine.values()) for name, mine in parts.items()}
    for name in ("network in", "network out") if world.links else ():
        busy[name] = max(clocks[f"{name}/{k}"] for k in range(len(world.links))) / seconds  # of the fullest
    busy["learner"] = clocks["learner"] / seconds / learners
    if world.layout.kind.hosted:
        busy["inference"] = clocks["inference"] / seconds / learners
    return busy, parts


def _bottleneck(busy: dict[str, float], parts: dict[str, dict[str, float]]) -> str:
    """The limit: cores, GPUs or a link that are full, else a thread that is always busy, else waiting."""
    name = max((k for k in busy if k not in ("learner", "inference")), key=lambda k: busy[k])
    if busy[name] < _SATURATED:
        thread = max((k for k in busy if k in ("learner", "inference")), key=lambda k: busy[k])
        if busy[thread] >= _SATURATED:
            name = thread
        elif busy[name] < _SATURATED - 0.1:
            return f"waiting ({name} {busy[name]:.0%} busy)"
    if name in parts:
        return f"{name}: {max(parts[name], key=lambda k: parts[name][k])}"
    return name


def beside(layout: RunLayout, services: Services) -> Costs:
    """Costs on the learners' machines: those of crowded cores where others work beside a part, and the measured ones of
    threads that share a process.
    """
    costs, threads, kind = _crowded(layout, services), services.threads, layout.kind
    if layout.several:
        costs = replace(costs, train=costs.train.times(threads.train))
    if kind.hosted:
        factor = threads.act if layout.several else 1.0
        return replace(costs, act=costs.act.times(factor), unroll=costs.unroll.times(factor))
    if not kind.apart and layout.several:
        return costs.acting(threads.act)
    return costs.acting(threads.turns) if layout.groups > 1 else costs


def distant(layout: RunLayout, services: Services) -> Costs:
    """Costs on hosts: an actor has a core of its own there."""
    costs = services.crowded if layout.hardware.host_cores > 1 else services.alone
    return costs.acting(services.threads.turns) if layout.kind.own_policy and layout.groups > 1 else costs


def _crowded(layout: RunLayout, services: Services) -> Costs:
    alone, crowded = services.alone, services.crowded
    if layout.hardware.cores == 1:
        return alone
    lone = layout.learners == layout.hardware.machines and layout.train_threads == 1
    if lone and not layout.kind.apart and layout.act_threads == 1:
        act = crowded if layout.groups > 1 else alone
        env = crowded if layout.groups * layout.env_threads > 1 else alone
        return replace(alone, env=replace(env.env, fixed=act.env.fixed), act=act.act, unroll=act.unroll)
    if lone and layout.kind.own_policy and layout.hosts:
        return alone
    return crowded


def ceiling(layout: RunLayout, services: Services) -> float:
    """Env steps/s that the layout cannot exceed: its cores, GPUs and links full all the time."""
    world, h, kind = World(layout, services), layout.hardware, layout.kind
    chip, at_envs = world.learners[0].costs, distant(layout, services) if layout.hosts else world.beside
    envs = layout.width // layout.groups
    if kind.hosted:
        envs = layout.batch_max or layout.width * max(1, layout.producers)
    each = {
        "env": at_envs.env.each,
        "act": (at_envs if kind.own_policy else chip).act(envs) / envs,
        "train": layout.steps
        * (chip.train.each * layout.samples + chip.exchange["solo"])
        / layout.batch
        / layout.unroll,
    }
    on_host = {"env", "act"} if kind.own_policy else {"env"}
    on_gpu = ({"train"} if kind.own_policy else {"train", "act"}) if layout.gpus else set()
    bounds = []
    if layout.hosts:
        bounds.append(layout.hosts * h.host_cores / sum(each[k] for k in on_host))
        if seconds := services.obs_bytes / h.bandwidth:
            bounds.append(h.machines / seconds)
    if layout.gpus:
        bounds.append(len(world.gpus) / sum(each[k] for k in on_gpu))
    if work := sum(each[k] for k in set(each) - on_gpu - (on_host if layout.hosts else set())):
        bounds.append(sum(x.count / world.slow[id(x)] for x in world.pools) / work)
    return min(bounds, default=math.inf) * services.valid
