"""What the parts of a run cost: measured by `measure`, or read from a file that was written by hand or elsewhere.

All seconds are of one core (or of the accelerator). A part that handles n envs or samples at once takes
`fixed + each * n` seconds; an env step varies, gamma distributed with coefficient of variation `env_cv`.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

from coterie.exchange.table import EXCHANGES
from coterie.types import ConfigError, reason_of


@dataclass(frozen=True)
class Line:
    """Seconds, by the number of envs or samples that are handled at once."""

    fixed: float = 0.0
    each: float = 0.0

    def __call__(self, n: float) -> float:
        return self.fixed + self.each * n

    def times(self, factor: float) -> Line:
        return Line(self.fixed * factor, self.each * factor)


@dataclass(frozen=True)
class Costs:
    """Seconds of one core, under one load of the others."""

    env: Line  # a step of n envs: `fixed` is the acting thread's, `each` the env thread's
    act: Line  # a forward of n envs, sampled and recorded
    unroll: Line  # what else an unroll of n envs takes: new weights, the value of its last observations
    train: Line  # a part of n samples: forward and backward
    exchange: dict[str, float]  # a learner step's clipping, update and agreement; between `Services.learners` learners
    wire: Line = Line()  # a message of n envs and its answer, both ends together

    def acting(self, factor: float) -> Costs:
        """With the times of acting and between unrolls multiplied."""
        env, act, unroll = (x.times(factor) for x in (self.env, self.act, self.unroll))
        return replace(self, env=env, act=act, unroll=unroll)


@dataclass(frozen=True)
class Threads:
    """Times of parts done by threads of one process, relative to those of single threads: they share an interpreter, an
    allocator and caches.
    """

    turns: float = 1.0  # acting with one core: two groups of envs in turns
    act: float = 1.0  # acting with several cores
    train: float = 1.0  # training with several


@dataclass(frozen=True, kw_only=True)
class Services:
    """A net, its algorithm and an env on one kind of machine."""

    alone: Costs  # the other cores are idle
    crowded: Costs  # all cores do the same
    threads: Threads = Threads()
    env_cv: float = 0.0  # of one env's step
    uneven: float = 0.0  # coefficient of variation among cores of the time that they take for the same
    jitter: float = 0.0  # and of a rollout's time on one core
    action_repeat: int = 1  # frames for each env step
    valid: float = 1.0  # share of rows that count: the others restart an env
    obs_bytes: float = 0.0  # of one env's observation
    weight_bytes: float = 0.0  # of the net's weights
    learners: int = 2  # that `exchange` was measured between
    accelerator: Costs | None = None  # act, train, exchange there; env and unroll are what a core does beside it
    about: dict[str, Any] = field(default_factory=dict)  # where it comes from; nothing reads it

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def save(services: Services, path: Path) -> None:
    path.write_text(json.dumps(services.to_json(), indent=1) + "\n")


def load(path: Path) -> Services:
    """Services from a file; raises `ConfigError` that names the wrong field."""
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--services: {path} cannot be read as JSON: {reason_of(error)}") from None
    return from_json(data)


def from_json(data: Any) -> Services:
    """The inverse of `to_json`; raises `ConfigError` that names the wrong field."""
    if isinstance(data, dict) and "alone" in data:
        data.setdefault("crowded", data["alone"])
    services: Services = _read(Services, data, "services")
    if services.action_repeat < 1 or services.learners < 2 or not 0 < services.valid <= 1:
        raise ConfigError("services: action_repeat must be at least 1, learners at least 2, valid in (0, 1]")
    if not min(vars(services.threads).values()) > 0:
        raise ConfigError("services: threads.turns, threads.act and threads.train must be above 0")
    return services


def _read(kind: Any, data: Any, name: str) -> Any:
    """`data` as `kind`, a dataclass or a plain type."""
    if type(None) in get_args(kind):
        return None if data is None else _read(get_args(kind)[0], data, name)
    if kind in (float, int):
        if isinstance(data, bool) or not isinstance(data, int | float) or not math.isfinite(data) or data < 0:
            raise ConfigError(f"{name}: must be a number of at least 0, not {str(data)[:40]!r}")
        return kind(data)
    if not isinstance(data, dict):
        raise ConfigError(f"{name}: must be an object, not {str(data)[:40]!r}")
    if kind == dict[str, float]:
        if missing := [x for x in EXCHANGES if x not in data]:
            raise ConfigError(f"{name}.{missing[0]}: is missing")
        return {k: _read(float, x, f"{name}.{k}") for k, x in data.items()}
    if not dataclasses.is_dataclass(kind):
        return data
    types = get_type_hints(kind)
    if unknown := [k for k in data if k not in types]:
        raise ConfigError(f"{name}.{unknown[0]}: no such field; fields are {', '.join(types)}")
    for f in dataclasses.fields(kind):
        if f.name not in data and f.default is f.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{name}.{f.name}: is missing")
    return kind(**{k: _read(types[k], x, f"{name}.{k}") for k, x in data.items()})  # type: ignore[operator]


def fit(points: Sequence[tuple[float, float, float]]) -> Line:
    """The line through two measurements (times that `fixed` is paid, n, seconds). `each` has everything if the two
    cannot be separated or one would be negative.
    """
    (p1, n1, y1), (p2, n2, y2) = points
    det = p1 * n2 - p2 * n1
    if abs(det) > 1e-3 * p2 * n2:
        fixed, each = (y1 * n2 - y2 * n1) / det, (p1 * y2 - p2 * y1) / det
        if fixed >= 0 and each >= 0:
            return Line(fixed, each)
        if each < 0:  # it does not depend on n, as far as this can tell
            return Line((y1 + y2) / (p1 + p2), 0.0)
    return Line(0.0, (y1 + y2) / (n1 + n2))
