"""What the parts of a run cost on this machine, measured by short turns of the learner's own loop.

A process on every core runs the loop that `bench` measures, inline and with one thread, for a few envs and for more:
once while the other cores are idle (`alone`), once while all do the same (`crowded`). The simulation derives the rate
of a layout from these costs. Measured apart: the differences among cores and over time, and the time that threads of
one process take to act and to train, relative to the simulation's expectation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from coterie.acting.table import batch_size
from coterie.algorithms.table import first_rows, is_value_based, unroll_length
from coterie.build.factory import ProcessContext
from coterie.build.resources import resolve_config, resolve_resources
from coterie.build.validity import check
from coterie.config import Chaos, Config, ResolvedConfig
from coterie.envs.make import make_spec
from coterie.envs.tasks import tasks
from coterie.exchange.table import EXCHANGES
from coterie.launch.placement import Placement
from coterie.parallel.affinity import available_cores
from coterie.parallel.processes import Child, gather
from coterie.tools.plan.costs import Costs, Line, Services, Threads, fit
from coterie.tools.plan.layout import Hardware, RunLayout, layout
from coterie.tools.plan.learners import training
from coterie.tools.plan.microbench import PATIENCE_S, TURNS, Turn, measure_process, measure_whole, merge
from coterie.tools.plan.simulate import beside, simulate
from coterie.types import ConfigError, Spec

_MOST = 8  # processes: so many fill a machine's memory bandwidth as well as more do
_DECORRELATE = 20  # env steps
_CAPACITY = 100_000  # env steps of a replay


def lone(config: Config, envs: int, of: int, own: bool = False) -> ResolvedConfig:
    """The config of the measured learner, with `envs` of `of` simulators; its batches shrink in proportion. `own`: with
    the threads and groups that a run would have on these cores, else with one of each.
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
        algo=replace(config.algo, unroll_length=unroll_length(c)),
        ppo=replace(config.ppo, batch_size=0, minibatch_size=minibatch),
        env=replace(c.env, num_envs=envs),
        q=replace(config.q, batch_size=max(1, round(config.q.batch_size * share)), secondary_batch=0),
    )
    if is_value_based(config):  # it trains at once
        kept = min(config.replay.capacity, max(_CAPACITY, 4 * first_rows(c)))
        c = replace(c, q=replace(c.q, learn_start=first_rows(c)), replay=replace(c.replay, capacity=kept, envs=0))
    return resolve_config(c)


def sizes(config: Config) -> tuple[int, int]:
    """Two numbers of simulators to measure with. The larger one is about the width of a forward and of a batch."""
    settled = resolve_config(replace(config, learners=1, exchange="auto"))
    large = max(2, settled.env.num_envs, batch_size(settled))
    return max(1, large // 4), large


def measure(config: Config, seconds: float) -> Services:
    """Measure a preset's network, algorithm and env for about so many seconds."""
    if len(tasks(config.env.id)) > 1:
        raise ConfigError("env.id: plan needs a single task")
    spec, widths = make_spec(config.env, config.atari), sizes(config)
    configs = [lone(config, n, widths[-1]) for n in widths]
    for one in configs:
        check(one, spec)
    cores = available_cores()
    count = max(2, min(len(cores), _MOST))
    crews = {
        kind: Placement(replace(configs[-1], exchange=kind, learners=count), spec)
        for kind, one in EXCHANGES.items()
        if not one.one_learner
    }
    whole = lone(config, widths[-1], widths[-1], own=True)
    try:
        found = _run([*configs, whole], [cores[i % len(cores)] for i in range(count)], crews, seconds)
        ((acted, trained),) = _found([("coterie-plan-whole", cores, measure_whole, (whole, seconds / TURNS))], seconds)
    finally:
        for crew in crews.values():
            crew.close()
    first = found[0]
    # Repeated alone, an exchange finds its weights in the cache, so only its cost beside solo is added. In lockstep the
    # fastest learner's time is taken: the others' includes waiting, which the simulation adds.
    solo = _mean([one["solo"] for one in found])
    times = {kind: np.array([one["exchange"][kind] for one in found]) for kind in EXCHANGES}
    own = {kind: float(np.median(t.min(0) if EXCHANGES[kind].in_lockstep else t)) for kind, t in times.items()}
    exchange = {kind: solo + max(0.0, x - own["solo"]) for kind, x in own.items()}
    crowded = [merge([one["crowded"][i] for one in found]) for i in range(2)]
    wire = Line(*first["wire"])
    alone = _costs(first["alone"], configs, exchange, wire)
    took = np.array([one["took"] for one in found])
    services = Services(
        alone=alone,
        crowded=_costs(crowded, configs, exchange, wire),
        env_cv=min(2.0, first["deviation"] / alone.env.each) if alone.env.each else 0.0,
        uneven=float(took.std(ddof=1) / took.mean()),
        jitter=_mean([one["jitter"] for one in found]),
        action_repeat=spec.action_repeat,
        valid=min(1.0, _mean([t["valid"] for t in crowded])),
        obs_bytes=float(sum(np.prod(s.shape) * np.dtype(s.dtype).itemsize for s in spec.obs.values())),
        weight_bytes=first["weight_bytes"],
        learners=count,
        about={"preset": config.preset, "env": config.env.id, "torso": config.model.torso, "envs": list(widths)},
    )
    turns = _mean([one["acted"] for one in found])
    services = replace(services, threads=_threads(whole, spec, services, turns, acted, trained))
    if first["gpu"] is None:
        return services
    on_gpu = {kind: first["gpu"][1]["exchange"] + x - solo for kind, x in exchange.items()}
    return replace(services, accelerator=_costs(first["gpu"], configs, on_gpu, wire))


def _threads(config: Config, spec: Spec, services: Services, turns: float, acted: float, trained: float) -> Threads:
    """Measured times relative to the simulated ones. `turns`, `acted`: env steps/s without learning, with one core
    (while the others did the same) and with all cores; `trained`: seconds of a training step with all cores.
    """

    def idle(costs: Costs) -> Costs:
        return replace(costs, train=Line(), exchange=dict.fromkeys(costs.exchange, 0.0))

    def expected(own: RunLayout, alone: Costs) -> float:
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


def _run(
    configs: list[ResolvedConfig], cores: list[int], crews: dict[str, Placement], seconds: float
) -> list[dict[str, Any]]:
    """The measurements of a process on each of `cores`. The last of `configs` has a run's groups on one core."""
    board = next(iter(crews.values())).board
    each = []
    for rank, core in enumerate(cores):
        links = {kind: crew.links(rank) for kind, crew in crews.items()}
        args = (configs, replace(ProcessContext(), rank=rank, board=board), links, seconds)
        each.append((f"coterie-plan-{rank}", [core], measure_process, args))
    return _found(each, seconds)


def _found(each: Sequence[tuple[str, list[int], Callable[..., None], tuple[Any, ...]]], seconds: float) -> list[Any]:
    """The measurements of processes, given by name, cores, target and arguments."""
    children: list[Child] = []
    try:
        children.extend(Child(*one) for one in each)
        return gather(children, 2 * seconds + PATIENCE_S)
    finally:
        for child in children:
            child.kill()


def _costs(turns: Sequence[Turn], configs: list[ResolvedConfig], exchange: dict[str, float], wire: Line) -> Costs:
    """Lines through the measurements with fewer and with more simulators."""

    def line(part: str, paid: Sequence[float] = (1, 1), n: Sequence[float] = ()) -> Line:
        n = n or [c.env.num_envs for c in configs]
        return fit([(p, k, t[part]) for p, k, t in zip(paid, n, turns, strict=True)])

    samples = [t["samples"] for t in turns]
    chunks = [resolve_resources(c, make_spec(c.env, c.atari)).chunk for c in configs]
    pieces = [-(-s // chunk) if chunk else 1.0 for s, chunk in zip(samples, chunks, strict=True)]
    return Costs(
        env=line("env"), act=line("act"), unroll=line("unroll"), train=line("train", pieces, samples),
        exchange=exchange, wire=wire,
    )  # fmt: skip


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))
