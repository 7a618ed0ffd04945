"""`coterie bench`: where the time of a run goes, and the highest rate that this machine could reach.

The three rates are measured in short alternating turns, so that drift of the machine affects them alike.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
import torch

from coterie.acting.table import acting_kind
from coterie.algorithms.base import autocast
from coterie.algorithms.table import algorithm_class
from coterie.build.factory import ProcessContext, policy_of
from coterie.build.resources import resolve_config
from coterie.build.validity import check
from coterie.config import Config, ResolvedConfig
from coterie.envs.make import make_envs, make_spec
from coterie.envs.spaces import random_actions
from coterie.envs.tasks import envs_per_child, tasks
from coterie.exchange.table import exchange_kind
from coterie.launch.placement import Placement
from coterie.learner import Gradients
from coterie.learner import learn as train
from coterie.parallel.affinity import available_cores
from coterie.parallel.processes import Child, gather
from coterie.parallel.threads import Team
from coterie.roles.entry import worker_process
from coterie.roles.learner_process import LearnerProcess
from coterie.types import ConfigError, Inputs, Post, Rollout, counted, map_obs

_ROUNDS = 3
Sync = Callable[[], None]  # returns once all learners have come as far


@dataclass
class Turn:
    """A period in which env steps are counted. `ahead`: rollouts that were acted before it; the clock and the count
    start again after the last of them.
    """

    seconds: float
    ahead: int = 0
    steps: int = 0
    ends: list[float] = field(default_factory=lambda: [time.perf_counter()])  # of its rollouts, after its beginning

    @property
    def over(self) -> bool:
        return time.perf_counter() >= self.ends[0] + self.seconds

    @property
    def rate(self) -> float:
        return self.steps / (time.perf_counter() - self.ends[0])

    def count(self, steps: int) -> None:
        self.steps += steps
        self.ends.append(time.perf_counter())
        if self.ahead:
            self.ahead -= 1
            self.steps, self.ends = 0, self.ends[-1:]


class _EnvOnly:
    """The learner's envs in one group on the same threads, stepped with precomputed actions."""

    def __init__(self, learner: LearnerProcess) -> None:
        config, threads = learner.config, learner.resources.env_threads
        env = replace(config.env, delay=0.0)
        self.envs = make_envs(env, config.atari, seed=config.seed, threads=threads, groups=1)
        rng = np.random.default_rng(config.seed)
        self.choose = partial(random_actions, learner.spec.action, rng, config.env.num_envs)
        self.actions = cycle([self.choose() for _ in range(64)])
        self.masked, self.seen = learner.spec.masked, self.envs.recv(0)

    def turn(self, seconds: float) -> float:
        turn = Turn(seconds)
        while not turn.over:
            self.envs.send(0, self.choose(self.seen.obs) if self.masked else next(self.actions))
            self.seen = self.envs.recv(0)
            turn.count(int((~self.seen.is_first).sum()))
        return turn.rate


def bench(asked: Config, seconds: float) -> dict[str, Any]:
    """Rates in env steps/s (env_only, acting, training), their ratios, and what the parts of a step cost. Several
    learners are measured at once, each on its own cores, in common turns; rates are sums over them.
    """
    config = resolve_config(asked)
    if (kind := algorithm_class(config)).has_replay:
        config = replace(config, q=replace(config.q, learn_start=kind.first_rows(config)))  # train at once
    check(config, make_spec(config.env, config.atari))
    if len(tasks(config.env.id)) > 1:
        raise ConfigError("env.id: bench measures one task at a time")
    if config.learners == 1 and not acting_kind(config).apart:
        found = [_measure(LearnerProcess(config), seconds, lambda: None)]
    else:
        found = _measure_children(config, seconds)
    rates = {k: np.sum([one["rates"][k] for one in found], 0) for k in found[0]["rates"]}
    middle = {k: float(np.median(values)) for k, values in rates.items()}
    cores = len(available_cores())
    # The cost of an env step is the time of the cores that make it, for any number of learners.
    parts = {"env": found[0]["env_cores"] * len(found) / middle["env_only"], **found[0]["costs"]}
    ceiling = cores / sum(parts.values())
    stages = {k: float(np.mean([one["stages"].get(k, 0.0) for one in found])) for k in found[0]["stages"]}
    pulled = stages.get("pull", 0.0) if len(found) <= cores else 0.0  # otherwise a wait for a shared core
    return {
        "preset": config.preset,
        "env": config.env.id,
        "torso": config.model.torso,
        "exchange": config.exchange,
        "learners": len(found),
        "cores": cores,
        **middle,
        "acting_over_env_only": float(np.median(rates["acting"] / rates["env_only"])),
        "training_over_env_only": float(np.median(rates["training"] / rates["env_only"])),
        "ceiling": ceiling,
        "training_over_ceiling": middle["training"] / ceiling,
        "frames_per_s": middle["training"] * found[0]["action_repeat"],
        "core_us_per_step": {k: 1e6 * v for k, v in parts.items()},
        "stages": {k: round(v, 3) for k, v in stages.items()},
        "exchange_share": (stages.get("exchange", 0.0) + pulled) / max(sum(stages.values()), 1e-9),
        "gauges": found[0]["gauges"],
        "bottleneck": max(parts, key=lambda k: parts[k]),
        "rates": {k: v.tolist() for k, v in rates.items()},
    }


def _measure(learner: LearnerProcess, seconds: float, sync: Sync) -> dict[str, Any]:
    """One learner's rates in alternating turns; all learners begin each turn together."""
    turn = seconds / (3 * _ROUNDS + 1)
    rates: dict[str, list[float]] = {"env_only": [], "acting": [], "training": []}
    env_only, training = _EnvOnly(learner), Training(learner)
    stages = Counter[str]()
    try:
        with learner.exchange:
            sync()
            env_only.turn(turn / 4)
            sync()
            training.turn(turn / 2)
            for _ in range(_ROUNDS):
                training.rest()
                sync()
                rates["env_only"].append(env_only.turn(turn))
                sync()
                rates["acting"].append(training.turn(turn, learn=False))
                stages.subtract(learner.stages.seconds)
                sync()
                rates["training"].append(training.turn(turn))
                stages.update(learner.stages.seconds)
            sync()
            costs = _costs(learner, training.last) if learner.context.rank == 0 and training.last is not None else {}
            sync()
    finally:
        env_only.envs.close()
        training.close()
    return {
        "rates": rates,
        "costs": costs,
        "stages": dict(stages),
        "gauges": learner.gauges(),
        "env_cores": min(len(available_cores()), learner.resources.env_threads),
        "action_repeat": learner.spec.action_repeat,
    }


def bench_process(post: Post, config: ResolvedConfig, links: ProcessContext, seconds: float) -> None:
    """A child process: one of several learners that are measured together."""
    sync = partial(links.board.meet, links.rank, config.log.stall)
    post("result", _measure(LearnerProcess(config, 0, links), seconds, sync))


def _measure_children(config: ResolvedConfig, seconds: float) -> list[dict[str, Any]]:
    crew = Placement(config, make_spec(config.env, config.atari))
    learners, actors = list[Child](), list[Child]()
    try:
        for rank in range(crew.learners):
            args = (config, crew.links(rank), seconds)
            learners.append(Child(f"coterie-bench-{rank}", crew.places[rank].cores, bench_process, args))
        for row in range(crew.learners, crew.learners + crew.actors):
            links, number, cores = crew.actor(row)
            actors.append(Child(f"coterie-bench-{row}", cores, worker_process, (config, 0, links, number, row)))
        return gather(learners, 2 * seconds + config.log.stall, actors)
    finally:
        for child in (*learners, *actors):
            child.kill()
        crew.close()


class Training:
    """The learner's own loop, paused after each turn; `learn=False` discards its rollouts untrained."""

    def __init__(self, learner: LearnerProcess) -> None:
        self.learner = learner
        self.last: Rollout | None = None
        self.source = learner.acting.rollouts(self._refresh)
        self.news = learner.acting.news
        self.now = Turn(0.0)

    def rest(self) -> int:
        """Wait until nothing acts, because actors have filled all slots."""
        self.now.ahead = self.learner.acting.rest()
        return self.now.ahead

    def _refresh(self) -> None:
        self.learner.stages.start()
        self.learner.exchange.pull(self.learner.params)
        self.learner.stages.lap("pull")
        self.learner.acting.publish(self.learner.progress.learner_steps)

    def turn(self, seconds: float, learn: bool = True) -> float:
        self.now = Turn(seconds, self.now.ahead)
        learner = self.learner
        if learn:
            learner.exchange.agree(False, False)
            train(replace(learner.parts, acting=self, observers=[]), self._over)
        else:
            while not self.now.over:
                self.last = next(self.source)
                if exchange_kind(learner.config).shared_weights:  # others may wait for this learner's core
                    learner.exchange.after_rollout(learner.params)
                self.now.count(int(self.last.mask.sum()))
        return self.now.rate

    def _over(self, rollout: Rollout) -> bool:
        self.now.count(int(rollout.mask.sum()))
        return self.learner.exchange.agree(False, self.now.over)[1]

    def publish(self, version: int) -> None:
        """`source` publishes before each rollout."""

    def counts(self) -> dict[str, int]:
        return {}

    def gauges(self) -> dict[str, float]:
        return {}

    def rollouts(self, refresh: Callable[[], None]) -> Iterator[Rollout]:
        for rollout in self.source:
            self.last = rollout
            yield rollout

    def close(self) -> None:
        self.learner.close()


def _costs(learner: LearnerProcess, rollout: Rollout) -> dict[str, float]:
    """Core-seconds per env step of the acting forward and of training, each alone on one torch thread."""
    config, device = learner.config, learner.resources.device
    group = config.env.num_envs // learner.resources.groups
    width = min(len(rollout.env_id), envs_per_child(config) if acting_kind(config).own_policy else group)
    fields = (rollout.is_first, rollout.prev_action, rollout.prev_reward)
    inputs = Inputs(map_obs(lambda x: x[0, :width], rollout.obs), *(x[0, :width] for x in fields))
    policy, ids, rng = policy_of(learner.algorithm), torch.arange(width, device=device), torch.Generator(device)
    state = learner.model.initial_state(width)
    forward = _best(lambda: policy(learner.actor, inputs, state, ids, rng))
    alone = Gradients(learner.model, learner.params, Team(1), autocast(device, learner.resources.dtype))

    def train_once() -> None:
        for batch in learner.algorithm.batches(learner.model, rollout):
            batch.metrics = alone.compute(learner.algorithm, batch)
            learner.params.grad.zero_()

    once = _best(train_once, clock=time.process_time)  # a value method prepares its next batch meanwhile
    return {"act": forward / width, "train": once / rollout.mask.numel()}


def _best(call: Callable[[], object], seconds: float = 1.0, clock: Callable[[], float] = time.perf_counter) -> float:
    """The time of the fastest of several calls."""
    call()
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        begin = clock()
        call()
        best = min(best, clock() - begin)
    return best


def show(r: dict[str, Any]) -> str:
    """A result as a few lines of text."""
    parts = ", ".join(f"{name} {cost:.0f}" for name, cost in r["core_us_per_step"].items())
    return f"""\
{r["preset"]} on {r["env"]}, {counted(r["learners"], "learner")}, {r["exchange"]}, {r["cores"]} cores; \
env steps/s, median of {_ROUNDS} alternating turns
env only   {r["env_only"]:>10,.0f}
acting     {r["acting"]:>10,.0f}   {r["acting_over_env_only"]:.2f} of env only
training   {r["training"]:>10,.0f}   {r["training_over_env_only"]:.2f} of env only, {r["frames_per_s"]:,.0f} frames/s
ceiling    {r["ceiling"]:>10,.0f}   training reaches {r["training_over_ceiling"]:.2f} of it
exchange   {100 * r["exchange_share"]:.1f}% of a learner's time
core time of an env step, microseconds: {parts}
bottleneck: {r["bottleneck"]}"""
