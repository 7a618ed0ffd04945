"""GALA's figures. A2C and GALA-A2C are the preset `gala-a2c` with one learner and with several."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from coterie.tools.report.charts import heatmap
from coterie.tools.report.runs import Method, RecordedRun
from coterie.tools.report.sections import Table, cosines, final_return, machinery, returns
from coterie.tools.reproduce.draw import (
    average,
    busy,
    by_point,
    curves,
    frames_per_kj,
    number,
    order,
    rate,
    swept,
    together,
)
from coterie.tools.reproduce.figure import ATARI, MISSING, NOT_READ, Arm, Drawing, Figure, Result, Size, fewer, on

_CARTPOLE = ("CartPole-v1",)
_PRESETS = (
    "Each method has its own preset's net, update rule and start (A3C: the smaller net); IMPALA is not TorchBeast's."
)
_STAND_IN = on(_CARTPOLE, "CartPole-v1 stands for the six Atari games; --env names others.")
_LARGE = fewer(steps=40_000_000, seeds=10, learners=4)
_LARGE_64 = fewer("simulators", 64, steps=40_000_000, seeds=10, learners=4)
# The learning rate grows with the root of all simulators, as in the paper.
_GALA = ("gala-a2c", "--env", "{env}", "--optim.sqrt-scaling-from", "16")

# Table 1: mean and standard error of 10 games, after 40M env steps (IMPALA: TorchBeast's).
_TABLE_1 = {
    "IMPALA": ("7118 +- 2536", "127 +- 65", "21", "7878 +- 2573", "462 +- 2", "4071 +- 393"),
    "A3C": ("5674 +- 752", "414 +- 56", "21", "14923 +- 460", "1840 +- 0", "2232 +- 302"),
    "A2C": ("9829 +- 1355", "495 +- 57", "21", "19928 +- 99", "1894 +- 6", "3021 +- 36"),
    "GALA-A2C": ("10188 +- 1316", "690 +- 72", "21", "20150 +- 28", "1892 +- 6", "3074 +- 69"),
}


def _a2c(simulators: int) -> tuple[str, ...]:
    return (*_GALA, "--learners", "1", "--exchange", "solo", "--env.num-envs", str(simulators))


def _gala(simulators: int, learners: int, *more: str) -> tuple[str, ...]:
    each = max(1, simulators // learners)
    return (*_GALA, "--learners", str(learners), "--env.num-envs", str(each), *more)


def _both(size: Size) -> list[Arm]:
    return [
        arm
        for n in size.points
        for arm in (Arm("A2C", _a2c(n), n), Arm(f"GALA-A2C, {size.learners} learners", _gala(n, size.learners), n))
    ]


def _convergent(results: Sequence[Result], size: Size) -> Drawing:
    """Share of runs whose final return is more than half of what A2C reaches with the fewest simulators."""
    least = min(size.points)
    nominal = {}
    for env in dict.fromkeys(env for result in results for env in result.envs):
        runs = [r for result in results if result.arm.label == "A2C" and result.arm.x == least for r in result.runs]
        scores = [final_return(run) for run in runs if run.env == env]
        score = average(scores)
        nominal[env] = score if score > 0 else math.nan  # half of a score below nothing would be more than it

    def convergent(run: RecordedRun) -> float:
        return 100.0 * (final_return(run) > 0.5 * nominal[run.env]) if nominal[run.env] > 0 else math.nan

    drawn = swept(convergent, "convergent runs, %", "simulators", "convergent runs")(results, size)
    rows = [[env, number(score), number(0.5 * score)] for env, score in nominal.items()]
    more = Table(f"Nominal score: A2C with {least} simulators", ["env", "score", "more than this is convergent"], rows)
    return Drawing(drawn.charts, [*drawn.tables, more, by_point(results, final_return, "simulators", "final return")])


def _four(size: Size) -> list[Arm]:
    n = size.points[0]
    env = ("--env", "{env}")
    return [
        Arm("A2C", _a2c(n)),
        Arm("A3C", ("a3c-store", *env, "--learners", str(size.learners), "--env.num-envs", str(n // size.learners))),
        Arm("IMPALA", ("impala", *env, "--env.num-envs", str(n))),
        Arm("GALA-A2C", _gala(n, size.learners)),
    ]


def _best(results: Sequence[Result], size: Size) -> Drawing:
    """The same curves of the three best runs of each method, as GALA's figures 1b, 1d and 1f have them."""
    found = []
    for result in results:
        for env in result.envs:
            runs = sorted((run for run in result.runs if run.env == env), key=order)
            found.append(Method(result.arm.label, runs[-3:]))
    return Drawing(returns(found, "best 3 runs, "))


def _consensus(results: Sequence[Result], size: Size) -> Drawing:
    charts = [
        chart
        for result in results
        for run in result.runs
        for chart in machinery(Method(result.arm.label, [run]))
        if chart.title.startswith("Consensus")
    ]
    rows = []
    for result in results:
        for run in result.runs:
            both = [(p.get("consensus/distance"), p.get("consensus/bound")) for p in run.lines]
            share = np.array([distance / bound for distance, bound in both if distance is not None and bound])
            if len(share):
                rows.append([result.arm.label, run.env, number(float(share.mean())), number(float(share.max()))])
    head = ["arm", "env", "mean of distance / bound", "greatest (the proposition: at most 1)"]
    return Drawing(charts, [Table("Ours: distance beside Proposition 1", head, rows)])


def _cosines(results: Sequence[Result], size: Size) -> Drawing:
    charts, rows = [], []
    for result in results:
        tables = [t for run in result.runs if (t := cosines(run)) is not None]
        if tables:
            table = np.mean(tables, 0)
            names = [str(i) for i in range(len(table))]
            charts.append(
                heatmap(f"Gradients: {result.arm.label}", table, names, names, "cosine of two learners' gradients")
            )
        told = [[run.series(f"cosine/{who}")[1] for run in result.runs] for who in ("peers", "others")]
        pairs = [[float(y.mean()) for y in each if len(y)] for each in told]
        rows.append([result.arm.label, *(number(average(p)) for p in pairs)])
    return Drawing(charts, [Table("Ours: mean cosine", ["arm", "peers", "others"], rows)])


def _gossip_or_sum(size: Size) -> list[Arm]:
    n, more = size.points[0], ("--log.cosines", "500")
    return [
        Arm("GALA-A2C, a ring", _gala(n, 4, *more)),
        Arm("A2C, gradients summed", _gala(n, 4, "--exchange", "allreduce", *more)),
    ]


def _evaluated(results: Sequence[Result], size: Size) -> Drawing:
    rows = []
    for result in results:
        for env in result.envs:
            paper = MISSING
            if env in ATARI and result.arm.label in _TABLE_1:
                paper = _TABLE_1[result.arm.label][ATARI.index(env)]
            found = result.evaluations.get(env)
            ours = f"{number(found['mean_return'])} +- {number(found['stderr'])}" if found else "-"
            rows.append([result.arm.label, env, paper, ours])
    return Drawing((), [Table("Table 1", ["method", "env", "paper, 40M env steps", f"ours, {size.steps:,}"], rows,
                              "Best of the seeds by its final return, 10 greedy games, up to 30 no-ops.")])  # fmt: skip


def _watts(run: RecordedRun) -> float:
    """Over all lives of a run: its joules begin anew with each."""
    seconds, joules = run.series("joules", "seconds")
    used, took = np.diff(joules), np.diff(seconds)
    same = (used >= 0) & (took > 0)
    return float(used[same].sum() / took[same].sum()) if same.any() else math.nan


def _unread(results: Sequence[Result], size: Size) -> Drawing:
    """Why there is no energy, where there is none."""
    reasons = {str((run.summary.get("energy") or {}).get("reason", "")) for r in results for run in r.runs} - {""}
    rows = [[reason] for reason in sorted(reasons)]
    return Drawing((), [Table("Energy is not readable here", ["reason"], rows)] if rows else [])


_used = together(
    swept(rate, "env steps/s", "simulators", "rate"),
    swept(busy("cpu"), "cores in use, %", "simulators", "use of the cores"),
    swept(busy("gpu"), "GPUs in use, %", "simulators", "use of the GPUs"),
    swept(_watts, "watts", "simulators", "power"),
    swept(frames_per_kj, "frames/kJ", "simulators", "frames per kilojoule"),
    _unread,
)


FIGURES = [
    Figure(
        "gala-1a", "gala", "Figure 1a: convergent runs against the number of simulators", _both, _convergent,
        {
            "smoke": Size(4_000, _CARTPOLE, 1, (16, 32)),
            "small": Size(60_000, _CARTPOLE, 3, (16, 32, 64)),
            "full": Size(40_000_000, ATARI, 10, (16, 32, 64, 128, 256), 4),
        },
        ["The paper's grid of simulators is not known here; ours begins with its nominal 16.", _STAND_IN, _LARGE],
        said=[("GALA beside A2C", "in no sweep a smaller share of convergent runs (600 runs)")],
    ),
    Figure(
        "gala-1", "gala", "Figures 1b to 1g: returns per env step, second and kilojoule, four methods, 64 simulators",
        _four, together(curves, _best, _unread),
        {
            "smoke": Size(4_000, _CARTPOLE, 1, (16,)),
            "small": Size(80_000, _CARTPOLE, 3, (32,)),
            "full": Size(40_000_000, ATARI, 10, (64,), 4),
        },
        [_STAND_IN, _LARGE_64, _PRESETS,
         "Energy is the whole machine's, where its counters can be read."],
        timed=True,
        said=[
            ("scores after 40M env steps", "Table 1: `coterie reproduce gala-table1`"),
            NOT_READ,
        ],
    ),
    Figure(
        "gala-2a", "gala", "Figure 2a: the learners' distance to consensus and its bound",
        lambda size: [Arm(f"ring of {n}", _gala(16 * n, n, "--gossip.tau", "0"))
                      for n in size.points],
        _consensus,
        {
            "smoke": Size(4_000, _CARTPOLE, 1, (3,)),
            "small": Size(60_000, _CARTPOLE, 1, (3, 4)),
            "full": Size(40_000_000, ATARI, 1, (4, 8, 16), 4),
        },
        [_STAND_IN, "Mixing in lockstep (tau 0), for which Proposition 1 holds with the ring's own beta, cos(pi/n)."],
        said=[("the bound", "remarkably tight"), NOT_READ],
    ),
    Figure(
        "gala-2b", "gala", "Figure 2b: how alike the learners' gradients are", _gossip_or_sum, _cosines,
        {
            "smoke": Size(8_000, _CARTPOLE, 1, (16,)),
            "small": Size(100_000, _CARTPOLE, 1, (64,)),
            "full": Size(10_000_000, ATARI, 1, (64,), 4),
        },
        [_STAND_IN, fewer(steps=10_000_000), "Compared at most every 500 env steps of a learner, the last "
         "comparison before each line of metrics kept, and averaged over the whole run and all envs (there: all "
         "comparisons of 10M env steps)."],
        said=[("GALA beside A2C", "gradients less correlated"), ("peers beside others", "more correlated")],
    ),
    Figure(
        "gala-3", "gala", "Figure 3: use of the machine, speed and energy against simulators", _both, _used,
        {
            "smoke": Size(4_000, _CARTPOLE, 1, (16,)),
            "small": Size(40_000, ("Breakout-v5",), 1, (16, 32)),
            "full": Size(1_000_000, ("Pong-v5",), 3, (16, 32, 64, 128), 4),
        },
        ["The paper has one V100 and 48 cores.", "Its bubbles are curves here.",
         "Use and energy are the whole machine's: all cores' time, NVML's samples of GPUs, and the counters."],
        timed=True,
        said=[("use of the GPU", "about 10 times A2C's"), ("frames per kJ", "about 20,000 more than A2C's")],
    ),
    Figure(
        "gala-table1", "gala", "Table 1: greedy games of the best of several seeds", _four, _evaluated,
        {
            "smoke": Size(4_000, _CARTPOLE, 2, (16,)),
            "small": Size(60_000, _CARTPOLE, 3, (32,)),
            "full": Size(40_000_000, ATARI, 10, (64,), 4),
        },
        [_STAND_IN, _LARGE_64, _PRESETS],
        evaluate=10,
        said=[
            ("in the order of", ", ".join(ATARI)),
            ("A2C, 25M env steps", "8755 +- 811, 419 +- 3, 21, 16805 +- 172, 1850 +- 5, 2846 +- 22"),
            ("GALA-A2C, 25M env steps", "9500 +- 1020, 690 +- 72, 21, 18810 +- 37, 1874 +- 4, 2726 +- 189"),
            ("IMPALA, 50M env steps, from its own paper", "8220, 641, 21, 18902, 1717, 1727"),
        ],
    ),
]  # fmt: skip
