"""Runs as a report sees them: a folder's config, its lines of metrics and its summary; those that differ by seed alone
are one method.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from coterie.envs.tasks import tasks
from coterie.runs.metrics import read_metrics
from coterie.types import Array, ConfigError

_MORE = ("summary.json", "machine.json")
# What says where and for how long a run went, but not what was tried.
_PLACE = ("seed", "out", "steps", "log.", "ray.", "wire.", "preset")


@dataclass(frozen=True)
class RecordedRun:
    """A run's folder as it was read."""

    folder: Path
    config: dict[str, Any]  # flat: "optim.lr" -> 0.001
    lines: list[dict[str, Any]] = field(repr=False)
    summary: dict[str, Any] = field(repr=False)  # empty while it goes on
    machine: dict[str, Any] = field(repr=False)  # empty where its version did not tell

    @property
    def preset(self) -> str:
        return str(self.config.get("preset") or "run")

    @property
    def title(self) -> str:
        return f"{self.preset} on {self.env}, seed {self.seed}"

    @property
    def seed(self) -> int:
        return int(self.config.get("seed", 0))

    @property
    def env(self) -> str:
        return str(self.config.get("env.id", "?"))

    @cached_property
    def score(self) -> str:
        """What tells how good it is: of several tasks the score, else the mean return."""
        return "score" if len(tasks(self.env)) > 1 else "mean_return"

    @property
    def finished(self) -> bool:
        """Also where it was killed between its last env step and its summary."""
        whole = self.lines[-1]["env_steps"] >= self.config.get("steps", math.inf) if self.lines else False
        return self.summary.get("status") == "finished" or whole

    def series(self, y: str, x: str = "env_steps") -> tuple[Array, Array]:
        """The lines that tell both, by growing x: `[N]` and `[N]`."""
        rows = [(line[x], line[y]) for line in self.lines if line.get(x) is not None and line.get(y) is not None]
        points = np.array(sorted(rows), np.float64).reshape(-1, 2)
        return points[:, 0], points[:, 1]

    def names(self, prefix: str) -> list[str]:
        """What the lines tell under a prefix (`stage/`), in order of appearance."""
        return list(dict.fromkeys(name for line in self.lines for name in line if name.startswith(prefix)))


def read_run(folder: str | Path) -> RecordedRun:
    """Raises `ConfigError` where there is no run."""
    folder = Path(folder)
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        raise ConfigError(f"{folder}: no run is there (no config.json that can be read)") from None
    return RecordedRun(folder, flat(config), read_metrics(folder), *map(_read, (folder / f for f in _MORE)))


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A config's sections and fields as it is typed: "optim.lr"."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}


@dataclass(frozen=True)
class Method:
    """Runs that differ by their seed and by where they ran."""

    label: str
    runs: list[RecordedRun]


def differences(runs: Sequence[RecordedRun]) -> dict[str, list[Any]]:
    """Options in which runs differ, with each run's value; None where a run's version did not have it."""
    names = dict.fromkeys(name for run in runs for name in run.config)
    found = {name: [run.config.get(name) for run in runs] for name in names if not name.startswith(_PLACE)}
    return {name: values for name, values in found.items() if any(value != values[0] for value in values)}


def methods(runs: Sequence[RecordedRun]) -> list[Method]:
    """The runs, those of the same settings together, each named by its preset and by what tells it from the others.

    Different envs do not make different methods: a method that was run on several games is one.
    """
    differ = {name: values for name, values in differences(runs).items() if name != "env.id"}
    groups: dict[str, list[int]] = {}
    for i, run in enumerate(runs):
        key = {"preset": run.preset, **{name: values[i] for name, values in differ.items()}}
        groups.setdefault(json.dumps(key, sort_keys=True, default=str), []).append(i)
    presets = [runs[group[0]].preset for group in groups.values()]
    found = []
    for group, preset in zip(groups.values(), presets, strict=True):
        own = ""
        if presets.count(preset) > 1:
            alike = [i for i, run in enumerate(runs) if run.preset == preset]
            tell = [name for name, values in differ.items() if any(values[i] != values[alike[0]] for i in alike)]
            own = ", ".join(f"{name} {option_text(differ[name][group[0]])}" for name in tell)
        found.append(Method(f"{preset} ({own})" if own else preset, [runs[i] for i in group]))
    return found


def option_text(value: Any) -> str:
    """An option's value as it is typed."""
    return "-" if value is None else " ".join(map(str, value)) if isinstance(value, list) else str(value)


def find_runs(given: Iterable[str]) -> list[RecordedRun]:
    """Each a run's folder, or a folder of runs. Raises `ConfigError` where there is neither, or the same run twice."""
    found: list[RecordedRun] = []
    for name in given:
        folder = Path(name)
        inner = [] if (folder / "config.json").exists() else sorted(p.parent for p in folder.glob("*/config.json"))
        found += [read_run(path) for path in inner or [folder]]
    seen = [run.folder.resolve() for run in found]
    if twice := next((path for path in seen if seen.count(path) > 1), None):
        raise ConfigError(f"{twice}: is named twice")
    return found
