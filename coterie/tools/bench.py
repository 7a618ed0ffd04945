"""`bench`: where the time of a run goes, and what this machine could do at most.

The three rates are measured in short alternating turns, so that a machine that drifts shifts them alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from coterie.acting.decoupled import Decoupled
from coterie.acting.recorder import Stages
from coterie.acting.table import acting_kind
from coterie.algorithms.table import first_rows, is_value_based
from coterie.build.factory import Links
from coterie.build.resources import resolve_config
from coterie.build.validity import check
from coterie.config import Config, ResolvedConfig
from coterie.envs.make import make_envs, make_spec
from coterie.envs.spaces import random_actions
from coterie.envs.tasks import tasks
from coterie.exchange.table import exchange_kind
from coterie.launch.placement import Placement
from coterie.learner import Gradients, autocast
from coterie.learner import learn as train
from coterie.parallel.affinity import available_cores
from coterie.parallel.processes import Child, Post, gather
from coterie.parallel.threads import Team
from coterie.roles.entry import actor_process
from coterie.roles.learner import Learner
from coterie.types import ConfigError, Inputs, Rollout

_ROUNDS = 3


class _EnvOnly:
    """The same envs in one group on the same threads, stepped with actions drawn beforehand."""

    def __init__(self, learner: Learner) -> None:
        config = learner.config
        threads = learner.layout.env_threads
        env = replace(config.env, reset="in_place", delay=0.0)
        self.envs = make_envs(env, config.atari, seed=config.seed, threads=threads, groups=1)
        rng = np.random.default_rng(config.seed)
        self.actions = [random_actions(learner.spec.action, rng, config.env.num_envs) for _ in range(64)]
        self.envs.recv(0)
        self.n = 0

    def turn(self, seconds: float) -> float:
        begin, steps = time.perf_counter(), 0
        while (elapsed := time.perf_counter() - begin) < seconds:
            self.envs.send(0, self.actions[self.n % 64])
            ts = self.envs.recv(0)
            steps += int((~ts.is_first).sum())
            self.n += 1
        return steps / elapsed


Sync = Callable[[], None]  # returns once all learners have come as far


def bench(asked: Config, seconds: float) -> dict[str, Any]:
    """Rates in env steps/s (see DESIGN names): env_only, acting, training, their ratios, and the parts of a step.

    Several learners are measured at once, each on its own cores, turn by turn together; rates are sums over them.
    """
    config = resolve_config(asked)
    if is_value_based(config):
        config = replace(config, q=replace(config.q, learn_start=first_rows(config)))  # it is to train at once
    check(config, make_spec(config.env, config.atari))
    if len(tasks(config.env.id)) > 1:
        raise ConfigError("env.id: bench measures one task at a time")
    if config.learners == 1 and not acting_kind(config).apart:
        found = [_measure(Learner(config), seconds, lambda: None)]
    else:
        found = _measure_children(config, seconds)
    rates = {k: np.sum([one["rates"][k] for one in found], 0) for k in found[0]["rates"]}
    env, acting, train = (float(np.median(rates[k])) for k in ("env_only", "acting", "training"))
    cores = len(available_cores())
    # One step of the env costs what it takes the cores that step it, whatever the number of learners.
    parts = {"env": found[0]["env_cores"] * len(found) / env, **found[0]["costs"]}
    ceiling = cores / sum(parts.values())
    stages = {k: float(np.mean([one["stages"].get(k, 0.0) for one in found])) for k in found[0]["stages"]}
    pulled = stages.get("pull", 0.0) if config.learners <= cores else 0.0  # or else it is the wait for a shared core
    return {
        "preset": config.preset,
        "env": config.env.id,
        "torso": config.model.torso,
        "exchange": config.exchange,
        "learners": config.learners,
        "cores": cores,
        "env_only": env,
        "acting": acting,
        "training": train,
        "acting_over_env_only": float(np.median(rates["acting"] / rates["env_only"])),
        "training_over_env_only": float(np.median(rates["training"] / rates["env_only"])),
        "ceiling": ceiling,
        "training_over_ceiling": train / ceiling,
        "frames_per_s": train * found[0]["action_repeat"],
        "core_us_per_step": {k: 1e6 * v for k, v in parts.items()},
        "stages": {k: round(v, 3) for k, v in stages.items()},
        "exchange_share": (stages.get("exchange", 0.0) + pulled) / max(sum(stages.values()), 1e-9),
        "gauges": found[0]["gauges"],
        "bottleneck": max(parts, key=lambda k: parts[k]),
        "rates": {k: v.tolist() for k, v in rates.items()},
    }


def _measure(learner: Learner, seconds: float, sync: Sync) -> dict[str, Any]:
    """One learner's rates in alternating turns; all learners begin each turn together."""
    turn = seconds / (3 * _ROUNDS + 1)
    rates: dict[str, list[float]] = {"env_only": [], "acting": [], "training": []}
    env_only = _EnvOnly(learner)
    training = Training(learner)
    stages = Stages()
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
                before = dict(learner.stages.seconds)
                sync()
                rates["training"].append(training.turn(turn))
                for name, value in learner.stages.seconds.items():
                    stages.seconds[name] += value - before.get(name, 0.0)
            sync()
            costs = _costs(learner, training.last) if learner.links.rank == 0 else {}
            sync()
    finally:
        env_only.envs.close()
        training.close()
    return {
        "rates": rates,
        "costs": costs,
        "stages": dict(stages.seconds),
        "gauges": learner.gauges(),
        "env_cores": min(len(available_cores()), learner.layout.env_threads),
        "action_repeat": learner.spec.action_repeat,
    }


def bench_process(post: Post, config: ResolvedConfig, links: Links, seconds: float) -> None:
    """A child: one learner of several that are measured together."""
    sync = partial(links.board.meet, links.rank, config.log.stall)
    post("result", _measure(Learner(config, 0, links), seconds, sync))


def _measure_children(config: ResolvedConfig, seconds: float) -> list[dict[str, Any]]:
    crew = Placement(config, make_spec(config.env, config.atari))
    learners, actors = list[Child](), list[Child]()
    try:
        for rank in range(crew.learners):
            args = (config, crew.links(rank), seconds)
            learners.append(Child(f"coterie-bench-{rank}", crew.places[rank].cores, bench_process, args))
        for row in range(crew.learners, crew.learners + crew.actors):
            links, number, cores = crew.actor(row)
            actors.append(Child(f"coterie-bench-{row}", cores, actor_process, (config, 0, links, number, row)))
        return gather(learners, 2 * seconds + config.log.stall, actors)
    finally:
        for child in (*learners, *actors):
            child.kill()
        crew.close()


class Training:
    """The learner's own loop, held after each turn; `learn=False` throws its rollouts away untrained."""

    def __init__(self, learner: Learner) -> None:
        self.learner = learner
        self.last: Rollout | None = None
        self.source = learner.acting.rollouts(self._refresh)
        self.steps, self.begin, self.end = 0, 0.0, 0.0
        self.made = 0  # rollouts to come that were acted before the turn
        self.ends: list[float] = []  # of the turn's rollouts, after its beginning

    def rest(self) -> int:
        """Wait until nothing acts: actors have filled all slots."""
        self.made = self.learner.acting.rest()
        return self.made

    def _refresh(self) -> None:
        begin = time.perf_counter()
        self.learner.exchange.pull(self.learner.params)
        self.learner.stages.add("pull", begin)
        self.learner.acting.publish(self.learner.progress.learner_steps)

    def turn(self, seconds: float, learn: bool = True) -> float:
        self.begin, self.steps = time.perf_counter(), 0
        self.seconds, self.end, self.ends = seconds, self.begin + seconds, [self.begin]
        learner = self.learner
        if learn:
            learner.exchange.agree(False, False)
            train(replace(learner.parts, acting=self, observers=[]), self._over)
        else:
            while time.perf_counter() < self.end:
                self.last = next(self.source)
                if exchange_kind(learner.config).shared_weights:  # others may wait for this learner's core
                    learner.exchange.after_rollout(learner.params)
                self._count(self.last)
        return self.steps / (time.perf_counter() - self.begin)

    def _count(self, rollout: Rollout) -> None:
        """The turn begins anew once what was acted before it is used up."""
        self.steps += int(rollout.mask.sum())
        self.ends.append(time.perf_counter())
        if self.made:
            self.made -= 1
            self.begin, self.steps = time.perf_counter(), 0
            self.end, self.ends = self.begin + self.seconds, [self.begin]

    def _over(self, rollout: Rollout) -> bool:
        self._count(rollout)
        return self.learner.exchange.agree(False, time.perf_counter() >= self.end)[1]

    def publish(self, version: int) -> None:
        """`source` publishes before each rollout."""

    def counts(self) -> dict[str, int]:
        return {}

    def failures(self) -> list[str]:
        return []

    def gauges(self) -> dict[str, float]:
        return {}

    def rollouts(self, refresh: Callable[[], None]) -> Iterator[Rollout]:
        for rollout in self.source:
            self.last = rollout
            yield rollout

    def close(self) -> None:
        self.learner.close()


def _costs(learner: Learner, rollout: Rollout | None) -> dict[str, float]:
    """Core-seconds for one env step of the acting forward and of training, each alone on one torch thread."""
    assert rollout is not None
    if isinstance(learner.acting, Decoupled):
        width = learner.acting.slots.width
    else:
        width = min(learner.config.env.num_envs // learner.layout.groups, len(rollout.env_id))
    seen = (
        {k: x[0, :width] for k, x in rollout.obs.items()} if isinstance(rollout.obs, dict) else rollout.obs[0, :width]
    )
    inputs = Inputs(seen, *(x[0, :width] for x in (rollout.is_first, rollout.prev_action, rollout.prev_reward)))
    rng, state = torch.Generator(learner.layout.device), learner.model.initial_state(width)
    forward = _best(
        lambda: learner.algorithm.act(
            learner.actor, inputs, state, torch.ones(width, device=learner.layout.device), rng
        )
    )
    cast = autocast(learner.layout.device, learner.layout.dtype)
    alone = Gradients(learner.model, learner.params, Team(1), cast)

    def train_once() -> None:
        for batch in learner.algorithm.batches(learner.model, rollout):
            batch.metrics = alone.compute(learner.algorithm, batch)
            learner.params.grad.zero_()

    once = _best(train_once, clock=time.process_time)  # a value method's next batch is judged meanwhile
    return {"act": forward / len(inputs.is_first), "train": once / rollout.mask.numel()}


def _best(call: Any, seconds: float = 1.0, clock: Any = time.perf_counter) -> float:
    """The fastest of several calls."""
    call()
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        begin = clock()
        call()
        best = min(best, clock() - begin)
    return best


def show(result: dict[str, Any]) -> str:
    """The result as a few lines."""
    r = result
    parts = ", ".join(f"{k} {v:.0f}" for k, v in r["core_us_per_step"].items())
    return "\n".join(
        [
            f"{r['preset']} on {r['env']}, {r['learners']} learner(s), {r['exchange']}, {r['cores']} cores; "
            f"env steps/s, median of {_ROUNDS} alternating turns",
            f"env only   {r['env_only']:>10,.0f}",
            f"acting     {r['acting']:>10,.0f}   {r['acting_over_env_only']:.2f} of env only",
            f"training   {r['training']:>10,.0f}   {r['training_over_env_only']:.2f} of env only, "
            f"{r['frames_per_s']:,.0f} frames/s",
            f"ceiling    {r['ceiling']:>10,.0f}   training reaches {r['training_over_ceiling']:.2f} of it",
            f"exchange   {100 * r['exchange_share']:.1f}% of a learner's time",
            f"one step costs (core microseconds): {parts}",
            f"bottleneck: {r['bottleneck']}",
        ]
    )
