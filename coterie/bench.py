"""`bench`: where the time of a run goes, and what this machine could do at most.

The three rates are measured in short alternating turns, so that a machine that drifts shifts them alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from coterie.actor import Stages
from coterie.config import Config
from coterie.envs.make import make_envs
from coterie.envs.spaces import random_actions
from coterie.learner import Gradients, LearnSettings, autocast
from coterie.learner import learn as train
from coterie.parallel.affinity import available_cores
from coterie.parallel.threads import Team
from coterie.roles import InlineLearner
from coterie.types import Rollout

_ROUNDS = 3


class _EnvOnly:
    """The same envs in one group on the same threads, stepped with actions drawn beforehand."""

    def __init__(self, learner: InlineLearner) -> None:
        config = learner.config
        threads = learner.layout.env_threads
        env = replace(config.env, reset="in_place")
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


def bench(config: Config, seconds: float) -> dict[str, Any]:
    """Rates in env steps/s (see DESIGN names): env_only, acting, training, their ratios, and the parts of a step."""
    learner = InlineLearner(config)
    turn = seconds / (3 * _ROUNDS + 1)
    rates: dict[str, list[float]] = {"env_only": [], "acting": [], "training": []}
    env_only = _EnvOnly(learner)
    training = _Training(learner)
    try:
        env_only.turn(turn / 4)
        training.turn(turn / 2)
        stages = Stages()
        for _ in range(_ROUNDS):
            rates["env_only"].append(env_only.turn(turn))
            rates["acting"].append(training.turn(turn, learn=False))
            before = dict(learner.stages.seconds)
            rates["training"].append(training.turn(turn))
            for name, value in learner.stages.seconds.items():
                stages.seconds[name] += value - before.get(name, 0.0)
        costs = _costs(learner, training.last)
    finally:
        env_only.envs.close()
        training.close()
    env, acting, train = (float(np.median(rates[k])) for k in ("env_only", "acting", "training"))
    cores = len(available_cores())
    env_cost = min(cores, learner.layout.env_threads) / env
    parts = {"env": env_cost, **costs}
    ceiling = cores / sum(parts.values())
    return {
        "preset": config.preset,
        "env": config.env.id,
        "torso": config.model.torso,
        "cores": cores,
        "env_only": env,
        "acting": acting,
        "training": train,
        "acting_over_env_only": float(np.median(np.divide(rates["acting"], rates["env_only"]))),
        "training_over_env_only": float(np.median(np.divide(rates["training"], rates["env_only"]))),
        "ceiling": ceiling,
        "training_over_ceiling": train / ceiling,
        "frames_per_s": train * learner.spec.action_repeat,
        "core_us_per_step": {k: 1e6 * v for k, v in parts.items()},
        "stages": {k: round(v, 3) for k, v in stages.seconds.items()},
        "bottleneck": max(parts, key=lambda k: parts[k]),
        "rates": rates,
    }


class _Training:
    """The learner's own loop, held after each turn; `learn=False` throws its rollouts away untrained."""

    def __init__(self, learner: InlineLearner) -> None:
        self.learner = learner
        self.last: Rollout | None = None
        self.source = learner.acting.rollouts(lambda: learner.acting.publish(learner.progress.learner_steps))
        self.settings = LearnSettings(learner.lr, learner.stages, lambda rollout: True)

    def turn(self, seconds: float, learn: bool = True) -> float:
        begin, steps = time.perf_counter(), 0
        while (elapsed := time.perf_counter() - begin) < seconds:
            if learn:
                train(
                    self.learner.model,
                    self.learner.params,
                    self.learner.algorithm,
                    self,
                    self.learner.exchange,
                    self.learner.gradients,
                    self.learner.progress,
                    self.settings,
                )
            else:
                self.last = next(self.source)
            assert self.last is not None
            steps += int(self.last.mask.sum())
        return steps / elapsed

    def publish(self, version: int) -> None:
        """`learn` asks for it; `source` publishes before each rollout itself."""

    def rollouts(self, refresh: Callable[[], None]) -> Iterator[Rollout]:
        for rollout in self.source:
            self.last = rollout
            yield rollout

    def close(self) -> None:
        self.learner.close()


def _costs(learner: InlineLearner, rollout: Rollout | None) -> dict[str, float]:
    """Core-seconds for one env step of the acting forward and of training, each alone on one torch thread."""
    assert rollout is not None
    inputs = learner.acting.recorder.inputs(0, 0)
    with torch.inference_mode():
        forward = _best(lambda: learner.acting.policy(0, inputs, learner.acting.states[0]))
    cast = autocast(learner.layout.device, learner.layout.dtype)
    alone = Gradients(learner.model, learner.params, Team(1), cast)

    def train_once() -> None:
        for batch in learner.algorithm.batches(learner.model, rollout):
            batch.metrics = alone.compute(learner.algorithm, batch)
            learner.params.grad.zero_()

    once = _best(train_once)
    return {"act": forward / len(inputs.is_first), "train": once / rollout.mask.numel()}


def _best(call: Any, seconds: float = 1.0) -> float:
    """The fastest of several calls."""
    call()
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        begin = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - begin)
    return best


def show(result: dict[str, Any]) -> str:
    """The result as a few lines."""
    r = result
    parts = ", ".join(f"{k} {v:.0f}" for k, v in r["core_us_per_step"].items())
    return "\n".join(
        [
            f"{r['preset']} on {r['env']}, {r['cores']} cores; env steps/s, median of {_ROUNDS} alternating turns",
            f"env only   {r['env_only']:>10,.0f}",
            f"acting     {r['acting']:>10,.0f}   {r['acting_over_env_only']:.2f} of env only",
            f"training   {r['training']:>10,.0f}   {r['training_over_env_only']:.2f} of env only, "
            f"{r['frames_per_s']:,.0f} frames/s",
            f"ceiling    {r['ceiling']:>10,.0f}   training reaches {r['training_over_ceiling']:.2f} of it",
            f"one step costs (core microseconds): {parts}",
            f"bottleneck: {r['bottleneck']}",
        ]
    )
