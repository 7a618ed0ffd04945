"""How results become charts and tables: what figures have in common."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from coterie.algorithms.table import ALGORITHMS
from coterie.envs.atari57 import human_normalized
from coterie.tools.report.charts import Line, lines
from coterie.tools.report.runs import Method, RecordedRun
from coterie.tools.report.sections import Table, final_return, returns
from coterie.tools.report.stats import band
from coterie.tools.reproduce.figure import Arm, Drawing, Result, Size

Measure = Callable[[RecordedRun], float]


def named(arm: Arm) -> str:
    """An arm's label, with its place on a swept axis."""
    return f"{arm.label}, {arm.x:g}" if math.isfinite(arm.x) else arm.label


def order(run: RecordedRun) -> float:
    """What runs are compared by: the final return, and last those that have none."""
    score = final_return(run)
    return score if math.isfinite(score) else -math.inf


def begins(run: RecordedRun) -> float:
    """The env steps after which it trains."""
    algorithm = ALGORITHMS.get(str(run.config.get("algorithm")))
    return float(run.config.get("q.learn_start") or 0) if algorithm and algorithm.value_based else 0.0


def rate(run: RecordedRun) -> float:
    """Env steps/s of a run without its start: from the first line after a third of the env steps (and after value
    learning has begun to train) to the last; of all of a run that told only one line.
    """
    x, seconds = run.series("seconds")
    if not len(x):
        return math.nan
    for late in (x >= max(x[-1] / 3, begins(run)), x >= x[-1] / 3, x >= 0):
        if late.sum() > 1 and seconds[late][-1] > seconds[late][0]:
            return float((x[late][-1] - x[late][0]) / (seconds[late][-1] - seconds[late][0]))
    whole = float(run.summary.get("seconds") or 0)
    return float(run.summary["env_steps"]) / whole if whole else math.nan


def frames_per_kj(run: RecordedRun) -> float:
    """NaN where the machine does not count its energy."""
    return float((run.summary.get("energy") or {}).get("frames_per_kj") or math.nan)


def average(values: Iterable[float]) -> float:
    """Mean of those that are numbers, NaN where none is."""
    known = [v for v in values if math.isfinite(v)]
    return float(np.mean(known)) if known else math.nan


def number(value: float) -> str:
    return "-" if not math.isfinite(value) else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def spread(values: Sequence[float]) -> str:
    """Mean of several seeds with its standard error."""
    x = np.array([v for v in values if math.isfinite(v)])
    if len(x) < 2:
        return number(float(x[0])) if len(x) else "-"
    return f"{number(float(x.mean()))} +- {number(float(x.std(ddof=1) / len(x) ** 0.5))}"


def curves(results: Sequence[Result], size: Size) -> Drawing:
    """Returns per env step, second and kilojoule; a chart for each panel and env."""
    charts = []
    for panel in dict.fromkeys(result.arm.panel for result in results):
        methods = [Method(named(r.arm), r.runs) for r in results if r.arm.panel == panel and r.runs]
        charts += returns(methods, f"{panel}: " * bool(panel))
    return Drawing(charts, [finals(results)])


def finals(results: Sequence[Result], measure: Measure = final_return, what: str = "final return") -> Table:
    """`measure` of each arm on each env, mean over its seeds."""
    envs = list(dict.fromkeys(env for result in results for env in result.envs))
    head = ["panel", "arm", *envs] if any(result.arm.panel for result in results) else ["arm", *envs]
    rows = []
    for result in results:
        cells = [spread([measure(run) for run in result.runs if run.env == env]) for env in envs]
        rows.append([*([result.arm.panel] if head[0] == "panel" else []), named(result.arm), *cells])
    return Table(f"Ours: {what}", head, rows, "Mean over seeds with its standard error, where there are several.")


def busy(name: str) -> Measure:
    """Over the whole run, in percent; NaN where it is not told."""

    def measure(run: RecordedRun) -> float:
        seconds, share = run.series(f"busy/{name}", "seconds")
        return 100 * float(np.average(share, weights=np.diff(seconds, prepend=0.0))) if len(share) else math.nan

    return measure


def swept(measure: Measure, y: str, x: str, what: str) -> Callable[[Sequence[Result], Size], Drawing]:
    """`measure` over the arms' `x`, a chart for each panel and env, a line for each label."""

    def draw(results: Sequence[Result], size: Size) -> Drawing:
        charts = []
        for panel in dict.fromkeys(result.arm.panel for result in results):
            own = [result for result in results if result.arm.panel == panel]
            for env in dict.fromkeys(env for result in own for env in result.envs):
                found = []
                for label in dict.fromkeys(result.arm.label for result in own):
                    points = []
                    for result in sorted((r for r in own if r.arm.label == label), key=lambda r: r.arm.x):
                        values = [measure(run) for run in result.runs if run.env == env]
                        values = [v for v in values if math.isfinite(v)]
                        if values:
                            points.append((result.arm.x, *(float(b[0]) for b in band(np.array(values)[:, None]))))
                    if points:
                        found.append(Line(label, *(np.array(column) for column in zip(*points, strict=True))))
                if found:
                    title = f"{f'{panel}: ' * bool(panel)}{env}: {what}"
                    charts.append(lines(title, found, x, y, "Bands: 95% bootstrap interval over seeds.", log_x=True))
        return Drawing(charts, [by_point(results, measure, x, what)])

    return draw


def by_point(results: Sequence[Result], measure: Measure, x: str, what: str) -> Table:
    """`measure` of every arm at every `x`, by env."""
    rows = []
    for result in results:
        for env in result.envs:
            values = [measure(run) for run in result.runs if run.env == env]
            label = f"{result.arm.panel}: {result.arm.label}" if result.arm.panel else result.arm.label
            rows.append([label, env, number(result.arm.x), spread(values)])
    return Table(f"Ours: {what}", ["arm", "env", x, what], rows)


def together(*draws: Callable[[Sequence[Result], Size], Drawing]) -> Callable[[Sequence[Result], Size], Drawing]:
    """Several drawings of the same results."""

    def draw(results: Sequence[Result], size: Size) -> Drawing:
        drawn = [each(results, size) for each in draws]
        return Drawing([c for d in drawn for c in d.charts], [t for d in drawn for t in d.tables])

    return draw


def human(results: Sequence[Result], size: Size) -> Drawing:
    """Mean and median human-normalised final score of each arm over the games, where all of them are Atari's."""
    rows = []
    for result in results:
        scores = []
        for env in result.envs:
            values = [final_return(run) for run in result.runs if run.env == env]
            score = human_normalized(env, average(values))
            scores.append(math.nan if score is None else score)
        known = [s for s in scores if math.isfinite(s)]
        both = (np.mean(known), np.median(known)) if known and len(known) == len(scores) else (math.nan, math.nan)
        rows.append([result.arm.label, *(number(float(v)) for v in both), str(len(scores))])
    head = ["arm", "mean", "median", "games"]
    return Drawing((), [Table("Ours: human-normalised scores", head, rows, "0 is random play, 1 a human's.")])
