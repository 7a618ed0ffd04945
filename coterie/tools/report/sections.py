"""What a page shows of some methods: charts, aggregates over games, and tables."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from coterie.envs.atari57 import human_normalized
from coterie.envs.tasks import tasks
from coterie.tools.report.charts import Chart, Line, heatmap, histogram, intervals, lines, stacked
from coterie.tools.report.runs import Method, RecordedRun, differences, option_text
from coterie.tools.report.stats import band, interquartile_mean, interval, on_grid
from coterie.types import Array

_ELSEWHERE = ("stage/actor/", "stage/host/")  # by whom
_LAST = 0.1  # of a run's env steps, over which its final return is the mean
Axis = tuple[str, str, Callable[[RecordedRun, str], tuple[Array, Array]]]


@dataclass(frozen=True)
class Table:
    """`rows` under `head`, all of them text."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    text: str = ""


def _per_kilojoule(run: RecordedRun, y: str) -> tuple[Array, Array]:
    """Over the kilojoules of all lives of the run: the counter begins anew with each."""
    rows = [(line["joules"], line[y]) for line in run.lines if line.get("joules") and line.get(y) is not None]
    points = np.array(rows, np.float64).reshape(-1, 2)
    used = np.diff(points[:, 0], prepend=0.0)
    used = np.where(used < 0, points[:, 0], used)
    return used.cumsum() / 1e3, points[:, 1]


AXES: tuple[Axis, ...] = (
    ("env steps", "step", lambda run, y: run.series(y)),
    ("seconds", "second", lambda run, y: run.series(y, "seconds")),
    ("energy of the machine, kJ", "kilojoule", _per_kilojoule),
)


def returns(methods: Sequence[Method], about: str = "") -> list[Chart]:
    """Returns per env step, second and kilojoule, a chart for each game: mean over seeds with a 95% band. `about`: what
    their titles begin with.
    """
    found = []
    games = list(dict.fromkeys(run.env for method in methods for run in method.runs))
    for game in games:
        for label, unit, series in AXES:
            curves = []
            for method in methods:
                runs = [run for run in method.runs if run.env == game]
                grid, each = on_grid([series(run, run.score) for run in runs])
                if len(grid) > 1:
                    seeds = f", {len(each)} seeds" if len(each) > 1 else ""
                    curves.append(Line(f"{method.label}{seeds}", grid, *band(each)))
            if curves:
                title = f"{about}{game}: return per {unit}"
                text = (
                    "Mean over seeds, as far as all of them went; the band is a 95% bootstrap interval of that mean."
                    * any(curve.low is not None and np.isfinite(curve.low).any() for curve in curves)
                )
                found.append(lines(title, curves, label, _unit(game), text))
    return found


def _unit(env: str) -> str:
    return "score over all tasks" if len(tasks(env)) > 1 else "return, mean of the last 100 games"


def evaluations(methods: Sequence[Method]) -> list[Chart]:
    """Greedy evaluations of every run that made some."""
    found = []
    for game in dict.fromkeys(run.env for method in methods for run in method.runs):
        curves = []
        for method in methods:
            for run in (run for run in method.runs if run.env == game):
                x, y = run.series("eval/return")
                _, error = run.series("eval/stderr")
                if len(x):
                    around = (y - error, y + error) if len(error) == len(y) else (None, None)
                    curves.append(Line(f"{method.label}, seed {run.seed}", x, y, *around))
        if curves:
            text = "Bands: one standard error over the games of an evaluation."
            found.append(lines(f"{game}: evaluations", curves, "env steps", "return of evaluation games", text))
    return found


def final_return(run: RecordedRun) -> float:
    """Mean over the last tenth of the run's env steps, NaN where no game has ended."""
    x, y = run.series(run.score)
    return float(y[x >= x[-1] * (1 - _LAST)].mean()) if len(x) else math.nan


def aggregates(methods: Sequence[Method]) -> tuple[list[Chart], Table]:
    """Interquartile mean of each method's final scores, with a bootstrap interval stratified by game.

    On several games the scores are human-normalised, where all are Atari games; otherwise no scale is common to them,
    and each game is an aggregate by itself.
    """
    games = sorted({run.env for method in methods for run in method.runs})
    normalised = len(games) > 1 and all(human_normalized(game, 0.0) is not None for game in games)
    rows: list[tuple[str, float, float, float]] = []
    for subset in [games] if normalised or len(games) == 1 else [[game] for game in games]:
        for method in methods:
            strata = []
            for game in subset:
                scores = np.array([final_return(run) for run in method.runs if run.env == game and run.finished])
                scores = scores[np.isfinite(scores)]
                if normalised:
                    scores = np.array([human_normalized(game, s) for s in scores], np.float64)
                if len(scores):
                    strata.append(scores)
            if strata:
                where = f"{subset[0]}, " if len(games) > 1 and not normalised else ""
                middle = interquartile_mean(np.concatenate(strata))
                rows.append((f"{where}{method.label}", middle, *interval(strata)))
    unit = "human-normalised score (0 random, 1 human)" if normalised else "return"
    title = "Final scores: interquartile mean"
    text = (
        "Of each run the mean return over the last tenth of its env steps; the middle half of the runs counts "
        "(Agarwal et al. 2021), with a 95% bootstrap interval stratified by game where there are several seeds."
    )
    if left := sum(not run.finished for method in methods for run in method.runs):
        text += f" {left} that have not finished are left out."
    shown = [[label, _number(value), _range(low, high)] for label, value, low, high in rows]
    charts = [intervals(title, rows, unit, text)] if len(rows) > 1 else []
    return charts, Table(title, ["method", unit, "95% interval"], shown, text)


def machinery(method: Method) -> list[Chart]:
    """Of a method's first run: how old the weights that acted were, how far apart the learners, what took how long."""
    found, run = [], method.runs[0]
    who = f"{method.label} on {run.env}, seed {run.seed}"
    lags = {int(k): float(v) for k, v in run.summary.get("policy_lag", {}).items()}
    if lags and (len(lags) > 1 or 0 not in lags):
        mean = sum(k * v for k, v in lags.items()) / sum(lags.values())
        found.append(histogram(f"Policy lag: {who}", lags, "age of the weights that acted, learner steps", "env steps",
                               f"Mean {mean:.3g}, at most {max(lags)} learner steps."))  # fmt: skip
    consensus = []
    for name, label in (
        ("consensus/distance", "distance to the mean of the learners' weights"),
        ("consensus/bound", "bound of GALA's Proposition 1"),
        ("consensus/radius", "radius of GALA's Proposition 2"),
    ):
        x, y = run.series(name)
        if len(np.unique(x)) > 1:
            consensus.append(Line(label, x, y))
    if consensus:
        positive = all((line.y > 0).any() for line in consensus)
        found.append(lines(f"Consensus: {who}", consensus, "env steps", "Frobenius norm", log_y=positive))
    if (pairs := cosines(run)) is not None:
        ranks = [str(i) for i in range(len(pairs))]
        found.append(heatmap(f"Gradients: {who}", pairs, ranks, ranks, "cosine of two learners' gradients",
                             "Mean over the run's comparisons."))  # fmt: skip
    stages = {name: run.series(name) for name in run.names("stage/")}
    if stages:
        x = max((x for x, _ in stages.values()), key=len)
        own = {k: np.interp(x, *series) for k, series in stages.items() if len(series[0])}
        for who_acts, parts in (
            ("the learner's time", {k: v for k, v in own.items() if not k.startswith(_ELSEWHERE)}),
            ("the actors' time", {k: v for k, v in own.items() if k.startswith(_ELSEWHERE[0])}),
            ("the hosts' time", {k: v for k, v in own.items() if k.startswith(_ELSEWHERE[1])}),
        ):
            if parts and len(np.unique(x)) > 1:
                shares = {k.rpartition("/")[2]: 100 * v for k, v in parts.items()}
                text = f"On average {', '.join(f'{k} {v.mean():.0f}%' for k, v in shares.items())}."
                found.append(stacked(f"Where {who_acts} goes: {who}", x, shares, "env steps", "share, %", text))
    return found


def cosines(run: RecordedRun) -> Array | None:
    """`[learners, learners]` means of `cosine/i-j`, or None."""
    pairs = {}
    for name in run.names("cosine/"):
        one, _, other = name.partition("/")[2].partition("-")
        if one.isdigit() and other.isdigit():
            pairs[int(one), int(other)] = run.series(name)[1].mean()
    if not pairs:
        return None
    table = np.full([1 + max(max(pair) for pair in pairs)] * 2, np.nan)
    np.fill_diagonal(table, 1.0)
    for (i, j), value in pairs.items():
        table[i, j] = table[j, i] = value
    return table


def outcomes(methods: Sequence[Method]) -> Table:
    """Each run's end in numbers."""
    rows = []
    for method in methods:
        for run in method.runs:
            last = run.lines[-1] if run.lines else {}
            evals = run.series("eval/return")[1]
            told = {**last, **run.summary}
            kilojoule = (run.summary.get("energy") or {}).get("frames_per_kj")
            rows.append([
                str(run.folder), method.label, run.env, str(run.seed), str(told.get("status", "goes on")),
                _number(told.get("env_steps"), whole=True), _number(told.get("seconds"), whole=True),
                _number(told.get("env_steps_per_s"), whole=True), _number(final_return(run)),
                _number(max(evals) if len(evals) else None), _number(kilojoule, whole=True),
            ])  # fmt: skip
    head = [
        "run", "method", "env", "seed", "status", "env steps", "seconds", "env steps/s", "final return",
        "best evaluation", "frames/kJ",
    ]  # fmt: skip
    return Table("Runs", head, rows)


def settings(methods: Sequence[Method]) -> Table | None:
    """Options in which the methods differ."""
    first = [method.runs[0] for method in methods]
    differ = {name: values for name, values in differences(first).items() if name != "env.id"}
    if not differ:
        return None
    rows = [[name, *map(option_text, values)] for name, values in differ.items()]
    return Table("What differs", ["option", *(method.label for method in methods)], rows)


def changes(run: RecordedRun, default: dict[str, Any]) -> Table | None:
    """Options that are not as the preset has them; `default` as flat as the run's config."""
    rows = [
        [name, option_text(default.get(name)), option_text(value)]
        for name, value in run.config.items()
        if value != default.get(name) and name not in ("seed", "out") and not _was_auto(name, default.get(name))
    ]
    return (
        Table(f"Changed from preset {run.config.get('preset')}", ["option", "preset", "here"], rows) if rows else None
    )


def _was_auto(name: str, value: Any) -> bool:
    """Whether the preset left it to the machine: what that came to is nobody's change."""
    return value == "auto" or (name in ("env.num_envs", "env.threads", "env.groups") and value == 0)


def checklist(methods: Sequence[Method]) -> Table:
    """What the machine learning reproducibility checklist (Pineau et al. 2020) asks of experiments, as far as runs
    can tell.
    """
    runs = [run for method in methods for run in method.runs]
    machines = [run.machine for run in runs if run.machine]

    def each(values: list[str]) -> str:
        return (
            "; ".join(f"{value} ({n} runs)" if len(counts) > 1 else value for value, n in counts.items())
            if (counts := Counter(values))
            else "not recorded (the run goes on, or is of an older version)"
        )

    seeds = sorted({run.seed for run in runs})
    hours = sum(float(run.lines[-1]["seconds"]) for run in runs if run.lines) / 3600
    rows = [
        ["command", each([m["command"] for m in machines])],
        ["settings", "all are in config.json of each run's folder; `coterie train FOLDER/config.json` runs it again"],
        ["how settings were chosen", "not known to this page: say so where you publish it"],
        ["runs", f"{len(runs)}, of {len(methods)} methods; all that were given to this page are shown"],
        ["seeds", ", ".join(map(str, seeds))],
        ["measure", "undiscounted return of whole training games, mean of the last 100; evaluations where drawn"],
        ["central tendency and variation", "mean over seeds, interquartile mean; 95% bootstrap intervals over seeds"],
        ["software", each([", ".join(f"{k} {v}" for k, v in m["versions"].items()) for m in machines])],
        ["computing", each([f"{m['processor']}, {m['cores']} cores, {m['gpus']} GPUs" for m in machines])],
        ["system", each([m["system"] for m in machines])],
        ["time", f"{hours:.2f} h of all runs together"],
    ]  # fmt: skip
    return Table("Reproducibility", ["asked", "answer"], rows)


def _number(value: Any, whole: bool = False) -> str:
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:,.0f}" if whole else f"{value:,.4g}"


def _range(low: float, high: float) -> str:
    return f"{_number(low)} to {_number(high)}" if math.isfinite(low) else "needs several seeds"
