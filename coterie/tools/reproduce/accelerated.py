"""The figures and tables of Accelerated Methods about speed, scaling and scores."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from coterie.tools.report.charts import Line, lines
from coterie.tools.report.sections import Table, final_return
from coterie.tools.reproduce.batches import EARLY, SMALL_ENV, TRAINING_GAMES, shortened
from coterie.tools.reproduce.draw import curves, human, number, rate, spread, swept
from coterie.tools.reproduce.figure import ATARI, MISSING, NOT_READ, Arm, Drawing, Figure, Result, Size, fewer, on

_CARTPOLE, _BREAKOUT = ("CartPole-v1",), ("Breakout-v5",)
_GPUS = "A learner stands for a GPU; on a machine without GPUs learners share its cores."
_FRAMES = on(ATARI, "84x84 frames instead of 104x80.")
_ENV = ("--env", "{env}")

# Table 1: mean and median human-normalised score over 49 games.
_TABLE_1 = {
    "A2C, 16 simulators": "2.5 / 0.65", "A2C, 128 simulators": "8.0 / 0.48", "A3C, 3 x 16": "5.4 / 0.53",
    "PPO, 8 simulators": "2.8 / 1.2", "PPO, 128 simulators": "9.8 / 0.97", "APPO, 8 x 8": "8.8 / 1.2",
    "DQN, batch 32": "2.4 / 0.96", "DQN, batch 512": "9.8 / 1.4", "C51, batch 32": "25.5 / 2.1",
    "C51, batch 2048": "22.1 / 2.9", "e-Rainbow, batch 512": "22.4 / 2.5",
}  # fmt: skip
# Table 2: hours for 50M steps on 1, 2, 4, 8 GPUs.
_TABLE_2 = {
    "A2C": (3.8, 2.2, 1.2, 0.59), "A3C": (math.nan, 2.4, 1.3, 0.65), "PPO": (4.4, 2.6, 1.5, 1.1),
    "APPO": (math.nan, 2.8, 1.5, 0.71), "DQN, batch 512": (8.3, 4.8, 3.1, 2.6),
    "e-Rainbow, batch 512": (14.1, 8.6, 6.6, 6.4), "C51, batch 2048": (10.7, 6.0, 2.8, 1.8),
    "DQN, batch 512, asynchronous": (math.nan, math.nan, 3.9, math.nan),
}  # fmt: skip
# Table 3: thousands of samples/s with 8 GPUs, synchronous and asynchronous.
_TABLE_3 = {64: (29.6, 31.9), 128: (33.0, 34.7), 256: (35.7, 36.7), 512: (35.8, 38.4)}


def _sampling(size: Size) -> list[Arm]:
    return [
        Arm("a2c", ("a2c", *_ENV, "--env.num-envs", str(n), "--seconds", f"{size.seconds:g}"), n, verb="bench")
        for n in size.points
    ]


def _sampled(results: Sequence[Result], size: Size) -> Drawing:
    """Env steps/s of the envs alone, with actions chosen, and with training, from `coterie bench`."""
    names = {"env_only": "envs alone (no inference)", "acting": "with batched inference", "training": "with training"}
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in names}
    rows = []
    for result in results:
        for told in result.told:
            for name, (x, y) in found.items():
                x.append(result.arm.x / told["cores"])
                y.append(told[name])
            rows.append([told["env"], number(result.arm.x), number(result.arm.x / told["cores"]),
                         *(number(told[name]) for name in names)])  # fmt: skip
    drawn = [Line(label, np.array(found[name][0]), np.array(found[name][1])) for name, label in names.items()]
    chart = lines("Sampling", drawn, "simulators for each core", "env steps/s", log_x=True)
    return Drawing([chart], [Table("Ours: env steps/s", ["env", "simulators", "for each core", *names.values()], rows)])


def _scaling(size: Size) -> list[Arm]:
    found = []
    for n in size.points:
        found.append(Arm(f"{n} simulators", ("a2c", *_ENV, "--env.num-envs", str(n)), panel="A2C"))
        # PPO keeps its batch: the more simulators, the shorter the rollouts, down to 4 steps.
        unroll = max(4, 2048 // n)
        shape = ("--algo.unroll-length", str(unroll), "--ppo.minibatch-size", "512", "--ppo.batch-size", "0")
        found.append(Arm(f"{n} simulators", ("ppo", *_ENV, "--env.num-envs", str(n), *shape), panel="PPO"))
    for n in sorted({1, 2, size.learners}):
        found.append(Arm(f"{n} learners", ("a3c-store", *_ENV, "--learners", str(n)), panel="A3C"))
    for period in (1, 4):
        found.append(Arm(f"{period} updates between syncs",
                         ("appo", *_ENV, "--learners", str(size.learners), "--store.local-steps", str(period)),
                         panel="APPO"))  # fmt: skip
    return found


def _minutes(size: Size) -> list[Arm]:
    many = ("--learners", str(size.learners))
    return [
        Arm("A2C", ("a2c", *_ENV, *many)), Arm("A3C", ("a3c-store", *_ENV, *many)),
        Arm("PPO", ("ppo", *_ENV, *many)), Arm("APPO", ("appo", *_ENV, *many)),
    ]  # fmt: skip


def _methods(size: Size) -> list[Arm]:
    own = shortened(size)
    found = {
        "A2C, 16 simulators": ("a2c", *_ENV, "--env.num-envs", "16"),
        "A2C, 128 simulators": ("a2c", *_ENV, "--env.num-envs", "128"),
        "A3C, 3 x 16": ("a3c-store", *_ENV, "--learners", "3"),
        "PPO, 8 simulators": ("ppo", *_ENV, "--env.num-envs", "8"),
        "PPO, 128 simulators": ("ppo", *_ENV, "--env.num-envs", "128", "--algo.unroll-length", "16"),
        f"APPO, {size.learners} x 8": ("appo", *_ENV, "--learners", str(size.learners), "--env.num-envs", "8"),
        "DQN, batch 32": ("dqn", *_ENV, "--q.batch-size", "32", *own), "DQN, batch 512": ("dqn-512", *_ENV, *own),
        "C51, batch 32": ("c51", *_ENV, "--q.batch-size", "32", *own), "C51, batch 2048": ("c51-2048", *_ENV, *own),
        "e-Rainbow, batch 512": ("rainbow-512", *_ENV, *own),
    }  # fmt: skip
    return [Arm(label, args) for label, args in found.items()]


def _scores(results: Sequence[Result], size: Size) -> Drawing:
    ours = human(results, size).tables[0]
    appo = next(r.arm.label for r in results if r.arm.label.startswith("APPO"))
    known = _TABLE_1 | {appo: f"{_TABLE_1['APPO, 8 x 8']} (8 x 8)"}
    rows = [[row[0], known[row[0]], f"{row[1]} / {row[2]}", row[3]] for row in ours.rows]
    each = [
        [r.arm.label, env, spread([final_return(run) for run in r.runs if run.env == env])]
        for r in results
        for env in r.envs
    ]
    tables = [
        Table("Table 1: mean / median human-normalised score", ["method", "paper, 49 games", "ours", "games"], rows),
        Table("Ours: final return", ["method", "env", "return"], each),
    ]
    return Drawing((), tables)


def _hours(size: Size) -> list[Arm]:
    own = shortened(size)
    presets = {
        "A2C": ("a2c", "--env.num-envs", "16"), "A3C": ("a3c-store", "--env.num-envs", "16"),
        "PPO": ("ppo", "--env.num-envs", "8"), "APPO": ("appo", "--env.num-envs", "8"),
        "DQN, batch 512": ("dqn-512", *own), "e-Rainbow, batch 512": ("rainbow-512", *own),
        "C51, batch 2048": ("c51-2048", *own), "DQN, batch 512, asynchronous": ("dqn-async", *own),
    }  # fmt: skip
    return [
        Arm(label, (*args[:1], *_ENV, "--learners", str(n), *args[1:]), n)
        for label, args in presets.items()
        for n in size.points
        if n > 1 or label not in ("A3C", "APPO", "DQN, batch 512, asynchronous")
    ]


def _table_2(results: Sequence[Result], size: Size) -> Drawing:
    rows = []
    for result in results:
        place = (1, 2, 4, 8).index(int(result.arm.x)) if result.arm.x in (1, 2, 4, 8) else None
        paper = number(_TABLE_2[result.arm.label][place]) if place is not None else MISSING
        hours = [50e6 / rate(run) / 3600 if rate(run) > 0 else math.nan for run in result.runs]
        rows.append([result.arm.label, number(result.arm.x), paper, spread(hours)])
    return Drawing((), [Table("Table 2: hours for 50M env steps", ["method", "learners", "paper, GPUs", "ours"], rows)])


def _synchrony(size: Size) -> list[Arm]:
    each = max(1, size.learners)
    found = []
    for n in size.points:
        base = (*_ENV, "--learners", str(each), "--env.num-envs", str(max(1, n // each)))
        for label, args in (("synchronous", ("a2c", *base, "--exchange", "allreduce")),
                            ("asynchronous", ("a3c-store", *base))):  # fmt: skip
            found.append(Arm(label, args, n))
    return found


def _table_3(results: Sequence[Result], size: Size) -> Drawing:
    drawn = swept(rate, "env steps/s", "simulators", "rate")(results, size)
    rows = []
    for result in results:
        paper = _TABLE_3.get(int(result.arm.x))
        kind = ("synchronous", "asynchronous").index(result.arm.label)
        said = MISSING if paper is None else number(1000 * paper[kind])
        rows.append([number(result.arm.x), result.arm.label, said, spread([rate(run) for run in result.runs])])
    table = Table("Table 3: samples/s", ["simulators", "", "paper, 8 GPUs", "ours"], rows)
    return Drawing(drawn.charts, [table])


FIGURES = [
    Figure(
        "accel-1b", "accel", "Figure 1b: sampling speed against simulators for each core", _sampling, _sampled,
        {
            "smoke": Size(0, _CARTPOLE, points=(4, 8), seconds=2),
            "small": Size(0, _BREAKOUT, points=(4, 8, 16, 32), seconds=15),
            "full": Size(0, _BREAKOUT, points=(4, 8, 16, 32, 64, 128), seconds=120),
        },
        [SMALL_ENV, "This machine's cores instead of 1 to 16 and one GPU.", _FRAMES], timed=True,
        said=[("16 cores and one GPU, 8 simulators for each core", "about 80% of the speed without inference")],
    ),
    Figure(
        "accel-2", "accel", "Figure 2: A2C, A3C, PPO and APPO with more simulators or learners", _scaling, curves,
        {
            "smoke": Size(4_000, _CARTPOLE, 1, (16,)),
            "small": Size(60_000, _CARTPOLE, 1, (16, 64, 256)),
            "full": Size(25_000_000, ATARI, 2, (16, 64, 128, 512), 8),
        },
        [SMALL_ENV, _GPUS, _FRAMES, fewer("simulators", 512, steps=25_000_000),
         "PPO from 16 simulators instead of 8; A3C with 1, 2 and as many learners as elsewhere instead of 1 to 32."],
        said=[("scores of 16 and 128 simulators", "Table 1: `coterie reproduce accel-table1`"), NOT_READ],
    ),
    Figure(
        "accel-4", "accel", "Figure 4: returns over minutes with all learners", _minutes, curves,
        {
            "smoke": Size(4_000, _CARTPOLE, 1),
            "small": Size(100_000, _CARTPOLE, 1),
            "full": Size(25_000_000, ATARI, 1, learners=8),
        },
        [SMALL_ENV, _GPUS, _FRAMES, fewer(steps=25_000_000, learners=8)], timed=True,
        said=[("Pong with PPO, 8 GPUs", "4 minutes"), ("all steep phases", "less than 10 minutes"), NOT_READ],
    ),
    Figure(
        "accel-table1", "accel", "Table 1: human-normalised scores of eleven methods", _methods, _scores,
        {
            "smoke": Size(1_500, _CARTPOLE, 1),
            "small": Size(20_000, _CARTPOLE, 1),
            "full": Size(25_000_000, ATARI, 1, learners=8),
        },
        [on(ATARI, "Six games at most of the paper's 49 (--env names others)."), SMALL_ENV,
         on(_CARTPOLE, "It has no human score; the final returns are shown."),
         fewer(steps=50_000_000, learners=8), "The paper has 25M env steps for all but value learning, and quotes DQN "
         "and C51 with batches of 32 from others.", EARLY, TRAINING_GAMES, _GPUS, _FRAMES],
    ),
    Figure(
        "accel-table2", "accel", "Table 2: hours for 50M env steps against learners", _hours, _table_2,
        {
            "smoke": Size(1_500, _CARTPOLE, 1, (1, 2)),
            "small": Size(12_000, _BREAKOUT, 1, (1, 2)),
            "full": Size(1_000_000, _BREAKOUT, 1, (1, 2, 4, 8)),
        },
        [SMALL_ENV, _GPUS, _FRAMES, fewer("learners", 8), EARLY, "Hours are extrapolated from the rate "
         "of a shorter run; each learner of value learning has the whole batch."], timed=True,
    ),
    Figure(
        "accel-table3", "accel", "Table 3: synchronous and asynchronous sampling", _synchrony, _table_3,
        {
            "smoke": Size(4_000, _CARTPOLE, 1, (8, 16)),
            "small": Size(20_000, _BREAKOUT, 1, (16, 32, 64)),
            "full": Size(2_000_000, _BREAKOUT, 1, (64, 128, 256, 512), 8),
        },
        [SMALL_ENV, _GPUS, _FRAMES, fewer("simulators", 512, learners=8),
         "The paper's table is of sampling alone; here A2C and A3C train on what they sample."], timed=True,
    ),
]  # fmt: skip
