"""The cheapest layout for a target: hardware of rising price, until one of its layouts is fast enough."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import groupby, product

from coterie.acting.table import ACTING
from coterie.config import Config
from coterie.exchange.table import EXCHANGES
from coterie.tools.plan.costs import Services
from coterie.tools.plan.layout import Hardware, RunLayout, layout
from coterie.tools.plan.simulate import Result, ceiling, simulate
from coterie.types import ConfigError, CoterieError, Spec

_NOISE = 1.05  # a simulation's rate over a ceiling of mean times


def candidates(config: Config, spec: Spec, most: Hardware) -> Iterator[RunLayout]:
    """All layouts on hardware up to `most`, each kind of it in powers of two."""
    for cores, gpus, hosts, machines in product(
        _doubling(1, most.cores), [0, *_doubling(1, most.gpus)], [0, *_doubling(1, most.hosts)],
        _doubling(1, most.machines),
    ):  # fmt: skip
        hardware = replace(most, cores=cores, gpus=gpus, hosts=hosts, machines=machines)
        for each, acting, exchange in product(_doubling(1, max(cores, gpus)), ACTING, EXCHANGES):
            learners = each * machines
            if EXCHANGES[exchange].one_learner == (learners == 1) and (not hosts or ACTING[acting].apart):
                with suppress(ConfigError):
                    yield layout(config, spec, hardware, acting, exchange, learners)


def cheapest(
    config: Config, spec: Spec, services: Services, most: Hardware, target: float, seed: int = 0
) -> tuple[Result | None, Result | None]:
    """The layout that reaches `target` frames/s for the fewest dollars per hour, the fastest of several; or None, and
    the result of the layout with the highest ceiling.
    """
    found = sorted(candidates(config, spec, most), key=lambda x: x.dollars_per_hour)
    for _, same in groupby(found, key=lambda x: x.dollars_per_hour):
        best: Result | None = None
        for one in same:
            if ceiling(one, services) * services.action_repeat * _NOISE < max(target, best.frames_per_s if best else 0):
                continue
            try:
                result = simulate(one, services, seed)
            except CoterieError:  # too large: a smaller one of its kind was looked at
                continue
            if best is None or result.frames_per_s > best.frames_per_s:
                best = result
        if best is not None and best.frames_per_s >= target:
            return best, None
    for one in sorted(found, key=lambda x: -ceiling(x, services)):
        with suppress(CoterieError):
            return None, simulate(one, services, seed)
    return None, None


def _doubling(first: int, most: int) -> list[int]:
    """Powers of two up to `most`, and itself."""
    found = []
    while first < most:
        found.append(first)
        first *= 2
    return [*found, most] if most > 0 else []
