"""What the parts of a run cost on this machine: short turns of the learner's own loop, one core each.

A process is pinned to every core and runs the loop that `bench` measures, inline and with one thread, for a few envs
and for more, in turns: once while the other cores rest (`alone`), once while all do the same (`crowded`). What they
cost when nobody shares their memory or their processor with them, and when everybody does, is all that is taken: how
fast a layout of these parts is, is for the simulation to say. What no such part shows is measured beside that: how
unlike each other and themselves the cores are, and what threads of one process take for acting alone and for training
alone, beside what the simulation makes of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from coterie.algorithms.ppo import horizon
from coterie.auto import batch_size, resolve, settle
from coterie.bench import Training
from coterie.config import Chaos, Config
from coterie.envs.make import make_envs, make_spec
from coterie.envs.spaces import random_actions
from coterie.launch.placement import Placement
from coterie.matrix import EXCHANGES, VALUE, check, first_rows
from coterie.parallel.affinity import available_cores
from coterie.parallel.processes import Child, Post, found_by
from coterie.parts import Links, make_exchange, normalizers
from coterie.plan.layout import Hardware, Layout, layout
from coterie.plan.learners import training
from coterie.plan.services import Costs, Line, Services, Threads, fit
from coterie.plan.simulate import beside, simulate
from coterie.plan.wire import wire_cost
from coterie.roles import Learner
from coterie.tasks import tasks
from coterie.types import Array, ConfigError, CoterieError, Spec

_ROUNDS = 3
_LEAST = 3  # rollouts of a turn that tell by how much they differ
_MOST = 8  # processes: so many fill a machine's memory bandwidth as well as more do
_STEPS = 20  # of each exchange
_TURNS = 7 * _ROUNDS + 3  # that the time is for
_DECORRELATE = 20  # env steps
_CAPACITY = 100_000  # env steps of a replay
_PATIENCE_S = 600.0

Turn = dict[str, float]  # seconds of each part, and what was done in them


def lone(config: Config, envs: int, of: int, own: bool = False) -> Config:
    """The learner that is measured, with `envs` of `of` simulators: its batches shrink alike. `own`: with the threads
    and groups that it would have on its cores, else with one.
    """
    share = envs / of
    env = config.env if own else replace(config.env, groups=1, threads=1)
    c = replace(
        config, acting="inline", exchange="solo", learners=1, actors="auto", device="cpu",
        torch_threads=config.torch_threads if own else 1,
        env=replace(env, num_envs=of, delay=0.0, decorrelate=min(config.env.decorrelate, _DECORRELATE)),
        wire=replace(config.wire, bind=""), gossip=replace(config.gossip, bind="", connect="", seats=0, mix_every=1),
        chaos=Chaos(), vtrace=replace(config.vtrace, minibatch=0), log=replace(config.log, cosines=0, norms=0),
    )  # fmt: skip
    minibatch = max(1, round(config.ppo.minibatch_size * share))
    c = replace(
        c,
        algo=replace(config.algo, unroll_length=horizon(c)),
        ppo=replace(config.ppo, batch_size=0, minibatch_size=minibatch),
        env=replace(c.env, num_envs=envs),
        q=replace(config.q, batch_size=max(1, round(config.q.batch_size * share)), secondary_batch=0),
    )
    if config.algorithm in VALUE:  # it is to train at once
        kept = min(config.replay.capacity, max(_CAPACITY, 4 * first_rows(c)))
        c = replace(c, q=replace(c.q, learn_start=first_rows(c)), replay=replace(c.replay, capacity=kept, envs=0))
    return c


def sizes(config: Config) -> tuple[int, int]:
    """Numbers of simulators to measure with: about those that are acted for at once, and that make a batch."""
    settled = settle(replace(config, learners=1, exchange="auto"))
    large = max(2, settled.env.num_envs, batch_size(settled))
    return max(1, large // 4), large


def measure(config: Config, seconds: float) -> Services:
    """Services of a preset's net, algorithm and env, measured for about so many seconds."""
    if len(tasks(config.env.id)) > 1:
        raise ConfigError("env.id: plan looks at one task at a time")
    spec, widths = make_spec(config.env, config.atari), sizes(config)
    configs = [lone(config, n, widths[-1]) for n in widths]
    for one in configs:
        check(one, spec)
    cores = available_cores()
    count = max(2, min(len(cores), _MOST))
    crews = {
        kind: Placement(replace(configs[-1], exchange=kind, learners=count), spec)  # type: ignore[arg-type]
        for kind in EXCHANGES
        if kind != "solo"
    }
    whole = lone(config, widths[-1], widths[-1], own=True)
    try:
        found = _run([*configs, whole], [cores[i % len(cores)] for i in range(count)], crews, seconds)
        ((acted, trained),) = _found([("coterie-plan-whole", cores, measure_whole, (whole, seconds / _TURNS))], seconds)
    finally:
        for crew in crews.values():
            crew.close()
    first = found[0]
    # By itself, again and again, an exchange finds its weights in the cache: what it costs beside solo is added. Where
    # all wait for the last one, it is what that one takes: what it waits for is for the simulation to say.
    solo = _mean([one["solo"] for one in found])
    times = {kind: np.array([one["exchange"][kind] for one in found]) for kind in EXCHANGES}
    own = {kind: float(np.median(t.min(0) if kind == "allreduce" else t)) for kind, t in times.items()}
    exchange = {kind: solo + max(0.0, x - own["solo"]) for kind, x in own.items()}
    alone = [first["alone"][i] for i in range(2)]
    crowded = [_merge([one["crowded"][i] for one in found]) for i in range(2)]
    wire = Line(*first["wire"])
    services = Services(
        alone=_costs(alone, configs, exchange, wire),
        crowded=_costs(crowded, configs, exchange, wire),
        action_repeat=spec.action_repeat,
        valid=min(1.0, _mean([t["valid"] for t in crowded])),
        obs_bytes=float(sum(np.prod(s.shape) * np.dtype(s.dtype).itemsize for s in spec.obs.values())),
        weight_bytes=first["weight_bytes"],
        learners=count,
        about={"preset": config.preset, "env": config.env.id, "torso": config.model.torso, "envs": list(widths)},
    )
    mean = services.alone.env.each
    took = np.array([one["took"] for one in found])
    services = replace(
        services,
        env_cv=min(2.0, first["deviation"] / mean) if mean else 0.0,
        uneven=float(took.std(ddof=1) / took.mean()),
        jitter=_mean([one["jitter"] for one in found]),
    )
    turns = _mean([one["acted"] for one in found])
    services = replace(services, threads=_threads(whole, spec, services, turns, acted, trained))
    if first["gpu"] is None:
        return services
    on_gpu = {kind: first["gpu"][1]["exchange"] + x - solo for kind, x in exchange.items()}
    return replace(services, accelerator=_costs(first["gpu"], configs, on_gpu, wire))


def _threads(config: Config, spec: Spec, services: Services, turns: float, acted: float, trained: float) -> Threads:
    """What processes took beside what is expected of them: `turns` and `acted` are env steps/s where nothing was
    learned, with one core (while the others did the same) and with all; `trained` seconds of a training step with all.
    """

    def idle(costs: Costs) -> Costs:
        return replace(costs, train=Line(), exchange=dict.fromkeys(costs.exchange, 0.0))

    def expected(own: Layout, alone: Costs) -> float:
        only = replace(services, alone=idle(alone), crowded=idle(services.crowded))
        return simulate(own, only).env_steps_per_s

    one, every = (
        layout(config, spec, Hardware(cores=cores), "inline", "solo", 1) for cores in (1, len(available_cores()))
    )
    found = Threads(turns=expected(one, services.crowded) / turns)
    if not every.several:
        return found
    act = expected(every, services.alone) / acted
    return replace(found, act=act, train=trained / max(training(every, beside(every, services))))


def measure_whole(post: Post, config: Config, turn: float) -> None:
    """A child that has all cores."""
    loop = Training(Learner(config))
    acted, trained = list[float](), list[float]()
    try:
        _warm(loop, turn / 4)
        for _ in range(_ROUNDS):
            acted.append(loop.turn(turn, learn=False))
            trained.append(_turn(loop, turn)["train"])
    finally:
        loop.close()
    post("found", (float(np.median(acted)), float(np.median(trained))))


def _run(configs: list[Config], cores: list[int], crews: dict[str, Placement], seconds: float) -> list[dict[str, Any]]:
    """What a process on each of `cores` found; the last of `configs` has the groups that it would have on one."""
    board = next(iter(crews.values())).board
    each = []
    for rank, core in enumerate(cores):
        links = {kind: crew.links(rank) for kind, crew in crews.items()}
        args = (configs, replace(Links(), rank=rank, board=board), links, seconds)
        each.append((f"coterie-plan-{rank}", [core], measure_process, args))
    return _found(each, seconds)


def _found(each: Sequence[tuple[str, list[int], Callable[..., None], tuple[Any, ...]]], seconds: float) -> list[Any]:
    """What processes find that measure for about so many seconds: of each its name, cores, target and arguments."""
    children: list[Child] = []
    try:
        children.extend(Child(*one) for one in each)
        return found_by(children, 2 * seconds + _PATIENCE_S)
    finally:
        for child in children:
            child.kill()


def measure_process(post: Post, configs: list[Config], links: Links, others: dict[str, Links], seconds: float) -> None:
    """A child: its turns beside the others, and what only the first is asked."""
    board, rank = links.board, links.rank

    def sync() -> None:
        board.turns[rank] += 1
        end = time.monotonic() + _PATIENCE_S
        while int(board.turns.min()) < int(board.turns[rank]):
            if time.monotonic() > end:
                raise CoterieError("plan: another process hangs")
            time.sleep(1e-3)

    turn = seconds / _TURNS
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
                took[i].append(np.diff(loop.ends))
        every = {"solo": Links(), **others}
        told = {kind: _exchange(loops[-1].learner, kind, mine, sync) for kind, mine in every.items()}
        sync()
        found: dict[str, Any] = {
            "crowded": [_merge(t) for t in crowded],
            "took": float(np.median(np.concatenate(took[-1]))),
            "jitter": _jitter(took[-1]),
            "acted": float(np.median(acted)),
            "exchange": told,
            "solo": float(np.median([t["exchange"] for t in crowded[-1]])),
        }
        if rank == 0:
            learner = loops[-1].learner
            widths = [c.env.num_envs for c in configs[:2]]
            costs = [wire_cost(learner.spec, n, turn / 4) for n in widths]
            line = fit([(1, n, cost) for n, cost in zip(widths, costs, strict=True)])
            found |= {
                "alone": [_merge(t) for t in alone],
                "wire": (line.fixed, line.each),
                "weight_bytes": 4.0 * len(learner.params.data),
                "deviation": _deviation(configs[1], learner.spec, turn / 2),
                "gpu": _gpu(configs[:2], turn) if torch.cuda.is_available() else None,
            }
        sync()
    finally:
        for loop in (*loops, own):
            loop.close()
    post("found", found)


def _warm(loop: Training, seconds: float) -> None:
    """Until it has trained: value learning gathers rows first."""
    end = time.monotonic() + _PATIENCE_S
    while loop.learner.progress.learner_steps < 2 and time.monotonic() < end:
        loop.turn(seconds)


def _turn(loop: Training, seconds: float) -> Turn:
    """Some rollouts of the learner's loop: seconds of a group's step, forward, and what else an unroll takes; of an
    optimizer step and its exchange.
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
        "unroll": max(0.0, d["wall"] - booked) / groups * horizon(learner.config),
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


def _exchange(learner: Learner, kind: str, links: Links, sync: Callable[[], None]) -> list[float]:
    """Seconds of some learner steps' agreement, and their updates, while the others make as many."""
    config = replace(learner.config, exchange=kind, learners=links.learners)  # type: ignore[arg-type]
    exchange = make_exchange(config, learner.params, normalizers(config, learner.model), links)
    took = list[float]()
    with exchange:
        sync()
        for _ in range(_STEPS):
            learner.params.grad.fill_(1e-3)
            begin = time.perf_counter()
            exchange.pull(learner.params)
            exchange.step(learner.params, 0.0)
            exchange.after_rollout(learner.params)
            took.append(time.perf_counter() - begin)
        sync()
    return took


def _deviation(config: Config, spec: Spec, seconds: float) -> float:
    """Standard deviation of one env's step in seconds, without the hundredth that took longest: those were others."""
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


def _gpu(configs: list[Config], turn: float) -> list[Turn]:
    """The same loop on the first GPU."""
    found = []
    for config in configs:
        loop = Training(Learner(replace(config, device="cuda")))
        try:
            _warm(loop, turn / 4)
            found.append(_merge([_turn(loop, turn) for _ in range(_ROUNDS)]))
        finally:
            loop.close()
    return found


def _costs(turns: Sequence[Turn], configs: list[Config], exchange: dict[str, float], wire: Line) -> Costs:
    """Lines through what was found with fewer and with more simulators."""

    def line(part: str, paid: Sequence[float] = (1, 1), n: Sequence[float] = ()) -> Line:
        n = n or [c.env.num_envs for c in configs]
        return fit([(p, k, t[part]) for p, k, t in zip(paid, n, turns, strict=True)])

    samples = [t["samples"] for t in turns]
    chunks = [_chunk(c) for c in configs]
    pieces = [-(-s // chunk) if chunk else 1.0 for s, chunk in zip(samples, chunks, strict=True)]
    return Costs(
        env=line("env"), act=line("act"), unroll=line("unroll"), train=line("train", pieces, samples),
        exchange=exchange, wire=wire,
    )  # fmt: skip


def _chunk(config: Config) -> int:
    """Samples of one part of a batch at most."""
    return resolve(config, make_spec(config.env, config.atari)).chunk


def _merge(turns: Sequence[Turn]) -> Turn:
    return {k: float(np.median([t[k] for t in turns])) for k in turns[0]}


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))
