"""What the parts of a run cost: measured by `measure`, or read from a file that was written by hand or elsewhere.

All seconds are of one core (or of the accelerator). A part that handles n envs or samples at once takes
`fixed + each * n` seconds; an env step varies, gamma distributed with coefficient of variation `env_cv`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from coterie.errors import ConfigError, reason_of
from coterie.exchange.table import EXCHANGES
from coterie.runs import files

_MOST = 1e12  # of any number: with larger ones a simulated run may not end


@dataclass(frozen=True)
class LinearCost:
    """Seconds, by the number of envs or samples that are handled at once."""

    fixed: float = 0.0
    each: float = 0.0
    misfit: float = field(default=0.0, compare=False)  # relative error of the fit

    def __call__(self, n: float) -> float:
        return self.fixed + self.each * n


@dataclass(frozen=True)
class Costs:
    """Seconds of one core while the others are as busy."""

    env: LinearCost  # a step of n envs: `fixed` is the acting thread's, `each` the env thread's
    act: LinearCost  # a forward of n envs, sampled and recorded
    unroll: LinearCost  # what else an unroll of n envs takes: new weights, the value of its last observations
    train: LinearCost  # a part of n samples: forward and backward
    exchange: dict[str, float]  # a learner step's clipping, update and agreement; between `Services.learners` learners
    wire: LinearCost = LinearCost()  # a message of n envs and its answer, both ends together


@dataclass(frozen=True, kw_only=True)
class Services:
    """A net, its algorithm and an env on one kind of machine."""

    costs: Costs
    env_cv: float = 0.0  # of one env's step
    env_waits: float = 0.0  # share of that step in which it needs no core: it sleeps, or asks another program
    action_repeat: int = 1  # frames for each env step
    valid: float = 1.0  # share of rows that count: the others restart an env
    obs_bytes: float = 0.0  # of one env's observation
    weight_bytes: float = 0.0  # of the net's weights
    learners: int = 2  # that `exchange` was measured between
    accelerator: Costs | None = None  # act, train, exchange there; env and unroll are what a core does beside it
    about: dict[str, Any] = field(default_factory=dict)  # what was measured, see `measure.provenance`

    def __post_init__(self) -> None:
        if self.action_repeat < 1 or self.learners < 2 or not 0 < self.valid <= 1:
            raise ValueError("action_repeat must be at least 1, learners at least 2, valid in (0, 1]")

    def chip(self, gpu: bool) -> Costs:
        """Costs on what a learner computes with."""
        return self.accelerator if gpu and self.accelerator is not None else self.costs


def save(services: Services, path: Path) -> None:
    files.save(path, json.dumps(asdict(services), indent=1) + "\n", "--save-services", durable=True)


def load(path: Path) -> Services:
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--services: {path} cannot be read as JSON: {reason_of(error)}") from None
    try:
        return from_json(data)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        what = f"it lacks {error}" if isinstance(error, KeyError) else error
        raise ConfigError(f"--services: {path} is not a services file of this version: {what}") from None


def from_json(data: dict[str, Any]) -> Services:
    """The inverse of `asdict`."""
    accelerator = data.get("accelerator")
    for name, value in data.items():
        if name != "about" and (name, value) != ("accelerator", None):
            _check(name, value)
    costs = {"costs": _costs(data["costs"]), "accelerator": accelerator and _costs(accelerator)}
    return Services(**{**data, **costs, "about": dict(data.get("about", {}))})


def _check(name: str, value: Any) -> None:
    """Raise a `ValueError` unless each number in it is from 0 to `_MOST`."""
    if isinstance(value, dict):
        for key, each in value.items():
            _check(f"{name}.{key}", each)
    elif not isinstance(value, int | float) or not 0 <= value <= _MOST:
        raise ValueError(f"{name} is {value!r:.40}, which is not a number from 0 to {_MOST:g}")


def _costs(data: dict[str, Any]) -> Costs:
    lines = {name: LinearCost(**line) for name, line in data.items() if name != "exchange"}
    given = data["exchange"]
    exchange = {name: float(given[name]) for name in EXCHANGES if name in given or name == "solo"}
    return Costs(exchange=exchange, **lines)


def fit(points: Sequence[tuple[float, float, float]]) -> LinearCost:
    """The line through two measurements (times that `fixed` is paid, n, seconds). `each` has everything if the two
    cannot be separated or one would be negative.
    """
    (p1, n1, y1), (p2, n2, y2) = points
    det, fixed, each = p1 * n2 - p2 * n1, 0.0, (y1 + y2) / (n1 + n2)
    if abs(det) > 1e-3 * p2 * n2:
        line = (y1 * n2 - y2 * n1) / det, (p1 * y2 - p2 * y1) / det
        if line[1] < 0:  # it does not depend on n, as far as this can tell
            fixed, each = (y1 + y2) / (p1 + p2), 0.0
        elif line[0] >= 0:
            fixed, each = line
    return LinearCost(fixed, each, max(abs(fixed * p + each * n - y) / y if y else 0.0 for p, n, y in points))
