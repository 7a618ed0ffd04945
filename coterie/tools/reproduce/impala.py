"""IMPALA's tables and figures, on envs that anybody can install."""

from __future__ import annotations

import math
from collections.abc import Sequence

from coterie.tools.report.charts import Line, intervals, lines
from coterie.tools.report.runs import RecordedRun
from coterie.tools.report.sections import Table, final_return
from coterie.tools.reproduce.draw import average, curves, rate, spread, swept, together
from coterie.tools.reproduce.figure import MISSING, NOT_READ, Arm, Drawing, Figure, Result, Size, fewer

_LAB = "DeepMind Lab needs a build of its own; {} here (`--env dmlab/LEVEL` where it is installed)."
_CORRECTIONS = {"vtrace": "V-trace", "one-step": "1-step importance sampling", "epsilon": "epsilon-correction",
                "none": "no correction"}  # fmt: skip
# Table 2: the mean of the three best of 24 settings on five tasks of DeepMind Lab.
_TABLE_2 = {
    ("vtrace", ""): "46.8, 32.9, 31.3, 229.2, 43.8",
    ("one-step", ""): "51.8, 35.9, 25.4, 215.8, 43.7",
    ("epsilon", ""): "44.2, 27.3, 4.3, 107.7, 41.5",
    ("none", ""): "40.3, 29.1, 5.0, 94.9, 16.1",
    ("vtrace", "replay"): "47.1, 35.8, 34.5, 250.8, 46.9",
    ("one-step", "replay"): "54.7, 34.4, 26.4, 204.8, 41.6",
    ("epsilon", "replay"): "30.4, 30.2, 3.9, 101.5, 37.6",
    ("none", "replay"): "35.0, 21.1, 2.8, 85.0, 11.2",
}
# Table 1: frames/s of task 1 and task 2 with the shallow net.
_TABLE_1 = {
    "A3C, workers of one simulator": "6.5K / 9K (32 workers, 64 cores)",
    "A2C, synchronous steps": "9K / 5K (48 cores)",
    "A2C, synchronous steps, several learners": MISSING,
    "A2C, synchronous trajectories": "16K / 17.5K (48 cores)",
    "A2C, dynamic batching": "16K / 13K (48 actors, 1 GPU)",
    "IMPALA, actors on the same cores": "17K / 20.5K (48 actors)",
    "IMPALA, central inference (dynamic batching)": "21K / 24K (48 actors, 1 GPU)",
}


def _throughput(size: Size) -> list[Arm]:
    env, n = ("--env", "{env}", "--model.torso", "a3c"), size.points[0]
    wide = ("--env.num-envs", str(n))
    return [
        Arm("A3C, workers of one simulator", ("a3c-store", *env, "--learners", str(size.learners),
                                              "--env.num-envs", "1", "--exchange", "hogwild")),
        Arm("A2C, synchronous steps", ("a2c", *env, *wide)),
        Arm("A2C, synchronous steps, several learners",
            ("a2c", *env, "--learners", str(size.learners), "--env.num-envs", str(n // size.learners))),
        # Rollouts of 20 and the layout of the IMPALA beside it, waited for by all.
        Arm("A2C, synchronous trajectories", ("a2c", *env, *wide, "--acting", "decoupled", "--decoupled.lockstep",
                                              "True", "--algo.unroll-length", "20")),
        Arm("A2C, dynamic batching", ("a2c", *env, *wide, "--acting", "central", "--central.lockstep", "True",
                                      "--algo.unroll-length", "20")),
        Arm("IMPALA, actors on the same cores", ("impala", *env, *wide, "--decoupled.batch-size", "8")),
        Arm("IMPALA, central inference (dynamic batching)",
            ("seed-vtrace", *env, *wide, "--central.batch-size", "8", "--algo.unroll-length", "20")),
    ]  # fmt: skip


def _rates(results: Sequence[Result], size: Size) -> Drawing:
    rows, bars = [], []
    for result in results:
        frames = [v for run in result.runs if math.isfinite(v := rate(run) * _frames(run))]
        rows.append([result.arm.label, _TABLE_1.get(result.arm.label, MISSING), spread(frames)])
        if frames:
            bars.append((result.arm.label, average(frames), min(frames), max(frames)))
    charts = (
        [intervals("Frames per second", bars, "frames/s", "Bars: the slowest and the fastest run.")] if bars else []
    )
    return Drawing(charts, [Table("Table 1", ["", "paper, frames/s", "ours, frames/s"], rows)])


def _frames(run: RecordedRun) -> float:
    """Frames in an env step, from what the run has told of both."""
    steps, frames = (run.series(f"{what}_per_s")[1] for what in ("env_steps", "frames"))
    known = steps > 0
    return float((frames[known] / steps[known]).mean()) if known.any() else math.nan


def _corrections(size: Size) -> list[Arm]:
    replay = ("--vtrace.replay-capacity", str(size.points[0]), "--vtrace.replay-share", "0.5")
    return [
        Arm(name, ("impala", "--env", "{env}", "--vtrace.correction", kind, *(replay if panel else ())), panel=panel)
        for panel in ("", "with replay")
        for kind, name in _CORRECTIONS.items()
    ]


def _table_2(results: Sequence[Result], size: Size) -> Drawing:
    kinds = {name: kind for kind, name in _CORRECTIONS.items()}
    rows = []
    for result in results:
        paper = _TABLE_2[kinds[result.arm.label], "replay" if result.arm.panel else ""]
        ours = [
            f"{spread([final_return(run) for run in result.runs if run.env == env])} ({env})" for env in result.envs
        ]
        rows.append([result.arm.label, result.arm.panel or "without replay", paper, ", ".join(ours)])
    text = "The paper's five tasks in its order: watermaze, keys and doors, three opponents, goal locations, seekavoid."
    return Drawing((), [Table("Table 2", ["", "", "paper", "ours, final return"], rows, text)])


def _lagged(size: Size) -> list[Arm]:
    return [
        Arm(_CORRECTIONS[kind], ("impala", "--env", "{env}", "--vtrace.correction", kind,
                                 "--decoupled.publish-every", str(n)), n)
        for kind in ("vtrace", "none")
        for n in size.points
    ]  # fmt: skip


def _transfer(size: Size) -> list[Arm]:
    n = str(size.points[0])
    common = (
        "--env.num-envs",
        n,
        "--decoupled.batch-size",
        n,
        "--model.torso",
        "a3c",
        "--atari.full-action-set",
        "True",
    )
    experts = [Arm("experts", ("impala", "--env", "{env}", *common), envs=(env,)) for env in size.envs]
    return [*experts, Arm("one agent for all", ("impala", "--env", "{env}", *common), envs=(",".join(size.envs),))]


def _multi_task(results: Sequence[Result], size: Size) -> Drawing:
    rows = []
    whole = next((result for result in results if result.arm.label != "experts"), None)
    for env in size.envs:
        expert = [final_return(run) for r in results if r.arm.label == "experts" for run in r.runs if run.env == env]
        shared = [_of_task(run.lines, env) for run in whole.runs] if whole else []
        rows.append([env, spread(expert), spread(shared)])
    steps = "An expert has as many env steps of its game as the one agent has of all games together."
    charts = [
        lines(f"{env}: the expert and the one agent", found, "env steps, of all games together for the one agent",
              "return, mean of the last 100 games")
        for env in size.envs
        if (found := _beside(results, env))
    ]  # fmt: skip
    return Drawing(charts, [Table("Ours: final return", ["env", "expert", "one agent"], rows, steps)])


def _beside(results: Sequence[Result], env: str) -> list[Line]:
    found = []
    for result in results:
        expert = result.arm.label == "experts"
        for run in result.runs:
            x, y = run.series(run.score if expert else f"return/{env}")
            if len(x) and (run.env == env or not expert):
                found.append(Line(f"{'expert' if expert else 'one agent'}, seed {run.seed}", x, y))
    return found


def _of_task(lines: Sequence[dict[str, float]], env: str) -> float:
    values = [line[f"return/{env}"] for line in lines if line.get(f"return/{env}") is not None]
    return average(values[-max(1, len(values) // 10) :])


_MOON, _PIXELS = ("LunarLander-v3",), ("Breakout-v5",)
_GAMES = ("Pong-v5", "Breakout-v5", "SpaceInvaders-v5")

FIGURES = [
    Figure(
        "impala-table1", "impala", "Table 1: frames per second of seven ways to use one machine", _throughput, _rates,
        {
            "smoke": Size(2_000, _PIXELS, 1, (8,)),
            "small": Size(30_000, _PIXELS, 1, (16,)),
            "full": Size(1_000_000, (*_PIXELS, "Pong-v5"), 3, (48,), 8),
        },
        [_LAB.format("Breakout-v5 stands for its two tasks"), "84x84 grey frames, four stacked, instead of 96x72 RGB; "
         "no LSTM, batches of 8, the smaller net.", "Rates are of this machine; what can be compared is their order "
         "and their ratios."],
        timed=True,
        said=[
            ("A2C, synchronous steps, 48 cores and 1 GPU", "13K / 5.5K frames/s"),
            ("A3C on 200 cores of several machines", "46K / 50K frames/s"),
            ("IMPALA, 150 cores and 1 GPU", "80K frames/s"),
            ("IMPALA, optimised, 375 cores and 1 GPU", "200K frames/s"),
            ("IMPALA, optimised, batches of 128, 500 cores and 1 GPU", "250K frames/s"),
        ],
    ),
    Figure(
        "impala-table2", "impala", "Table 2: four corrections, with and without replay",
        _corrections, together(_table_2, curves),
        {
            "smoke": Size(6_000, _MOON, 1, (200,)),
            "small": Size(100_000, _MOON, 1, (2000,)),
            "full": Size(10_000_000, (*_GAMES, "Qbert-v5", "Seaquest-v5"), 5, (10_000,)),
        },
        [_LAB.format("LunarLander-v3, or five Atari games, stand for its five tasks"),
         "The presets' settings instead of the three best of 24.", fewer("trajectories in the replay", 10_000)],
    ),
    Figure(
        "impala-e1", "impala", "Figure E.1: policy lag, with V-trace and without a correction", _lagged,
        swept(final_return, "final return", "learner steps between publications", "final return"),
        {
            "smoke": Size(4_000, _MOON, 1, (1, 16)),
            "small": Size(100_000, _MOON, 1, (1, 16, 64)),
            "full": Size(10_000_000, _MOON, 5, (1, 4, 16, 64, 256)),
        },
        [_LAB.format("LunarLander-v3 stands for it"), "The lag is made by publishing weights rarely; no replay."],
        said=[NOT_READ],
    ),
    Figure(
        "impala-transfer", "impala", "One agent for several tasks against an expert for each", _transfer, _multi_task,
        {
            "smoke": Size(1_500, _GAMES[:2], 1, (6,)),
            "small": Size(40_000, _GAMES, 1, (6,)),
            "full": Size(200_000_000, _GAMES, 3, (48,)),
        },
        ["Two or three Atari games with the full set of actions stand for DMLab-30 and Atari-57; no PBT.",
         "Returns, not human-normalised scores; the a3c net and small batches, where the paper's numbers are of its "
         "deep net."],
        said=[
            ("DMLab-30, mean capped score", "experts, deep net 44.5; one agent, deep net 46.5"),
            ("Atari-57, median human-normalised score", "experts, deep net 191.8%; one agent 59.7%"),
        ],
    ),
]  # fmt: skip
