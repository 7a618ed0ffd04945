"""The cheapest layout for a target: hardware of rising price, until one of its layouts is fast enough."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import groupby, product

from coterie.acting.table import ACTING
from coterie.config import Config
from coterie.errors import ConfigError, CoterieError
from coterie.exchange.table import EXCHANGES
from coterie.tools.plan.layout import Hardware, RunLayout, layout
from coterie.tools.plan.services import Services
from coterie.tools.plan.simulate import Prediction, is_simulated, simulate
from coterie.types import Spec

_NOISE = 1.05  # a simulation's rate over a ceiling of mean times


def ceiling(layout: RunLayout, services: Services) -> float:
    """Env steps/s that the layout cannot exceed: its cores and GPUs full all the time."""
    h, kind, costs, chip = layout.hardware, layout.kind, services.costs, services.chip(layout.gpus > 0)
    most = kind.batch_max(layout.config) or layout.width * layout.producers  # envs of a forward
    envs = max(1, most if kind.hosted else layout.width // layout.groups)
    train = layout.steps * (chip.train.each * layout.samples + chip.exchange["solo"]) / layout.batch / layout.unroll
    computes, steps = "gpus" if layout.gpus else "cores", "hosts" if layout.hosts else "cores"
    counts = {"cores": h.machines * h.cores, "gpus": h.machines * layout.gpus, "hosts": layout.hosts * h.host_cores}
    work = dict.fromkeys(counts, 0.0)
    work[steps] += costs.env.each * (1 - services.env_waits)
    work[steps if kind.own_policy else computes] += (costs if kind.own_policy else chip).act(envs) / envs
    work[computes] += train
    return min((counts[k] / x for k, x in work.items() if x), default=math.inf) * services.valid


def candidates(config: Config, spec: Spec, most: Hardware) -> Iterator[RunLayout]:
    """All layouts on hardware up to `most`, each kind of it in powers of two."""
    for cores, gpus, hosts, machines in product(
        _doubling(most.cores), [0, *_doubling(most.gpus)], [0, *_doubling(most.hosts)],
        _doubling(most.machines),
    ):  # fmt: skip
        hardware = replace(most, cores=cores, gpus=gpus, hosts=hosts, machines=machines)
        for each, acting, exchange in product(_doubling(max(cores, gpus)), ACTING, EXCHANGES):
            learners = each * machines
            fits = EXCHANGES[exchange].one_learner == (learners == 1) and (not hosts or ACTING[acting].has_children)
            if fits and is_simulated(acting, exchange):
                with suppress(ConfigError):
                    yield layout(config, spec, hardware, acting, exchange, learners)


def cheapest(
    config: Config, spec: Spec, services: Services, most: Hardware, target: float,
    begin: Callable[[RunLayout], object] = lambda layout: None,
) -> tuple[Prediction | None, Prediction | None]:  # fmt: skip
    """The layout that reaches `target` frames/s for the fewest dollars per hour, the fastest of several; or None, and
    the fastest result of any acting mode x exchange, each in its layout with the highest ceiling. `begin` is called
    before each simulation.
    """
    found = sorted(candidates(config, spec, most), key=lambda x: x.dollars_per_hour)
    for _, same in groupby(found, key=lambda x: x.dollars_per_hour):
        best: Prediction | None = None
        for one in same:
            if ceiling(one, services) * services.action_repeat * _NOISE < max(target, best.frames_per_s if best else 0):
                continue
            with suppress(CoterieError):  # no cost of its exchange, or too large: a smaller one was simulated
                begin(one)
                result = simulate(one, services, config.seed)
                best = result if best is None else max(best, result, key=lambda x: x.frames_per_s)
        if best is not None and best.frames_per_s >= target:
            return best, None
    rated: dict[str, Prediction] = {}
    # Many have the same ceiling: the most learners first, then the most hardware.
    for one in sorted(found, key=lambda x: (-ceiling(x, services), -x.learners, -x.dollars_per_hour)):
        if one.name not in rated:
            with suppress(CoterieError):
                begin(one)
                rated[one.name] = simulate(one, services, config.seed)
    return None, max(rated.values(), key=lambda x: x.frames_per_s, default=None)


def _doubling(most: int) -> list[int]:
    """Powers of two up to `most`, and itself."""
    return [2**k for k in range(most.bit_length()) if 2**k < most] + [most] * (most > 0)
