"""What a figure is: runs at some size, what is drawn of them, the paper's numbers, and how it is smaller than there."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from coterie.tools.report.charts import Chart
from coterie.tools.report.runs import RecordedRun
from coterie.tools.report.sections import Table

MISSING = "paper's value not available here"


@dataclass(frozen=True)
class Size:
    """How large a figure is drawn. `points` are the values of what is swept, where something is."""

    steps: int  # env steps of each run
    envs: tuple[str, ...]
    seeds: int = 1
    points: tuple[int, ...] = ()
    learners: int = 2  # where there are several
    seconds: float = 0.0  # of each measurement, where nothing is trained


@dataclass(frozen=True)
class Arm:
    """One curve, bar or row: a command for every env and seed. `label` is the legend's, `x` its place on an axis that
    is swept, `panel` the chart that it belongs to where there are several.

    `verb`: "train", or "bench" or "plan", whose JSON is kept. `{env}` in `args` stands for each of the figure's envs.
    """

    label: str
    args: tuple[str, ...]
    x: float = math.nan
    panel: str = ""
    verb: str = "train"
    envs: tuple[str, ...] | None = None  # its own, where they are not the figure's


@dataclass
class Result:
    """What became of an arm: its runs (by env, then seed), what its commands told, and greedy evaluations by env."""

    arm: Arm
    runs: list[RecordedRun] = field(default_factory=list)
    told: list[dict[str, Any]] = field(default_factory=list)
    evaluations: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def envs(self) -> list[str]:
        return list(dict.fromkeys(run.env for run in self.runs))


@dataclass(frozen=True)
class Drawing:
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()


Draw = Callable[[Sequence[Result], Size], Drawing]


Note = str | Callable[[Size], str]  # what is not as in the paper; of a size: empty where it is


def on(envs: Sequence[str], text: str) -> Note:
    """Where one of these envs is used."""
    return lambda size: text if set(envs) & set(size.envs) else ""


def early(text: str, steps: int = 1_000_000) -> Note:
    """In runs of fewer env steps."""
    return lambda size: text if size.steps < steps else ""


def fewer(points: str = "", largest: int = 0, **paper: int) -> Note:
    """What there is less of than in the paper: of `steps`, `seeds`, `learners`, and of what the points count."""

    def told(size: Size) -> str:
        pairs = [(getattr(size, name), n, _COUNTED[name]) for name, n in paper.items()]
        if points:
            pairs.append((max(size.points), largest, points))
        less = [f"{ours:,} {name} instead of {theirs:,}" for ours, theirs, name in pairs if ours < theirs]
        return f"{'; '.join(less)}." if less else ""

    return told


_COUNTED = {"steps": "env steps", "seeds": "runs of each", "learners": "learners"}


@dataclass(frozen=True)
class Figure:
    """`sizes`: "smoke" (does it run), "small" (minutes on two cores) and "full" (as far as it goes, the paper's)."""

    name: str
    paper: str
    title: str
    arms: Callable[[Size], list[Arm]]
    draw: Draw
    sizes: Mapping[str, Size]
    scaled: Sequence[Note]
    said: Sequence[tuple[str, str]] = ()  # what the paper states, where no table of the drawing has it
    timed: bool = False  # what is drawn depends on how fast it goes: one run at a time
    evaluate: int = 0  # games of a greedy evaluation of the best seed's best checkpoint; 0: none


NOT_READ = ("curves", "not read off here")
ATARI = ("BeamRider-v5", "Breakout-v5", "Pong-v5", "Qbert-v5", "Seaquest-v5", "SpaceInvaders-v5")

PAPERS = {
    "gala": "GALA (Assran et al. 2019, arXiv 1906.04585)",
    "a3c-gae": "A3C with GAE (Christensen and Hansen)",
    "accel": "Accelerated Methods for Deep RL (Stooke and Abbeel 2018, arXiv 1803.02811)",
    "impala": "IMPALA (Espeholt et al. 2018, arXiv 1802.01561)",
    "seed": "SEED RL (Espeholt et al. 2020, arXiv 1910.06591)",
}
