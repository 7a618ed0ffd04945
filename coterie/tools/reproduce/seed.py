"""SEED RL's figures and tables: speed, cost, latency, robustness to settings, learning curves, too large batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from coterie.envs.atari57 import human_normalized
from coterie.tools.report.charts import Chart, Line, lines
from coterie.tools.report.runs import RecordedRun
from coterie.tools.report.sections import AXES, Table, final_return
from coterie.tools.report.stats import on_grid
from coterie.tools.reproduce.draw import Measure, average, curves, number, rate, swept, together
from coterie.tools.reproduce.figure import (
    ATARI,
    MISSING,
    NOT_READ,
    Arm,
    Drawing,
    Figure,
    Result,
    Size,
    early,
    fewer,
    on,
)
from coterie.types import Array

_ENV = ("--env", "{env}")
_CARTPOLE, _BREAKOUT, _MOON = ("CartPole-v1",), ("Breakout-v5",), ("LunarLander-v3",)
_TPU = "The paper's machines (TPU cores, P100, 44 to 4,160 host cores) are not at hand: one machine, two ways."

_SPEED = [
    ("DeepMind Lab, 2 TPU v3 cores, to IMPALA on a P100", "2.5 times as fast"),
    ("8 cores, to 2", "4.4 times"),
    ("8 cores, to IMPALA on a P100", "11 times"),
    ("one P100 each", "1.58 times slower, and a frame 1.76 times cheaper"),
    ("football, 2 TPU v3 cores, to IMPALA", "1.6 times"),
    ("football, 8 cores, to 2", "4.1 times"),
]


def _speed(size: Size) -> list[Arm]:
    found = []
    for n in size.points:
        wide = (*_ENV, "--env.num-envs", str(n), "--model.torso", "a3c", "--algo.unroll-length", "20")
        found += [
            Arm("IMPALA", ("impala", *wide, "--decoupled.batch-size", "8"), n),
            Arm("SEED", ("seed-vtrace", *wide, "--central.batch-size", "8"), n),
        ]
    return found


def _ratios(results: Sequence[Result], size: Size) -> Drawing:
    drawn = swept(rate, "env steps/s", "simulators", "rate")(results, size)
    rows = []
    for n in size.points:
        both = [
            average(rate(run) for r in results if r.arm.label == name and r.arm.x == n for run in r.runs)
            for name in ("IMPALA", "SEED")
        ]
        ratio = both[1] / both[0] if both[0] > 0 else math.nan
        rows.append([f"this machine, {n} simulators, SEED to IMPALA", number(ratio)])
    ratios = Table("Ours: SEED's speed as a multiple of IMPALA's", ["", "ratio"], rows)
    return Drawing(drawn.charts, [ratios, *drawn.tables])


def _costs(size: Size) -> list[Arm]:
    seconds = ("--seconds", f"{size.seconds:g}", "--algo.unroll-length", "20", "--model.torso", "a3c")
    return [Arm("hosts", ("impala", *_ENV, *seconds, "--hosts", str(n), "--host-cores", "4", "--latency", "2e-4",
                               "--bandwidth", "1.25e9"), n, verb="plan") for n in size.points]  # fmt: skip


def _dollars(results: Sequence[Result], size: Size) -> Drawing:
    names = {"decoupled": "IMPALA (decoupled)", "central": "SEED (central)"}
    found: dict[tuple[str, str], dict[float, float]] = {}  # by env and acting: dollars by hosts
    rows = []
    for result in results:
        for told in result.told:
            for one in told["layouts"]:
                acting = one["layout"]["acting"]
                if one["layout"]["exchange"] == "solo" and acting in names:
                    env, dollars = told["env"], one["dollars_per_billion_frames"]
                    found.setdefault((env, acting), {})[result.arm.x] = dollars
                    rows.append([env, f"{result.arm.x:g}", acting, number(one["frames_per_s"]), number(dollars),
                                 one["bottleneck"]])  # fmt: skip
    charts, ratios = [], []
    for env in dict.fromkeys(env for env, _ in found):
        each = {acting: found.get((env, acting), {}) for acting in names}
        drawn = [Line(names[k], np.array(sorted(v)), np.array([v[x] for x in sorted(v)])) for k, v in each.items() if v]
        charts.append(lines(f"{env}: dollars per billion frames", drawn, "hosts of 4 cores", "dollars"))
        both = sorted(set(each["decoupled"]) & set(each["central"]))
        ratios += [[env, f"{x:g}", number(each["central"][x] / each["decoupled"][x])] for x in both]
    head = ["env", "hosts", "acting", "frames/s (simulated)", "dollars per 1e9 frames", "bottleneck"]
    return Drawing(
        charts,
        [
            Table("Ours, simulated: SEED's cost as a share of IMPALA's", ["env", "hosts", "ratio"], ratios),
            Table("Ours, simulated", head, rows),
        ],
    )


def _waits(size: Size) -> list[Arm]:
    small = ("--model.torso", "a3c", "--central.batch-size", "8", "--algo.unroll-length", "20")
    return [Arm("SEED", ("seed-vtrace", *_ENV, "--env.num-envs", str(n), *small), n) for n in size.points]


def _latency(results: Sequence[Result], size: Size) -> Drawing:
    def told(name: str) -> Measure:
        return lambda run: float(np.median(y)) if len(y := run.series(name)[1]) else math.nan

    charts: list[Chart] = []
    rows: list[list[str]] = []
    for name, label in (("latency/p50_ms", "median"), ("latency/p99_ms", "99th percentile")):
        drawn = swept(told(name), "milliseconds", "simulators", f"inference latency, {label}")(results, size)
        charts += drawn.charts
        rows += [[label, *row[1:]] for row in drawn.tables[0].rows]
    tables = [Table("Ours", ["", "env", "simulators", "milliseconds"], rows)]
    return Drawing(charts, tables)


def _settings(size: Size) -> list[Arm]:
    """Settings drawn at random, the same for all methods: learning rate and entropy bonus, log-uniform around what
    IMPALA's table of ranges allows on small tasks.
    """
    rng = np.random.default_rng(0)
    draws = [(10 ** rng.uniform(-4, -2.3), 10 ** rng.uniform(-4.3, -2)) for _ in range(size.points[0])]
    methods = {
        "A3C": ("a3c-store", *_ENV, "--learners", str(size.learners)),
        "A2C": ("a2c", *_ENV, "--optim.sqrt-scaling-from", "0"),
        "IMPALA": ("impala", *_ENV),
        "SEED": ("seed-vtrace", *_ENV),
    }
    return [
        Arm(name, (*args, "--optim.lr", f"{lr:.3g}", "--algo.entropy-coef", f"{entropy:.3g}"), i)
        for name, args in methods.items()
        for i, (lr, entropy) in enumerate(draws)
    ]


def _sorted(results: Sequence[Result], size: Size) -> Drawing:
    charts, rows = [], []
    for env in dict.fromkeys(env for r in results for env in r.envs):
        drawn = []
        for name in dict.fromkeys(r.arm.label for r in results):
            means = [
                average(final_return(run) for run in r.runs if run.env == env) for r in results if r.arm.label == name
            ]
            best = np.array(sorted((m for m in means if math.isfinite(m)), reverse=True))
            if len(best):
                drawn.append(Line(name, np.arange(1, len(best) + 1), best))
                rows.append(
                    [
                        env,
                        name,
                        number(float(best[0])),
                        number(float(np.median(best))),
                        number(float(best.mean())),
                        f"{len(best)} of {len(means)}",
                    ]
                )
        if drawn:
            charts.append(lines(f"{env}: settings by their final return", drawn, "rank of the setting", "final return"))
    head = ["env", "method", "best", "median setting", "mean of settings", "settings that told a return"]
    return Drawing(charts, [Table("Ours: final returns over settings", head, rows)])


def _against(size: Size) -> list[Arm]:
    wide = (*_ENV, "--env.num-envs", str(size.points[0]), "--model.torso", "a3c")
    return [
        Arm("SEED, V-trace", ("seed-vtrace", *wide, "--central.batch-size", "8")),
        Arm("IMPALA", ("impala", *wide, "--decoupled.batch-size", "8")),
    ]


def _football(size: Size) -> list[Arm]:
    return [Arm("SEED, V-trace", ("seed-football", *_ENV, "--env.num-envs", str(size.points[0]),
                                  "--central.batch-size", str(max(1, size.points[0] // 4)))) ]  # fmt: skip


def _r2d2(size: Size) -> list[Arm]:
    n = size.points[0]
    start = max(100_000 if size.steps >= 1_000_000 else 500, size.steps // 20)
    short = ("--replay.capacity", "20000", "--r2d2.length", "16", "--r2d2.burn-in", "8", "--r2d2.stride", "8",
             "--algo.unroll-length", "8")  # fmt: skip
    more = short if size.steps < 1_000_000 else ()
    return [Arm("SEED, R2D2", ("seed-r2d2", *_ENV, "--env.num-envs", str(n), "--q.learn-start", str(start + 40 * n),
                               *more))]  # fmt: skip


def _median_human(results: Sequence[Result], size: Size) -> Drawing:
    """Median over games of the human-normalised score, over env steps and hours."""
    charts = []
    for label, unit, series in AXES[:2]:
        drawn = []
        for result in results:
            games = [_one_game([run for run in result.runs if run.env == env], series) for env in result.envs]
            grid, scores = on_grid([one for one in games if one is not None])
            if len(grid) > 1 and len(scores) == len(games):
                over = grid / 3600 if unit == "second" else grid
                drawn.append(Line(result.arm.label, over, np.median(scores, 0)))
        if drawn:
            axis = "hours" if unit == "second" else label
            title = f"Median over games per {'hour' if unit == 'second' else unit}"
            charts.append(lines(title, drawn, axis, "median human-normalised score"))
    return Drawing(charts)


def _one_game(runs: Sequence[RecordedRun], series: Callable[..., tuple[Array, Array]]) -> tuple[Array, Array] | None:
    """The human-normalised score of one game, mean over its seeds; None where there is none."""
    grid, scores = on_grid([series(run, run.score) for run in runs])
    if not len(grid) or human_normalized(runs[0].env, 0.0) is None:
        return None
    return grid, np.array([human_normalized(runs[0].env, float(score)) for score in scores.mean(0)], np.float64)


def _wide(size: Size) -> list[Arm]:
    """A grid: batches of `n` rollouts from `n` simulators and from more."""
    return [
        Arm(
            f"batches of {n}", ("seed-vtrace", *_ENV, "--env.num-envs", str(many), "--central.batch-size", str(n)), many
        )
        for n in size.points
        for many in size.points
        if many >= n
    ]


FIGURES = [
    Figure(
        "seed-table1", "seed", "Table 1: SEED's speed beside IMPALA's", _speed, _ratios,
        {
            "smoke": Size(2_000, _BREAKOUT, 1, (8,)),
            "small": Size(30_000, _BREAKOUT, 1, (16, 32)),
            "full": Size(2_000_000, _BREAKOUT, 3, (16, 64, 256)),
        },
        [_TPU, "Breakout-v5 stands for DeepMind Lab and football, with batches of 8 and the a3c net."], timed=True,
        said=_SPEED,
    ),
    Figure(
        "seed-cost", "seed", "Tables 3 to 5: dollars for a billion frames, simulated", _costs, _dollars,
        {
            "smoke": Size(0, _CARTPOLE, points=(1,), seconds=2),
            "small": Size(0, _BREAKOUT, points=(1, 4, 16), seconds=15),
            "full": Size(0, _BREAKOUT, points=(1, 4, 16, 64, 256), seconds=120),
        },
        [_TPU, "`coterie plan` simulates both layouts from service times measured here; its error on real layouts and "
         "its assumed prices are on the page about it."],
        said=[
            ("DeepMind Lab, of IMPALA's cost", "about a quarter"), ("all tasks", "40 to 80% cheaper"),
            ("one P100 each", "a frame 1.76 times cheaper"),
        ],
    ),
    Figure(
        "seed-latency", "seed", "Table 13: inference latency", _waits, _latency,
        {
            "smoke": Size(2_000, _BREAKOUT, 1, (4, 8)),
            "small": Size(20_000, _BREAKOUT, 1, (8, 16, 32, 64)),
            "full": Size(1_000_000, _BREAKOUT, 3, (8, 32, 128, 512)),
        },
        [_TPU, "Hosts on the same machine, over unix sockets; batches of 8 and the a3c net."], timed=True,
        said=[("latencies", MISSING)],
    ),
    Figure(
        "seed-4", "seed", "Figure 4: final returns over hyperparameter settings, sorted", _settings, _sorted,
        {
            "smoke": Size(2_000, _CARTPOLE, 1, (2,)),
            "small": Size(15_000, _CARTPOLE, 1, (24,)),
            "full": Size(50_000_000, ATARI[1:3], 1, (24,), 8),
        },
        ["CartPole-v1 or Atari stand for DeepMind Lab.", fewer("settings", 24),
         "Learning rate from 1e-4 to 5e-3 and entropy bonus from 5e-5 to 1e-2, log-uniform, the same draws for all, "
         "each with its preset's update rule and loss; the paper's also vary the update rule's epsilon."],
        said=[NOT_READ],
    ),
    Figure(
        "seed-5", "seed", "Figure 5: learning curves on first-person tasks", _against, curves,
        {
            "smoke": Size(1_000, ("Basic-v1",), 1, (4,)),
            "small": Size(60_000, ("Basic-v1",), 1, (8,)),
            "full": Size(100_000_000, ("Basic-v1", "HealthGathering-v1", "MyWayHome-v1"), 3, (64,)),
        },
        ["ViZDoom's scenarios stand for DeepMind Lab's tasks; batches of 8 and the a3c net (paper: 32 and a "
         "ResNet).", "Paper's values are curves only."], timed=True,
        said=[NOT_READ],
    ),
    Figure(
        "seed-6", "seed", "Figure 6: football", _football, curves,
        {
            "smoke": Size(300, ("gfootball/academy_empty_goal_close-v1",), 1, (2,)),
            "small": Size(20_000, ("gfootball/academy_empty_goal_close-v1",), 1, (8,)),
            "full": Size(500_000_000, ("gfootball/11_vs_11_hard_stochastic-v1",), 3, (64,)),
        },
        [on(("gfootball/academy_empty_goal_close-v1",), "An empty goal instead of the whole game."), "Small batches.",
         fewer(steps=500_000_000)], timed=True,
        said=[("scoring reward, whole game", "0.46, and 4.76 at 4B frames")],
    ),
    Figure(
        "seed-7", "seed", "Figure 7: R2D2 on Atari, median human-normalised score per hour and per frame",
        _r2d2, together(_median_human, curves),
        {
            "smoke": Size(1_200, ("Pong-v5",), 1, (4,)),
            "small": Size(20_000, ("Pong-v5", "Breakout-v5"), 1, (8,)),
            "full": Size(200_000_000, ATARI, 3, (256,)),
        },
        ["Six games of 57 at most; env steps of four frames are counted, not frames.", fewer(steps=10_000_000_000),
         early("Sequences of 16 after 8, trained early."), "Returns are those of training games, with "
         "epsilons of 0.4 and less."],
        timed=True,
        said=[("median over 57 games", "1880% in 1.8 days, 3.1 times as fast as R2D2")],
    ),
    Figure(
        "seed-batch", "seed", "More actors and larger batches cost sample efficiency", _wide,
        together(swept(final_return, "final return", "simulators", "final return"), curves),
        {
            "smoke": Size(4_000, _CARTPOLE, 1, (8, 16)),
            "small": Size(80_000, _CARTPOLE, 1, (8, 32, 128)),
            "full": Size(20_000_000, _BREAKOUT, 3, (32, 128, 512, 2048)),
        },
        ["The paper says so of 440,000 frames/s on Atari (in words); the grid is ours."],
        said=[("440,000 frames/s on Atari", "cost sample efficiency (in words)")],
    ),
]  # fmt: skip
