"""The drawings that one figure alone has, and all drawings by name."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

import numpy as np

from coterie.envs.atari57 import human_normalized
from coterie.tools.report.charts import Line, lines
from coterie.tools.report.runs import RecordedRun
from coterie.tools.report.sections import AXES, consensus_chart, cosine_chart
from coterie.tools.report.stats import on_grid
from coterie.tools.report.tables import Table, final_return, number
from coterie.tools.reproduce.drawings import Drawing, all_envs, bars, best_three, curves, energy, human, swept, table
from coterie.tools.reproduce.figure import ArmResult, Figure, Size
from coterie.tools.reproduce.measures import MEASURES, Measure, average, rate, spread


def convergence(results: Sequence[ArmResult]) -> tuple[Measure, dict[str, float]]:
    """100 for a run whose final return is over half of the nominal score, else 0; and the nominal score of each env:
    what A2C reaches with the fewest simulators.
    """
    nominal = {}
    least = min((r for r in results if r.arm.label == "A2C"), key=lambda r: r.arm.x)
    for env in all_envs(results):
        score = average(final_return(run) for run in least.of(env))
        nominal[env] = score if score > 0 else math.nan  # half of a negative score would be more than it

    def of(run: RecordedRun) -> float:
        return 100.0 * (final_return(run) > 0.5 * nominal[run.env]) if nominal[run.env] > 0 else math.nan

    return Measure(of, "convergent runs", "convergent runs, %"), nominal


def convergent(figure: Figure, results: Sequence[ArmResult], size: Size) -> Drawing:
    """GALA 1a: the share of runs that converge."""
    measure, nominal = convergence(results)
    drawn = swept(figure, results, measure)
    rows = [[env, number(score), number(0.5 * score)] for env, score in nominal.items()]
    more = Table("Nominal score: A2C with the fewest simulators", ["env", "score", "convergent above"], rows)
    return Drawing(drawn.charts, [*drawn.tables, more, table(figure, results, MEASURES["return"])])


def consensus(figure: Figure, results: Sequence[ArmResult], size: Size) -> Drawing:
    """GALA 2a: the distance to consensus beside the bound of Proposition 1."""
    runs = [(f"{result.arm.label} on {run.env}, seed {run.seed}", run) for result in results for run in result.runs]
    return Drawing([chart for title, run in runs if (chart := consensus_chart(run, title)) is not None])


def gradient_cosines(figure: Figure, results: Sequence[ArmResult], size: Size) -> Drawing:
    """GALA 2b: the cosines of the learners' gradients."""
    charts = [cosine_chart(result.runs, result.arm.label) for result in results]
    return Drawing([chart for chart in charts if chart is not None])


def evaluations(figure: Figure, results: Sequence[ArmResult], size: Size) -> Drawing:
    """GALA, Table 1: greedy episodes of each method's best seed."""
    rows = []
    for result in results:
        for env in result.envs:
            found = result.evaluations.get(env)
            ours = f"{number(found['mean_return'])} +- {number(found['stderr'])}" if found else "-"
            rows.append([result.arm.label, env, figure.value_in_paper(result.arm, env), ours])
    text = f"The seed with the best final return, {figure.evaluate} greedy episodes, up to 30 no-ops."
    head = ["method", "env", "paper, 40M env steps", f"ours, {size.steps:,}"]
    return Drawing((), [Table("Table 1", head, rows, text)])


def sampling(figure: Figure, results: Sequence[ArmResult], size: Size) -> Drawing:
    """Accelerated Methods 1b: env steps/s of the envs alone, with acting, and with training, from `coterie bench`."""
    names = {"env_only": "envs alone (no inference)", "acting": "with batched inference", "training": "with training"}
    found = [(result.arm.x, report) for result in results for report in result.reports]
    charts = []
    for env in dict.fromkeys(report["env"] for _, report in found):
        of = [(n / report["cores"], report) for n, report in found if report["env"] == env]
        each = np.array([n for n, _ in of])
        drawn = [Line(label, each, np.array([report[name] for _, report in of])) for name, label in names.items()]
        charts.append(lines(f"Sampling, {env}", drawn, "simulators for each core", "env steps/s", log_x=True))
    rows = [
        [report["env"], number(n), number(n / report["cores"]), *(number(report[name]) for name in names)]
        for n, report in found
    ]
    return Drawing(charts, [Table("Env steps/s", ["env", "simulators", "for each core", *names.values()], rows)])


def secondary(figure: Figure, results: Sequence[ArmResult], size: Size) -> Drawing:
    """Accelerated Methods 5 to 7: the greedy evaluations of the primary and of the secondary learner."""
    charts, rows = [], []
    for result in results:
        for env in result.envs:
            found = []
            for name, label in (("eval/return", "primary"), ("eval/secondary_return", "secondary")):
                series = {run.seed: xy for run in result.of(env) if len((xy := run.series(name))[0])}
                found += [Line(f"{label}, seed {seed}", x, y) for seed, (x, y) in series.items()]
                rows.append([result.arm.label, env, label, spread([float(y[-1]) for _, y in series.values()])])
            if found:
                title = f"{env}: batches of {result.arm.label.replace(' of ', ', and of a primary with ')}"
                charts.append(lines(title, found, "env steps", "return of greedy episodes"))
    text = "Batch sizes: secondary of primary. Both begin with the same weights; only the primary acts."
    return Drawing(charts, [Table("Last greedy evaluation", ["pair", "env", "learner", "return"], rows, text)])


def norms(figure: Figure, results: Sequence[ArmResult], size: Size) -> Drawing:
    """Accelerated Methods 8: norms of the torso's first and last layer (on images the paper's Conv-0 and FC-0)."""
    layers = [n.removeprefix("norm/weights/") for r in results for run in r.runs for n in run.names("norm/weights/")]
    torso = [name for name in dict.fromkeys(layers) if re.fullmatch(r"torso\..*weight", name)]
    torso.sort(key=lambda name: [int(n) for n in re.findall(r"\d+", name)])  # in the network's order
    charts = []
    for layer in dict.fromkeys([*torso[:1], *torso[-1:]]):
        for kind, what in (("weights", "weights"), ("gradient", "gradient, before clipping"), ("step", "step")):
            series = [(r.arm.label, *run.series(f"norm/{kind}/{layer}")) for r in results for run in r.runs[:1]]
            found = [Line(label, x, y) for label, x, y in series if len(x) > 1]
            if found:
                charts.append(lines(f"{layer}: {what}", found, "env steps", "Euclidean norm", log_y=kind != "weights"))
    return Drawing(charts)


def tasks(figure: Figure, results: Sequence[ArmResult], size: Size) -> Drawing:
    """IMPALA's transfer: one agent for several tasks beside an expert for each."""
    expert = {env: result.of(env) for result in results for env in result.envs if result.arm.envs is None}
    shared = [run for result in results for run in result.runs if result.arm.envs is not None]
    charts, rows = [], []
    for env in size.envs:
        found = [Line(f"expert, seed {run.seed}", *run.series(run.score)) for run in expert.get(env, [])]
        found += [Line(f"one agent, seed {run.seed}", *run.series(f"return/{env}")) for run in shared]
        if found := [line for line in found if len(line.x)]:
            x, y = "env steps, of all envs together for the one agent", "return, mean of the last 100 episodes"
            charts.append(lines(f"{env}: the expert and the one agent", found, x, y))
        ours = [spread([final_return(run) for run in expert.get(env, [])]), spread([_of_task(r, env) for r in shared])]
        rows.append([env, *ours])
    text = "An expert has as many env steps in its env as the one agent has in all envs together."
    return Drawing(charts, [Table("Final return", ["env", "expert", "one agent"], rows, text)])


def _of_task(run: RecordedRun, env: str) -> float:
    """The mean over the last tenth of the lines that have the task's return."""
    values = run.series(f"return/{env}")[1]
    return average(values[-max(1, len(values) // 10) :])


def speedup(figure: Figure, results: Sequence[ArmResult], size: Size) -> Drawing:
    """SEED, Table 1: its speed as a multiple of IMPALA's."""
    speeds = {(r.arm.label, r.arm.x): average(map(rate, r.runs)) for r in results}
    rows = []
    for x in dict.fromkeys(x for _, x in speeds):
        ratio = speeds["SEED", x] / speeds["IMPALA", x] if speeds["IMPALA", x] > 0 else math.nan
        rows.append([f"this machine, {x:g} simulators, SEED to IMPALA", number(ratio)])
    drawn = swept(figure, results, MEASURES["rate"])
    return Drawing(drawn.charts, [Table("SEED's speed as a multiple of IMPALA's", ["", "ratio"], rows), *drawn.tables])


def dollars(figure: Figure, results: Sequence[ArmResult], size: Size) -> Drawing:
    """SEED, Tables 3 to 5: the cost of both acting modes with one learner, from `coterie plan`."""
    names = {"decoupled": "IMPALA (decoupled)", "central": "SEED (central)"}
    found: dict[str, dict[str, dict[float, float]]] = {}  # dollars by env, acting and number of hosts
    rows = []
    for result in results:
        for report in result.reports:
            costs = found.setdefault(report["env"], {acting: {} for acting in names})
            for one in report["layouts"]:
                acting, price = one["layout"]["acting"], one["dollars_per_billion_frames"]
                if one["layout"]["learners"] == 1 and acting in costs:
                    costs[acting][result.arm.x] = price
                    speed = number(one["frames_per_s"])
                    rows.append([report["env"], f"{result.arm.x:g}", acting, speed, number(price), one["bottleneck"]])
    charts, ratios = [], []
    for env, costs in found.items():
        each = {label: sorted(costs[acting].items()) for acting, label in names.items() if costs[acting]}
        drawn = [Line(label, *map(np.array, zip(*points, strict=True))) for label, points in each.items()]
        charts.append(lines(f"{env}: dollars per billion frames", drawn, "hosts of 4 cores", "dollars"))
        impala, seed = costs.values()
        ratios += [[env, f"{x:g}", number(seed[x] / impala[x])] for x in sorted(set(impala) & set(seed))]
    head = ["env", "hosts", "acting", "frames/s (simulated)", "dollars per 1e9 frames", "bottleneck"]
    shares = Table("Simulated: SEED's cost as a share of IMPALA's", ["env", "hosts", "ratio"], ratios)
    return Drawing(charts, [shares, Table("Simulated", head, rows)])


def ranked(figure: Figure, results: Sequence[ArmResult], size: Size) -> Drawing:
    """SEED 4: each method's final returns over its settings, the best first."""
    charts, rows = [], []
    for env in all_envs(results):
        drawn = []
        for label in dict.fromkeys(result.arm.label for result in results):
            means = [average(final_return(run) for run in r.of(env)) for r in results if r.arm.label == label]
            best = np.array(sorted((m for m in means if math.isfinite(m)), reverse=True))
            if len(best):
                drawn.append(Line(label, np.arange(1, len(best) + 1), best))
                middle = [number(float(value)) for value in (best[0], np.median(best), best.mean())]
                rows.append([env, label, *middle, f"{len(best)} of {len(means)}"])
        if drawn:
            charts.append(lines(f"{env}: settings by their final return", drawn, "rank of the setting", "final return"))
    head = ["env", "method", "best", "median setting", "mean of settings", "settings with a return"]
    return Drawing(charts, [Table("Final returns over settings", head, rows)])


def human_median(figure: Figure, results: Sequence[ArmResult], size: Size) -> Drawing:
    """SEED 7: the median over games of the human-normalized score (mean over seeds), over env steps and hours."""
    charts = []
    for label, unit, series in AXES[:2]:
        drawn = []
        for result in results if size.atari else []:
            games = []
            for env in result.envs:
                grid, scores = on_grid([series(run, run.score) for run in result.of(env)])
                if len(grid):
                    games.append(
                        (grid, np.array([human_normalized(env, float(s)) for s in scores.mean(0)], np.float64))
                    )
            grid, medians = on_grid(games)
            if len(grid) > 1 and len(games) == len(result.envs):
                x = grid / 3600 if unit == "second" else grid
                drawn.append(Line(result.arm.label, x, np.median(medians, 0)))
        if drawn:
            x_label, per = ("hours", "hour") if unit == "second" else (label, unit)
            charts.append(lines(f"Median over games per {per}", drawn, x_label, "median human-normalized score"))
    return Drawing(charts)


Draw = Callable[[Figure, Sequence[ArmResult], Size], Drawing]
_COMMON: tuple[Draw, ...] = (best_three, curves, energy, human)
_GALA: tuple[Draw, ...] = (convergent, consensus, gradient_cosines, evaluations)
_ACCELERATED: tuple[Draw, ...] = (sampling, secondary, norms)
_IMPALA_AND_SEED: tuple[Draw, ...] = (tasks, speedup, dollars, ranked, human_median)
_OF_RESULTS = {kind.__name__: kind for kind in (*_COMMON, *_GALA, *_ACCELERATED, *_IMPALA_AND_SEED)}
_OF_A_MEASURE: dict[str, Callable[[Figure, Sequence[ArmResult], Measure], Drawing]] = {
    "bars": bars,
    "swept": swept,
    "table": lambda figure, results, measure: Drawing((), [table(figure, results, measure)]),
}


def draw(figure: Figure, results: Sequence[ArmResult], size: Size) -> Drawing:
    """All drawings that a figure names: "KIND", or "KIND MEASURE" of `measures.py`."""
    found = []
    for kind, *measure in (name.split() for name in figure.draw):
        if measure:
            found.append(_OF_A_MEASURE[kind](figure, results, MEASURES[measure[0]]))
        else:
            found.append(_OF_RESULTS[kind](figure, results, size))
    return Drawing([c for one in found for c in one.charts], [t for one in found for t in one.tables])
