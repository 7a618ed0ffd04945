"""The drawings that several figures have in common: curves, lines along what is swept, bars and tables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from coterie.envs.atari57 import human_normalized
from coterie.tools.report.charts import Chart, Line, intervals, lines
from coterie.tools.report.runs import Method, RecordedRun
from coterie.tools.report.sections import returns
from coterie.tools.report.stats import band
from coterie.tools.report.tables import Table, final_return, number
from coterie.tools.reproduce.figure import Arm, ArmResult, Figure, Size
from coterie.tools.reproduce.measures import MEASURES, Measure, average, order, spread


@dataclass(frozen=True)
class Drawing:
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()


def named(arm: Arm) -> str:
    """An arm's label, with its place on a swept axis."""
    return f"{arm.label}, {arm.x:g}" if math.isfinite(arm.x) else arm.label


def all_envs(results: Sequence[ArmResult]) -> list[str]:
    return list(dict.fromkeys(env for result in results for env in result.envs))


def panels(results: Sequence[ArmResult]) -> Iterator[tuple[str, list[ArmResult]]]:
    """The results by panel, each with what its titles begin with."""
    for panel in dict.fromkeys(result.arm.panel for result in results):
        yield f"{panel}: " if panel else "", [result for result in results if result.arm.panel == panel]


def curves(figure: Figure, results: Sequence[ArmResult], size: Size) -> Drawing:
    """Returns per env step, second and kilojoule; a chart for each panel and env."""
    charts = []
    for title, members in panels(results):
        charts += returns([Method(named(r.arm), r.runs) for r in members if r.runs], title)
    return Drawing(charts, [table(figure, results, MEASURES["return"])])


def best_three(figure: Figure, results: Sequence[ArmResult], size: Size) -> Drawing:
    """Returns of the three best runs of each method, as in GALA's figures 1b, 1d and 1f."""
    best = [
        Method(result.arm.label, sorted(result.of(env), key=order)[-3:]) for result in results for env in result.envs
    ]
    return Drawing(returns(best, "best 3 runs, "))


def swept(figure: Figure, results: Sequence[ArmResult], measure: Measure) -> Drawing:
    """A measure along what is swept: a chart for each panel and env, a line for each label."""
    charts = []
    for title, members in panels(results):
        for env in all_envs(members):
            found = []
            for label in dict.fromkeys(result.arm.label for result in members):
                points = []
                for result in sorted((r for r in members if r.arm.label == label), key=lambda r: r.arm.x):
                    values = _finite(measure, result.of(env))
                    if values:
                        points.append((result.arm.x, *(float(b[0]) for b in band(np.array(values)[:, None]))))
                if points:
                    found.append(Line(label, *(np.array(column) for column in zip(*points, strict=True))))
            if found:
                text = "Bands: 95% bootstrap interval over seeds."
                name = f"{title}{env}: {measure.what}"
                charts.append(lines(name, found, figure.x, measure.unit, text, log_x=True))
    return Drawing(charts, [table(figure, results, measure)])


def bars(figure: Figure, results: Sequence[ArmResult], measure: Measure) -> Drawing:
    """A measure of each arm over all its envs and seeds."""
    rows = [(r.arm.label, average(v), min(v), max(v)) for r in results if (v := _finite(measure, r.runs))]
    text = "Bars: the slowest and the fastest run."
    charts = [intervals(measure.what.capitalize(), rows, measure.unit, text)] if rows else []
    return Drawing(charts, [table(figure, results, measure)])


def _finite(measure: Measure, runs: Sequence[RecordedRun]) -> list[float]:
    return [value for run in runs if math.isfinite(value := measure.of(run))]


def table(figure: Figure, results: Sequence[ArmResult], measure: Measure) -> Table:
    """A measure of each arm on each env, beside the paper's value if it states one."""
    shown = {
        "panel": any(r.arm.panel for r in results),
        figure.x or "x": any(math.isfinite(r.arm.x) for r in results),
        "paper": any(r.arm.key in figure.paper for r in results),
    }
    head = [name for name in ("panel", "arm", "env", figure.x or "x", "paper", "ours") if shown.get(name, True)]
    rows = []
    for result in results:
        for env in result.envs:
            ours, paper = spread([measure.of(run) for run in result.of(env)]), figure.value_in_paper(result.arm, env)
            cells = {"panel": result.arm.panel, "arm": result.arm.label, "env": env, "paper": paper, "ours": ours}
            rows.append([cells.get(name, number(result.arm.x)) for name in head])
    text = "Mean over seeds with its standard error, where there are several."
    return Table(measure.what.capitalize(), head, rows, text)


def human(figure: Figure, results: Sequence[ArmResult], size: Size) -> Drawing:
    """Mean and median human-normalized final score of each arm over its envs, where all of them are Atari games."""
    rows = []
    for result in results:
        scores = [human_normalized(e, average(final_return(r) for r in result.of(e))) for e in result.envs]
        known = [s for s in scores if s is not None and math.isfinite(s)]
        both = (np.mean(known), np.median(known)) if known and len(known) == len(scores) else (math.nan, math.nan)
        ours = " / ".join(number(float(value)) for value in both)
        rows.append([result.arm.label, figure.value_in_paper(result.arm, ""), ours, str(len(scores))])
    head = ["method", "paper, 49 games", "ours", "games"]
    return Drawing((), [Table("Mean / median human-normalized score (0 random, 1 human)", head, rows)])


def energy(figure: Figure, results: Sequence[ArmResult], size: Size) -> Drawing:
    """Why there is no energy, where there is none."""
    reasons = {str((run.summary.get("energy") or {}).get("reason", "")) for r in results for run in r.runs} - {""}
    return Drawing((), [Table("Energy is not readable here", ["reason"], [[reason] for reason in sorted(reasons)])])
