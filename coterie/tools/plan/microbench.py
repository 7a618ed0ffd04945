"""Run by the measuring processes: short turns of the learner's own loop, exchanges, env steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from coterie.build.factory import ProcessContext, exchange_setup, normalizers
from coterie.config import ResolvedConfig
from coterie.envs.make import make_envs
from coterie.envs.spaces import random_actions
from coterie.exchange.table import exchange_kind
from coterie.roles.learner_process import LearnerProcess
from coterie.tools.bench.turns import ProcessorClock, Training
from coterie.types import Post, Spec

_ROUNDS = 3
_STEPS = 20  # of each exchange
_TURNS = 2 * _ROUNDS + 2  # that the time is for
_WAITING = 0.5  # of an env's step
PATIENCE_S = 600.0

Turn = dict[str, float]  # seconds of each part, and what was done in them


def measure_process(
    post: Post, configs: list[ResolvedConfig], links: ProcessContext, others: dict[str, ProcessContext], seconds: float
) -> None:
    """In a child process with one core: turns beside the others; in the first also what needs no others."""
    rank, sync = links.rank, partial(links.board.meet, links.rank, PATIENCE_S)
    turn = seconds / _TURNS
    loops = [Training(LearnerProcess(c)) for c in configs]
    try:
        turns = _turns(loops, turn, sync)
        learner, every = loops[-1].learner, {"solo": ProcessContext(), **others}
        found: dict[str, Any] = {
            "turns": turns,
            "exchange": {kind: _exchange(learner, kind, mine, sync) for kind, mine in every.items()},
        }
        sync()
        if rank == 0:
            found |= _one_env(configs[1], learner.spec, turn / 2) | {
                "weight_bytes": 4.0 * len(learner.params.data),
                "gpu": _gpu(configs, turn) if torch.cuda.is_available() else None,
            }
        sync()
    finally:
        for loop in loops:
            loop.close()
    post("result", found)


def _turns(loops: list[Training], seconds: float, sync: Callable[[], None]) -> list[Turn]:
    """What a turn of each loop takes, once they have trained: value learning fills its replay first."""
    end = time.monotonic() + PATIENCE_S
    for loop in loops:
        while loop.learner.progress.learner_steps < 2 and time.monotonic() < end:
            loop.turn(seconds / 4)
    found: list[list[Turn]] = [[] for _ in loops]
    for _ in range(_ROUNDS):
        for loop, turns in zip(loops, found, strict=True):
            sync()
            turns.append(_turn(loop, seconds))
    return [merge(turns) for turns in found]


def _turn(loop: Training, seconds: float) -> Turn:
    """Run some rollouts of the learner's loop; returns seconds of an env step and forward, of the rest of an unroll, of
    an optimizer step and of its exchange.
    """
    learner = loop.learner
    done, stages = learner.progress, learner.stages.seconds

    def read() -> dict[str, float]:
        counts = {"rows": done.env_steps + done.masked, "valid": done.env_steps}
        counts |= {"steps": done.learner_steps, "samples": done.samples_trained}
        return {**counts, **stages, "wall": time.perf_counter()}

    before = read()
    loop.turn(seconds)
    d = {k: v - before.get(k, 0) for k, v in read().items()}
    groups, steps = d["rows"] / learner.config.env.num_envs, max(1, d["steps"])
    booked = sum(d.get(k, 0.0) for k in ("env", "act", "train", "exchange", "pull"))
    return {
        "env": d["env"] / groups,
        "act": d["act"] / groups,
        "unroll": max(0.0, d["wall"] - booked) / groups * learner.config.algo.unroll_length,
        "train": d["train"] / steps,
        "exchange": d["exchange"] / steps,
        "samples": d["samples"] / steps,
        "valid": d["valid"] / d["rows"],
    }


def _exchange(learner: LearnerProcess, kind: str, links: ProcessContext, sync: Callable[[], None]) -> list[float]:
    """Seconds of some learner steps' agreement and update, while the other processes make as many."""
    config = replace(learner.config, exchange=kind, learners=links.learners)
    exchange = exchange_kind(config).connect(
        exchange_setup(config, learner.params, normalizers(config, learner.model), links)
    )
    took = list[float]()
    with exchange:
        sync()
        for _ in range(_STEPS):
            learner.params.grad.fill_(1e-3)
            begin = time.perf_counter()
            exchange.pull(learner.params)
            exchange.step(learner.params, 0.0)
            took.append(time.perf_counter() - begin)
            exchange.after_rollout(learner.params)  # which a run does once for any number of steps
        sync()
    return took


def _one_env(config: ResolvedConfig, spec: Spec, seconds: float) -> dict[str, float]:
    """Standard deviation of one env's step in seconds, without the slowest hundredth: interruptions by others. And the
    share of it in which no core works, where that is most of it: else it is what messages between processes take.
    """
    rng, agents = np.random.default_rng(0), spec.agents
    envs = make_envs(replace(config.env, num_envs=agents, decorrelate=0), config.atari, seed=1)
    took = list[float]()
    try:
        seen, clock = envs.recv(0), ProcessorClock()
        before = clock.seconds()
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(took) < 20:
            action = random_actions(spec.action, rng, agents, seen.obs)
            begin = time.perf_counter()
            envs.send(0, action)
            seen = envs.recv(0)
            took.append(time.perf_counter() - begin)
        used = clock.seconds() - before
    finally:
        envs.close()
    waits = 1 - used / sum(took)
    usual = np.sort(took)[: max(2, len(took) * 99 // 100)]
    return {"deviation": float(np.std(usual)), "waits": waits if waits > _WAITING else 0.0}


def _gpu(configs: list[ResolvedConfig], turn: float) -> list[Turn]:
    """The same loop on the first GPU."""
    loops = [Training(LearnerProcess(replace(config, device="cuda"))) for config in configs]
    try:
        return _turns(loops, turn, lambda: None)
    finally:
        for loop in loops:
            loop.close()


def merge(turns: Sequence[Turn]) -> Turn:
    return {k: float(np.median([t[k] for t in turns])) for k in turns[0]}
