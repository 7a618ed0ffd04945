"""Recorded runs: a folder's config, metrics and summary. Runs that differ only by their seed are one method."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from coterie.envs.tasks import tasks
from coterie.errors import ConfigError
from coterie.plugins import label
from coterie.presets.common import flat
from coterie.runs.files import read_json, was_killed
from coterie.runs.metrics import read_metrics
from coterie.types import Array

_MORE = ("summary.json", "machine.json")
# Options that do not make a different method: where a run went.
_PLACE = ("seed", "out", "log.", "ray.", "wire.", "preset")


@dataclass(frozen=True)
class RecordedRun:
    """The content of a run's folder."""

    folder: Path
    config: dict[str, Any]  # flat: "optim.lr" -> 0.001
    lines: list[dict[str, Any]] = field(repr=False)
    summary: dict[str, Any] = field(repr=False)  # empty while it runs
    machine: dict[str, Any] = field(repr=False)  # empty for runs of older versions

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
        """The metric to compare runs by: the score over several tasks, else the mean return."""
        return "score" if len(tasks(self.env)) > 1 else "mean_return"

    @property
    def status(self) -> str:
        return str(self.summary.get("status") or ("killed" if was_killed(self.folder) else "running"))

    @property
    def finished(self) -> bool:
        """True also if it was killed between its last env step and its summary."""
        reached = max((line["env_steps"] for line in self.lines), default=0)
        return self.summary.get("status") == "finished" or reached >= self.config.get("steps", math.inf)

    @property
    def ended_early(self) -> bool:
        """Whether something, such as a callback, ended it before the env steps that it was to make."""
        made = self.summary.get("env_steps", math.inf)
        return self.summary.get("status") == "finished" and bool(made < self.config.get("steps", 0))

    def series(self, y: str, x: str = "env_steps") -> tuple[Array, Array]:
        """The lines that have both, by increasing x: `[N]` and `[N]`."""
        rows = [(line[x], line[y]) for line in self.lines if line.get(x) is not None and line.get(y) is not None]
        points = np.array(sorted(rows), np.float64).reshape(-1, 2)
        return points[:, 0], points[:, 1]

    def names(self, prefix: str) -> list[str]:
        """The metrics under a prefix (`stage/`), in order of appearance."""
        return list(dict.fromkeys(name for line in self.lines for name in line if name.startswith(prefix)))


def read_run(folder: str | Path) -> RecordedRun:
    """Raises `ConfigError` if there is no run."""
    folder = Path(folder)
    try:
        config = flat(json.loads((folder / "config.json").read_text()))
        config = {name: label(x) if isinstance(x, str) else x for name, x in config.items()}
    except (OSError, ValueError, AttributeError):  # the last: it holds no object
        raise ConfigError(f"{folder}: not a run folder (no readable config.json)") from None
    return RecordedRun(folder, config, read_metrics(folder), *(read_json(folder / name, dict) or {} for name in _MORE))


@dataclass(frozen=True)
class Method:
    """Runs that differ only by their seed, their env and where they ran."""

    label: str
    runs: list[RecordedRun]

    def on(self, env: str) -> list[RecordedRun]:
        return [run for run in self.runs if run.env == env]


def differences(runs: Sequence[RecordedRun]) -> dict[str, list[Any]]:
    """Options in which runs differ, with each run's value; None if a run's version did not have the option."""
    names = dict.fromkeys(name for run in runs for name in run.config)
    found = {name: [run.config.get(name) for run in runs] for name in names if not name.startswith(_PLACE)}
    if len({(run.preset, run.env, run.config.get("steps")) for run in runs}) == len({(x.preset, x.env) for x in runs}):
        found.pop("steps", None)  # a preset has one number of them for each env
    return {name: values for name, values in found.items() if any(value != values[0] for value in values)}


def methods(runs: Sequence[RecordedRun]) -> list[Method]:
    """Runs grouped by their settings, each group named by its preset and as few options as tell it from others of that
    preset. Different envs do not make different methods.
    """
    differ = {name: values for name, values in differences(runs).items() if name != "env.id"}
    groups: dict[str, list[int]] = {}
    for i, run in enumerate(runs):
        key = {"preset": run.preset, **{name: values[i] for name, values in differ.items()}}
        groups.setdefault(json.dumps(key, sort_keys=True, default=str), []).append(i)
    labels: dict[int, str] = {}
    firsts = [group[0] for group in groups.values()]
    for preset in dict.fromkeys(runs[i].preset for i in firsts):
        alike = [i for i in firsts if runs[i].preset == preset]
        texts = {name: [option_text(values[i]) for i in alike] for name, values in differ.items()}
        labels |= zip(alike, _labels(preset, len(alike), texts), strict=True)
    return [Method(labels[group[0]], [runs[i] for i in group]) for group in groups.values()]


def _labels(preset: str, count: int, options: dict[str, list[str]]) -> list[str]:
    """Names of the methods of a preset, by the options that tell the most of them apart. Where that takes more than
    three options, each name has only those whose value is not the commonest one.
    """
    chosen: list[str] = []
    rows: list[tuple[str, ...]] = [()] * count
    while len(set(rows)) < count and len(chosen) < len(options):
        best = max(options, key=lambda name: len(set(zip(rows, options[name], strict=True))))
        chosen.append(best)
        rows = [(*row, text) for row, text in zip(rows, options[best], strict=True)]
    usual = {name: Counter(texts).most_common(1)[0][0] for name, texts in options.items()}
    labels = []
    for i in range(count):
        unusual = [name for name, texts in options.items() if texts[i] != usual[name]]
        shown = chosen if len(chosen) <= 3 else [name for name in chosen if name in unusual] or unusual[:3]
        told = ", ".join(f"{name} {options[name][i] or 'empty'}" for name in shown)
        labels.append(f"{preset} ({told})" if told else preset)
    return labels


def option_text(value: Any) -> str:
    """An option's value as on the command line."""
    return "-" if value is None else " ".join(map(str, value)) if isinstance(value, list) else str(value)


def find_runs(given: Iterable[str]) -> list[RecordedRun]:
    """The runs of folders, each a run's or one of runs. Raises `ConfigError` for neither, and for a run given twice."""
    found = list[RecordedRun]()
    for folder in map(Path, given):
        stem = re.sub(r"(\.args)?\.(json|txt)$", "", str(folder))
        if folder.is_file() and Path(f"{stem}.args.json").exists():
            continue  # what a sweep wrote beside its folders: the shell's `sweep-*` names it, too
        runs = {folder: (folder / "config.json").exists()}
        for below in ("*/config.json", "*/*/config.json"):  # of a sweep, of a folder of sweeps
            runs |= {p.parent: True for p in sorted(folder.glob(below)) if not runs.get(p.parent.parent)}
        found += [read_run(path) for path, is_run in runs.items() if is_run] or [read_run(folder)]
    if not found:
        raise ConfigError(f"{folder}: not a run folder")
    seen = [run.folder.resolve() for run in found]
    if twice := next((path for path in seen if seen.count(path) > 1), None):
        raise ConfigError(f"{twice}: is given twice")
    return found
