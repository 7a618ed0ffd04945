"""The charts of a page: returns, evaluations, aggregates over envs with their table, and diagnostics."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from coterie.envs.atari57 import human_normalized
from coterie.envs.tasks import are_normalized, tasks
from coterie.errors import counted
from coterie.tools.report.charts import Chart, Line, heatmap, histogram, intervals, lines, stacked
from coterie.tools.report.runs import Method, RecordedRun
from coterie.tools.report.stats import band, interquartile_mean, interval, on_grid
from coterie.tools.report.tables import Table, final_return, number
from coterie.types import Array

_ACTORS, _HOSTS, _POINTS = "stage/actor/", "stage/host/", 300
Axis = tuple[str, str, Callable[[RecordedRun, str], tuple[Array, Array]]]


def _per_kilojoule(run: RecordedRun, y: str) -> tuple[Array, Array]:
    """Over the kilojoules of the whole run: the counter begins at zero again when a run is resumed."""
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


def _envs(methods: Sequence[Method]) -> list[str]:
    return list(dict.fromkeys(run.env for method in methods for run in method.runs))


def _drawn(method: Method, env: str) -> list[RecordedRun]:
    """The runs that went to their end, of which none cuts the mean curve; without one, those that a callback ended;
    all as long as none is finished.
    """
    runs = method.on(env)
    finished = [run for run in runs if run.finished]
    return [run for run in finished if not run.ended_early] or finished or runs


def _repeats(method: Method, env: str) -> bool:
    """Whether a seed is there twice: such runs may be equal."""
    runs = method.on(env)
    return len({run.seed for run in runs}) < len(runs)


def returns(methods: Sequence[Method], about: str = "") -> list[Chart]:
    """Returns per env step, second and kilojoule, a chart for each env: mean over seeds with a 95% band. `about`: what
    their titles begin with.
    """
    found = []
    for env in _envs(methods):
        unit = "score over all tasks" if len(tasks(env)) > 1 else "return, mean of the last 100 episodes"
        for label, per, series in AXES:
            curves, drawn = [], 0
            for method in methods:
                grid, each = on_grid([series(run, run.score) for run in _drawn(method, env)])
                if len(grid) > 1:
                    drawn += len(each)
                    what = "runs" if _repeats(method, env) else "seeds"
                    seeds = f", {len(each)} {what}" if len(each) > 1 else ""
                    curves.append(Line(f"{method.label}{seeds}", grid, *band(each)))
            if curves:
                banded = any(curve.low is not None and np.isfinite(curve.low).any() for curve in curves)
                text = "Mean over seeds, as far as all of them went; the band is a 95% bootstrap interval of that mean."
                short = sum(len(method.on(env)) for method in methods) - drawn
                missing = f" Not drawn: {counted(short, 'run')} that did not go to their end, or with too few values."
                found.append(
                    lines(f"{about}{env}: return per {per}", curves, label, unit, text * banded + missing * (short > 0))
                )
    return found


def evaluations(methods: Sequence[Method]) -> list[Chart]:
    """Greedy evaluations of all runs that have some."""
    found = []
    for env in _envs(methods):
        curves = []
        for method in methods:
            for run in method.on(env):
                x, y = run.series("eval/return")
                _, error = run.series("eval/stderr")
                if len(x):
                    around = (y - error, y + error) if len(error) == len(y) else (None, None)
                    curves.append(Line(f"{method.label}, seed {run.seed}", x, y, *around))
        if curves:
            text = "Bands: one standard error over the episodes of an evaluation."
            unit = "score over all tasks" if len(tasks(env)) > 1 else "return of evaluation episodes"
            found.append(lines(f"{env}: evaluations", curves, "env steps", unit, text))
    return found


def aggregates(methods: Sequence[Method]) -> tuple[list[Chart], Table]:
    """Interquartile mean of each method's final scores, with a bootstrap interval stratified by env.

    Over several Atari games the scores are human-normalized. Other envs have no common scale, so each is an aggregate
    by itself.
    """
    envs, alone = sorted(_envs(methods)), ""
    normalized = len(envs) > 1 and are_normalized(envs)
    if normalized:  # else each method's mean would be over other games
        some = [method for method in methods if any(run.finished for run in method.runs)]
        shared = [env for env in envs if all(any(run.finished for run in method.on(env)) for method in some)]
        alone = ", ".join(env for env in envs if env not in shared)
        envs, normalized = shared or envs, bool(shared)
    apart = len(envs) > 1 and not normalized
    rows: list[tuple[str, float, float, float]] = []
    for subset in [[env] for env in envs] if apart else [envs]:
        for method in methods:
            strata = []
            for env in subset:
                scores = np.array([final_return(run) for run in method.on(env) if run.finished])
                scores = scores[np.isfinite(scores)]
                if normalized:
                    scores = np.array([human_normalized(env, s) for s in scores], np.float64)
                if len(scores):
                    strata.append(scores)
            if strata:
                label = f"{subset[0]}, {method.label}" if apart else method.label
                rows.append((label, interquartile_mean(np.concatenate(strata)), *interval(strata)))
    unit = "human-normalized score (0 random, 1 human)" if normalized else "return"
    title = "Final scores: interquartile mean"
    text = (
        "A run's score is its mean return over the last tenth of its env steps. The middle half of the runs counts, of "
        "fewer than four all (Agarwal et al. 2021); with several seeds, with a 95% bootstrap interval stratified by "
        "env, which is too narrow with fewer than five."
    )
    done = [run for method in methods for run in method.runs if run.finished]
    if left := sum(len(method.runs) for method in methods) - len(done):
        text += f" Left out: {counted(left, 'unfinished run')}."
    if left := sum(not math.isfinite(final_return(run)) for run in done):
        text += f" Left out: {counted(left, 'run')} without a score: no episode ended, or none of a task."
    if early := sum(run.ended_early for run in done):
        text += f" {counted(early, 'run')} ended before the env steps that were asked for."
    if normalized and alone:
        text += f" Left out: {alone}, where not every method has a finished run."
    if any(_repeats(method, env) for method in methods for env in envs):
        text += " Some runs of a method have the same seed: if they are equal, the interval is too narrow."
    shown = [
        [label, number(value), f"{number(low)} to {number(high)}" if math.isfinite(low) else "needs several seeds"]
        for label, value, low, high in rows
    ]
    charts = [intervals(title, rows, unit, text)] if len(rows) > 1 else []
    return charts, Table(title, ["method", unit, "95% interval"], shown, text)


def diagnostics(method: Method) -> list[Chart]:
    """A method's first run: policy lag, importance weights, distance to consensus, gradient cosines, and time spent in
    each stage.
    """
    run = method.runs[0]
    title = f"{method.label} on {run.env}, seed {run.seed}"
    found = [_lag_chart(run, title), _weights_chart(run, title), consensus_chart(run, title)]
    found.append(cosine_chart([run], title))
    return [chart for chart in found if chart is not None] + _stage_charts(run, title)


def _lag_chart(run: RecordedRun, title: str) -> Chart | None:
    lags = {int(k): float(v) for k, v in run.summary.get("policy_lag", {}).items()}
    if not lags or set(lags) == {0}:
        return None
    mean = sum(k * v for k, v in lags.items()) / sum(lags.values())
    text = f"Mean {mean:.3g}, at most {max(lags)} learner steps."
    return histogram(f"Policy lag: {title}", lags, "age of the acting weights, learner steps", "env steps", text)


def _weights_chart(run: RecordedRun, title: str) -> Chart | None:
    """How much of a batch the importance weights leave, and how many of them are clipped."""
    names = {"ess": "effective sample size", "rho_clipped": "rho clipped", "c_clipped": "c clipped"}
    found = [Line(label, *run.series(name)) for name, label in names.items() if len(run.series(name)[0]) > 1]
    return lines(f"Importance weights: {title}", found, "env steps", "fraction of the samples") if found else None


def consensus_chart(run: RecordedRun, title: str) -> Chart | None:
    """The learners' distance to consensus beside GALA's bound; None if the run did not record it."""
    found = []
    for name, label in (
        ("consensus/distance", "distance to the mean of the learners' weights"),
        ("consensus/bound", "bound of GALA's Proposition 1"),
    ):
        x, y = run.series(name)
        if len(np.unique(x)) > 1:
            found.append(Line(label, x, y))
    positive = all((line.y > 0).any() for line in found)
    return lines(f"Consensus: {title}", found, "env steps", "Frobenius norm", log_y=positive) if found else None


def cosine_chart(runs: Sequence[RecordedRun], title: str) -> Chart | None:
    """The cosines of the learners' gradients, means over the runs that recorded them; None if none did."""
    if not (found := [pairs for run in runs if (pairs := cosines(run)) is not None]):
        return None
    ranks = [str(i) for i in range(len(found[0]))]
    text = "Mean over the comparisons."
    return heatmap(f"Gradients: {title}", np.mean(found, 0), ranks, ranks, "cosine of two learners' gradients", text)


def _stage_charts(run: RecordedRun, title: str) -> list[Chart]:
    rows = [line for line in run.lines if any(name.startswith("stage/") for name in line)]
    steps = np.array([line["env_steps"] for line in rows])
    took = np.diff([line["seconds"] for line in rows], prepend=0.0).clip(0) + 1e-9  # each line's shares are of these
    x, at = np.unique(steps, return_inverse=True)  # several lines have the env steps at which an evaluation began
    if len(x) < 2:
        return []
    some = np.linspace(x[0], x[-1], min(len(x), _POINTS))  # a day has 17,000 lines, which would make 7 MB of SVG
    found = []
    for whose, prefix in (("the learner's", "stage/"), ("the actors'", _ACTORS), ("the env hosts'", _HOSTS)):
        spent = {
            name.removeprefix(prefix): 100 * took * np.array([line.get(name) or 0.0 for line in rows])
            for name in run.names(prefix)
            if "/" not in name.removeprefix(prefix)
        }
        if spent:
            means = {name: each.sum() / took.sum() for name, each in spent.items()}
            text = f"On average {', '.join(f'{name} {mean:.0f}%' for name, mean in means.items())}"
            rest = 100 - sum(means.values())
            text += f"; {rest:.0f}% in none of these, such as evaluations." if prefix == "stage/" and rest >= 1 else "."
            drawn = {k: np.interp(some, x, np.bincount(at, v) / np.bincount(at, took)) for k, v in spent.items()}
            found.append(stacked(f"Where {whose} time goes: {title}", some, drawn, "env steps", "share, %", text))
    return found


def cosines(run: RecordedRun) -> Array | None:
    """`[learners, learners]` means of `cosine/i-j`; None if the run did not record them."""
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
