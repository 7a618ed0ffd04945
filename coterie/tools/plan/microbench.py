"""What the measuring processes do: short turns of the learner's own loop, exchanges, env steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from coterie.algorithms.table import unroll_length
from coterie.build.factory import ProcessContext, make_exchange, normalizers
from coterie.config import ResolvedConfig
from coterie.envs.make import make_envs
from coterie.envs.spaces import random_actions
from coterie.parallel.processes import Post
from coterie.roles.learner import Learner
from coterie.tools.bench import Training
from coterie.tools.plan.costs import fit
from coterie.tools.plan.wire import wire_cost
from coterie.types import Array, Spec

_ROUNDS = 3
_LEAST = 3  # rollouts of a turn that tell by how much they differ
_STEPS = 20  # of each exchange
TURNS = 7 * _ROUNDS + 3  # that the time is for
PATIENCE_S = 600.0

Turn = dict[str, float]  # seconds of each part, and what was done in them


def measure_whole(post: Post, config: ResolvedConfig, turn: float) -> None:
    """In a child process with all cores: env steps/s of acting alone, seconds of a training step."""
    loop = Training(Learner(config))
    acted, trained = list[float](), list[float]()
    try:
        _warm(loop, turn / 4)
        for _ in range(_ROUNDS):
            acted.append(loop.turn(turn, learn=False))
            trained.append(_turn(loop, turn)["train"])
    finally:
        loop.close()
    post("result", (float(np.median(acted)), float(np.median(trained))))


def measure_process(
    post: Post, configs: list[ResolvedConfig], links: ProcessContext, others: dict[str, ProcessContext], seconds: float
) -> None:
    """In a child process with one core: turns beside the others; in the first also what needs no others."""
    rank, sync = links.rank, partial(links.board.meet, links.rank, PATIENCE_S)
    turn = seconds / TURNS
    *loops, own = [Training(Learner(c)) for c in configs]
    alone: list[list[Turn]] = [[], []]
    crowded: list[list[Turn]] = [[], []]
    took: list[list[Array]] = [[], []]  # seconds of each rollout of those
    try:
        for loop in (*loops, own):
            _warm(loop, turn / 4)
        acted = list[float]()
        for _ in range(_ROUNDS):
            sync()
            acted.append(own.turn(turn, learn=False))
            for i, loop in enumerate(loops):
                sync()
                if rank == 0:
                    alone[i].append(_turn(loop, turn))
                sync()
                crowded[i].append(_turn(loop, turn))
                took[i].append(np.diff(loop.now.ends))
        every = {"solo": ProcessContext(), **others}
        agreed = {kind: _exchange(loops[-1].learner, kind, mine, sync) for kind, mine in every.items()}
        sync()
        found: dict[str, Any] = {
            "crowded": [merge(t) for t in crowded],
            "took": float(np.median(np.concatenate(took[-1]))),
            "jitter": _jitter(took[-1]),
            "acted": float(np.median(acted)),
            "exchange": agreed,
            "solo": float(np.median([t["exchange"] for t in crowded[-1]])),
        }
        if rank == 0:
            learner = loops[-1].learner
            widths = [c.env.num_envs for c in configs[:2]]
            costs = [wire_cost(learner.spec, n, turn / 4) for n in widths]
            line = fit([(1, n, cost) for n, cost in zip(widths, costs, strict=True)])
            found |= {
                "alone": [merge(t) for t in alone],
                "wire": (line.fixed, line.each),
                "weight_bytes": 4.0 * len(learner.params.data),
                "deviation": _deviation(configs[1], learner.spec, turn / 2),
                "gpu": _gpu(configs[:2], turn) if torch.cuda.is_available() else None,
            }
        sync()
    finally:
        for loop in (*loops, own):
            loop.close()
    post("result", found)


def _warm(loop: Training, seconds: float) -> None:
    """Run until it has trained: value learning fills its replay first."""
    end = time.monotonic() + PATIENCE_S
    while loop.learner.progress.learner_steps < 2 and time.monotonic() < end:
        loop.turn(seconds)


def _turn(loop: Training, seconds: float) -> Turn:
    """Run some rollouts of the learner's loop; returns seconds of a group's env step and forward, of the rest of an
    unroll, of an optimizer step and of its exchange.
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
        "unroll": max(0.0, d["wall"] - booked) / groups * unroll_length(learner.config),
        "train": d["train"] / steps,
        "exchange": d["exchange"] / steps,
        "samples": d["samples"] / steps,
        "valid": d["valid"] / d["rows"],
    }


def _jitter(took: list[Array]) -> float:
    """Coefficient of variation of a rollout's time: within a turn where that has some, else among all."""
    some = [t / t.mean() for t in took if len(t) >= _LEAST]
    every = np.concatenate(some or took)
    return float(every.std(ddof=1) / every.mean()) if len(every) >= _LEAST else 0.0


def _exchange(learner: Learner, kind: str, links: ProcessContext, sync: Callable[[], None]) -> list[float]:
    """Seconds of some learner steps' agreement and update, while the other processes make as many."""
    config = replace(learner.config, exchange=kind, learners=links.learners)
    exchange = make_exchange(config, learner.params, normalizers(config, learner.model), links)
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


def _deviation(config: ResolvedConfig, spec: Spec, seconds: float) -> float:
    """Standard deviation of one env's step in seconds, without the slowest hundredth: interruptions by others."""
    rng = np.random.default_rng(0)
    envs = make_envs(replace(config.env, num_envs=1, decorrelate=0), config.atari, seed=1)
    took = list[float]()
    try:
        envs.recv(0)
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(took) < 20:
            action = random_actions(spec.action, rng, 1)
            begin = time.perf_counter()
            envs.send(0, action)
            envs.recv(0)
            took.append(time.perf_counter() - begin)
    finally:
        envs.close()
    return float(np.std(np.sort(took)[: max(2, len(took) * 99 // 100)]))


def _gpu(configs: list[ResolvedConfig], turn: float) -> list[Turn]:
    """The same loop on the first GPU."""
    found = []
    for config in configs:
        loop = Training(Learner(replace(config, device="cuda")))
        try:
            _warm(loop, turn / 4)
            found.append(merge([_turn(loop, turn) for _ in range(_ROUNDS)]))
        finally:
            loop.close()
    return found


def merge(turns: Sequence[Turn]) -> Turn:
    return {k: float(np.median([t[k] for t in turns])) for k in turns[0]}
