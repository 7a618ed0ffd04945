"""The figures as data: `figures/*.toml`, a file for each paper, and how a figure's texts become commands and notes.

A `[figure.NAME]` has a title, the three sizes, the runs, the names of its drawings (`drawings.py`) and the paper's
values. Texts are Jinja templates in single braces. They see what the size sets, and the file's `[words]`, which are
replaced first; a word may use those above it. A list in a size is swept: each run that mentions it is made once for
each of its values, and `{env}` is each of the size's envs.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined, meta

from coterie.envs.tasks import are_normalized
from coterie.tools.report.runs import RecordedRun

MISSING = "paper's value not available here"
BUDGETS = ("smoke", "small", "full")
_NOUNS = {
    "steps": "env steps",
    "seeds": "runs of each",
    "batch": "samples in a batch",
    "trajectories": "trajectories in the replay",
    "bonus_episodes": "episodes of each worker with the bonus",
}


@dataclass(frozen=True)
class Size:
    """How large a figure is drawn. `values`: what else its runs mention, such as `simulators`; lists are swept."""

    envs: tuple[str, ...]
    steps: int = 0  # env steps of each run
    seconds: float = 0  # of each measurement, where nothing is trained
    seeds: int = 1
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def atari(self) -> bool:
        """Whether all envs are Atari games with human scores."""
        return are_normalized(self.envs)

    @property
    def variables(self) -> dict[str, Any]:
        """What texts can mention."""
        every = {"steps": self.steps, "seconds": self.seconds, "seeds": self.seeds, "learners": 2, **self.values}
        return {**every, "envs": self.envs, "all_envs": ",".join(self.envs), "env": "{env}", "atari": self.atari}


@dataclass(frozen=True)
class Arm:
    """One curve, bar or point: a command for every env and seed. `{env}` in `args` stands for each of the envs."""

    label: str
    args: tuple[str, ...]
    key: str  # the run's name in the figure's data, before its values are filled in
    panel: str = ""  # the chart that it belongs to, where there are several
    x: float = math.nan  # its place on the figure's x axis, where it has one
    point: Any = None  # its value of what is swept
    envs: tuple[str, ...] | None = None  # its own, where they are not the figure's


@dataclass
class ArmResult:
    """An arm's runs (by env, then seed), its commands' JSON reports, and greedy evaluations by env."""

    arm: Arm
    runs: list[RecordedRun] = field(default_factory=list)
    reports: list[dict[str, Any]] = field(default_factory=list)
    evaluations: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def envs(self) -> list[str]:
        return list(dict.fromkeys(run.env for run in self.runs))

    def of(self, env: str) -> list[RecordedRun]:
        return [run for run in self.runs if run.env == env]


@dataclass(frozen=True)
class Check:
    """What the claim says of a measure. A side is a run's key, "PANEL: LABEL, X" of one run, or a number: a limit."""

    measure: str  # of `measures.py`, or "convergent"
    above: str | float
    below: str | float
    or_equal: bool = False


@dataclass(frozen=True)
class Figure:
    """A `[figure.NAME]`. `claim`: what the paper states; without `checks` also why that cannot be checked. `runs`:
    commands by "LABEL" or "PANEL: LABEL". `paper`: its values by a run's name (one, or a list along what is swept or
    along the full size's envs), and whatever else it states by what that is.
    """

    name: str
    source: str
    words: Mapping[str, str]
    title: str
    claim: str
    checks: Sequence[Check]
    runs: Mapping[str, str]
    draw: Sequence[str]  # "KIND" or "KIND MEASURE"
    sizes: dict[str, Size]  # "smoke" (does it run), "small" (minutes on two cores), "full" (towards the paper's)
    smaller: str  # how it differs from the paper's
    paper: Mapping[str, str | list[str]]
    in_paper: Mapping[str, int] = field(default_factory=dict)  # the paper's sizes, for `{fewer}` in `smaller`
    x: str = ""  # label of the x axis, where runs are points along what is swept
    verb: str = "train"  # or "bench" or "plan", whose JSON is kept
    timed: bool = False  # the drawing depends on speed: one run at a time
    evaluate: int = 0  # episodes of a greedy evaluation of the best seed's newest checkpoint; 0: none

    def arms(self, size: Size) -> list[Arm]:
        """The figure's runs at some size, each with every value of what it sweeps."""
        found = []
        for key, command in self.runs.items():
            for point, variables in self._sweep(f"{key} {command}", size):
                panel, _, label = self._render(key, variables).rpartition(": ")
                last = point[-1] if isinstance(point, list) else point
                x = math.nan if point is None or not self.x else float(last)
                envs = (",".join(size.envs),) if "{all_envs}" in command else None
                args = tuple(self._render(command, variables).split())
                found.append(Arm(label, args, key, panel, x, point, envs))
        return found

    def notes(self, size: Size) -> str:
        """How this size differs from the paper's."""
        less = []
        for name, theirs in self.in_paper.items():
            value = size.variables[name]
            ours = max(value) if isinstance(value, list) else value
            if ours < theirs:
                less.append(f"{ours:,} {_NOUNS.get(name, name)} instead of {theirs:,}")
        fewer = f"{'; '.join(less)}." if less else ""
        return " ".join(self._render(self.smaller, {**size.variables, "fewer": fewer}).split())

    def value_in_paper(self, arm: Arm, env: str) -> str:
        """The paper's value for an arm on an env."""
        value = self.paper.get(arm.key, MISSING)
        if isinstance(value, str):
            return value
        full = self.sizes["full"]
        name = self._swept(arm.key + self.runs[arm.key], full)
        along, at = (full.values[name], arm.point) if name else (list(full.envs), env)
        return value[along.index(at)] if at in along else MISSING

    @property
    def stated(self) -> list[tuple[str, str]]:
        """What the paper states apart from values of single runs."""
        return [(name, value) for name, value in self.paper.items() if name not in self.runs and isinstance(value, str)]

    def _sweep(self, text: str, size: Size) -> Iterator[tuple[Any, dict[str, Any]]]:
        name = self._swept(text, size)
        for point in size.values[name] if name else [None]:
            yield point, {**size.variables, **({name: point} if name else {})}

    def _swept(self, text: str, size: Size) -> str:
        """The list of the size that a run mentions; empty if it mentions none."""
        mentioned = meta.find_undeclared_variables(_jinja().parse(self.filled(text)))
        return next((n for n, value in size.values.items() if isinstance(value, list) and n in mentioned), "")

    def filled(self, text: str) -> str:
        """A text with its words replaced."""
        for name, word in reversed(list(self.words.items())):
            text = text.replace(f"{{{name}}}", word)
        return text

    def _render(self, text: str, variables: Mapping[str, Any]) -> str:
        return _jinja().from_string(self.filled(text)).render(variables)


@cache
def _jinja() -> Environment:
    found = Environment(variable_start_string="{", variable_end_string="}", undefined=StrictUndefined)
    found.globals.update(max=max, min=min)
    return found


def read_figures(text: str) -> dict[str, Figure]:
    """The figures of a TOML file."""
    data = tomllib.loads(text)
    found = {}
    for name, entry in data["figure"].items():
        sizes = {budget: entry.pop(budget) for budget in BUDGETS}
        entry["checks"] = [Check(**check) for check in entry["checks"]]
        figure = found[name] = Figure(name, data["source"], data.get("words", {}), sizes={}, **entry)
        for budget, size in sizes.items():
            envs = tuple(figure.filled(size.pop("envs")).split())
            named = {key: size.pop(key) for key in ("steps", "seconds", "seeds") if key in size}
            figure.sizes[budget] = Size(envs, values=size, **named)
    return found


_FOLDER = files("coterie.tools.reproduce") / "figures"
FIGURES: dict[str, Figure] = {}
for _paper in ("gala", "a3c-gae", "accelerated", "impala", "seed", "staleness"):
    FIGURES |= read_figures((_FOLDER / f"{_paper}.toml").read_text())
