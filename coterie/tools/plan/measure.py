"""What the parts of a run cost on this machine, measured by short turns of the learner's own loop.

A process on each of up to 8 cores (two where there is one core) runs the loop that `bench` measures, inline and with
one thread, for a few envs and for more.
The simulation derives the rate of a layout from these costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from coterie.acting.table import acting_kind
from coterie.algorithms.table import algorithm_class
from coterie.build.factory import ProcessContext
from coterie.build.resources import resolve_config, resolve_resources
from coterie.build.validity import check
from coterie.config import Chaos, Config, ResolvedConfig
from coterie.envs.make import make_spec
from coterie.envs.tasks import tasks
from coterie.errors import ConfigError
from coterie.exchange.table import EXCHANGES
from coterie.launch.placement import Placement
from coterie.parallel.hardware import available_cores
from coterie.parallel.processes import Child, gather
from coterie.plugins import named
from coterie.runs.config_io import replace as changed
from coterie.tools.plan.microbench import PATIENCE_S, Turn, measure_process, merge
from coterie.tools.plan.services import Costs, LinearCost, Services, fit
from coterie.types import Spec

_MOST = 8  # processes: this many already saturate memory bandwidth
_DECORRELATE = 20  # env steps
_CAPACITY = 100_000  # env steps of a replay
# Core-seconds of a message and its answer over a unix socket, and of a byte of it: 512 bytes took 0.3 ms and 900 KB 0.7
# to 1.1 ms on a 2-core AMD EPYC (benchmarks/wire.py).
_MESSAGE, _BYTE = 3e-4, 7e-10


def lone(config: Config, envs: int, of: int) -> ResolvedConfig:
    """The config of the measured learner, with `envs` of `of` simulators; its batches shrink in proportion."""
    share = envs / of
    exchanges: dict[str, Any] = {}
    for kind in EXCHANGES.values():
        exchanges |= kind.link_settings("", "", 1)
        exchanges |= named("exchange", kind.simulation).measured if kind.simulation else {}
    c = changed(config, {
        "acting": "inline", "exchange": "solo", "learners": 1, "actors": "auto", "device": "cpu", "torch_threads": 1,
        "env.num_envs": of, "env.groups": 1, "env.threads": 1, "env.delay": 0.0,
        "env.decorrelate": min(config.env.decorrelate, _DECORRELATE), "wire.bind": "", "chaos": Chaos(),
        "vtrace.minibatch": 0, "log.cosines": 0, "log.norms": 0, "ppo.batch_size": 0, "q.secondary_batch": 0,
        **exchanges,
    })  # fmt: skip
    c = changed(c, {
        "algo.unroll_length": algorithm_class(c).unroll_length(c), "env.num_envs": envs,
        "ppo.minibatch_size": max(1, round(config.ppo.minibatch_size * share)),
        "q.batch_size": max(1, round(config.q.batch_size * share)),
    })  # fmt: skip
    if (algorithm := algorithm_class(c)).has_replay:  # it trains at once
        kept = min(config.replay.capacity, max(_CAPACITY, 4 * algorithm.first_rows(c)))
        c = changed(c, {"q.learn_start": algorithm.first_rows(c), "replay.capacity": kept, "replay.envs": 0})
    return resolve_config(c)


def sizes(config: Config, agents: int = 1) -> tuple[int, int]:
    """Two numbers of envs to measure with, of whole teams; the larger is about the width of a forward and a batch."""
    settled = resolve_config(replace(config, learners=1, exchange="auto"))
    teams = max(2, -(-max(settled.env.num_envs, acting_kind(settled).batch_size(settled)) // agents))
    return max(1, teams // 4) * agents, teams * agents


def measure(config: Config, seconds: float) -> Services:
    """Measure a preset's network, algorithm and env for about `seconds`."""
    if len(tasks(config.env.id)) > 1:
        raise ConfigError("env.id: plan needs a single task")
    spec = make_spec(config.env, config.atari)
    widths = sizes(config, spec.agents)
    configs = [lone(config, n, widths[-1]) for n in widths]
    for one in configs:
        check(one, spec)
    found = _run(configs, spec, seconds)
    first = found[0]
    # Repeated alone, an exchange finds its weights in the cache, so only its cost beside solo is added. In lockstep the
    # fastest learner's time is taken: the others' includes waiting, which the simulation adds.
    share = min(1.0, len(available_cores()) / len(found))  # of a core, for each process
    turns = [merge([one["turns"][i] for one in found]) for i in range(2)]
    turns = [{k: x if k in ("samples", "valid") else share * x for k, x in turn.items()} for turn in turns]
    times = {kind: share * np.array([one["exchange"][kind] for one in found]) for kind in EXCHANGES}
    own = {kind: float(np.median(t.min(0) if EXCHANGES[kind].in_lockstep else t)) for kind, t in times.items()}
    beside = {kind: max(0.0, x - own["solo"]) for kind, x in own.items()}
    obs_bytes = float(spec.obs_bytes)
    wire = LinearCost(_MESSAGE, _BYTE * obs_bytes)
    costs = _costs(turns, configs, spec, beside, wire)
    on_gpu = [replace(c, device="cuda") for c in configs]
    return Services(
        costs=costs,
        accelerator=_costs(first["gpu"], on_gpu, spec, beside, wire) if first["gpu"] else None,
        env_cv=min(2.0, first["deviation"] / costs.env.each) if costs.env.each else 0.0,
        env_waits=first["waits"],
        action_repeat=spec.action_repeat,
        valid=min(1.0, float(np.mean([turn["valid"] for turn in turns]))),
        obs_bytes=obs_bytes,
        weight_bytes=first["weight_bytes"],
        learners=len(found),
        about={**provenance(config), "envs": list(widths)},
    )


def provenance(config: Config) -> dict[str, Any]:
    """The settings that most of the costs follow from, as JSON has them."""
    net = config.model
    return {"preset": config.preset, "env": config.env.id, "torso": net.torso, "hidden": list(net.hidden)}


def _run(configs: list[ResolvedConfig], spec: Spec, seconds: float) -> list[dict[str, Any]]:
    """The measurements of a process on each core."""
    cores = available_cores()
    count = max(2, min(len(cores), _MOST))
    crews = {
        kind: Placement(replace(configs[-1], exchange=kind, learners=count), spec)
        for kind, one in EXCHANGES.items()
        if not one.one_learner
    }
    board = next(iter(crews.values())).board
    children: list[Child] = []
    try:
        for rank in range(count):
            links = {kind: crew.links(rank) for kind, crew in crews.items()}
            args = (configs, replace(ProcessContext(), rank=rank, board=board), links, seconds)
            children.append(Child(f"coterie-plan-{rank}", [cores[rank % len(cores)]], measure_process, args))
        return gather(children, 2 * seconds + PATIENCE_S)
    finally:
        for child in children:
            child.kill()
        for crew in crews.values():
            crew.close()


def _costs(
    turns: Sequence[Turn], configs: list[ResolvedConfig], spec: Spec, beside: dict[str, float], wire: LinearCost
) -> Costs:
    """Lines through the measurements with fewer and with more envs. `beside`: seconds of an exchange, beside solo's."""
    envs, samples = [c.env.num_envs for c in configs], [t["samples"] for t in turns]
    chunks = [resolve_resources(c, spec).chunk for c in configs]
    parts = [-(-s // chunk) if chunk else 1.0 for s, chunk in zip(samples, chunks, strict=True)]
    env, act, unroll = (
        fit([(1, n, turn[part]) for n, turn in zip(envs, turns, strict=True)]) for part in ("env", "act", "unroll")
    )
    train = fit([(p, n, turn["train"]) for p, n, turn in zip(parts, samples, turns, strict=True)])
    exchange = {kind: turns[-1]["exchange"] + seconds for kind, seconds in beside.items()}
    return Costs(env, act, unroll, train, exchange, wire)
