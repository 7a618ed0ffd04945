"""The figures of Accelerated Methods about value learning's batches: sizes, secondary learners, norms, saturation."""

from __future__ import annotations

import re
from collections.abc import Sequence

from coterie.tools.report.charts import Line, lines
from coterie.tools.report.sections import Table
from coterie.tools.reproduce.draw import average, curves, spread, swept
from coterie.tools.reproduce.figure import ATARI, NOT_READ, Arm, Drawing, Figure, Result, Size, early, fewer, on

_CARTPOLE, _BREAKOUT, _QBERT = ("CartPole-v1",), ("Breakout-v5",), ("Qbert-v5",)
_ENV = ("--env", "{env}")
_FIVE = ("--algo.unroll-length", "5")
SMALL_ENV = on(_CARTPOLE, "CartPole-v1 stands for Atari.")
EARLY = early(
    "Value learning explores for a fifth of the run, begins to train after a twentieth and keeps little in its replay."
)
_ONE_RATE = on(_CARTPOLE, "One learning rate and one epsilon of Adam's for all batch sizes, the preset's.")
TRAINING_GAMES = "Returns are those of training games, where the paper plays evaluation games."


def _pairs_differ(size: Size) -> str:
    found = "{1} of {2}, {2} of {1} and {0} of {0}".format(*_three(size))
    return "" if _three(size) == (256, 64, 2048) else f"{found} instead of 64 of 2048, 2048 of 64 and 256 of 256."


def shortened(size: Size) -> tuple[str, ...]:
    """The presets' own start, exploration and replay, except in runs that end before them."""
    if size.steps >= 1_000_000:
        return ()
    start = max(1000, size.steps // 20)
    kept = ("--replay.capacity", str(max(20_000, 4 * start)))
    return ("--q.learn-start", str(start), "--q.epsilon-steps", str(max(1, size.steps // 5)), *kept)


def _rate(preset: str, n: int, size: Size) -> tuple[str, ...]:
    """The paper's learning rate and Adam's epsilon for batches of `n`, on Atari."""
    if not set(size.envs) <= set(ATARI):
        return ()
    if preset == "dqn":
        return ("--optim.lr", "2.5e-4" if n < 512 else "7.5e-4" if n < 1024 else "15e-4")
    return ("--optim.lr", "2.5e-4" if n < 256 else "4.2e-4", "--optim.eps", f"{0.01 / n:.3g}")


def _batches(size: Size) -> list[Arm]:
    return [
        Arm(f"batch {n}", (preset, *_ENV, "--q.batch-size", str(n), *_rate(preset, n, size), *shortened(size)),
            panel=name)
        for preset, name in (("dqn", "DQN"), ("c51", "C51"))
        for n in size.points
    ]  # fmt: skip


def _three(size: Size) -> tuple[int, int, int]:
    """The middle, the least and the largest batch."""
    return sorted(size.points)[len(size.points) // 2], min(size.points), max(size.points)


def _secondary(size: Size) -> list[Arm]:
    middle, small, large = _three(size)
    pairs = ((large, small), (small, large), (middle, middle))
    every = str(min(1_000_000, max(1000, size.steps // 5)))
    return [
        Arm(f"{two} of {one}", ("c51", *_ENV, "--q.batch-size", str(one), "--q.secondary-batch", str(two),
                                "--eval.every", every, *shortened(size)))
        for one, two in pairs
    ]  # fmt: skip


def _followed(results: Sequence[Result], size: Size) -> Drawing:
    charts, rows = [], []
    for result in results:
        for env in result.envs:
            found = []
            for name, label in (("eval/return", "primary"), ("eval/secondary_return", "secondary")):
                ends = []
                for run in (run for run in result.runs if run.env == env):
                    x, y = run.series(name)
                    if len(x):
                        found.append(Line(f"{label}, seed {run.seed}", x, y))
                        ends.append(float(y[-1]))
                rows.append([result.arm.label, env, label, spread(ends)])
            if found:
                title = f"{env}: batches of {result.arm.label.replace(' of ', ', and of a primary with ')}"
                charts.append(lines(title, found, "env steps", "return of greedy games"))
    text = "Batch sizes: secondary of primary. Both begin with the same weights; only the primary acts."
    return Drawing(charts, [Table("Ours: last greedy evaluation", ["pair", "env", "learner", "return"], rows, text)])


def _rules(size: Size) -> list[Arm]:
    every = ("--log.norms", str(max(100, size.steps // 40)))
    return [
        Arm(f"{rule}, batch {n}", ("c51", *_ENV, "--q.batch-size", str(n), *options, *every, *shortened(size)))
        for n in size.points
        for rule, options in (("Adam", _rate("c51", n, size)),
                              ("RMSProp", ("--optim.rule", "rmsprop", "--optim.lr", "2.5e-4")))
    ]  # fmt: skip


def _norms(results: Sequence[Result], size: Size) -> Drawing:
    """The norms of the torso's first and last layer (on images Conv-0 and FC-0, the paper's two), over the run."""
    charts = []
    layers = [n.removeprefix("norm/weights/") for r in results for run in r.runs for n in run.names("norm/weights/")]
    torso = [name for name in dict.fromkeys(layers) if re.fullmatch(r"torso\..*weight", name)]
    torso.sort(key=lambda name: [int(n) for n in re.findall(r"\d+", name)])  # as they follow each other
    for layer in dict.fromkeys([*torso[:1], *torso[-1:]]):
        for kind, what in (("weights", "weights"), ("gradient", "gradient, before clipping"), ("step", "step")):
            found = []
            for result in results:
                for run in result.runs[:1]:
                    x, y = run.series(f"norm/{kind}/{layer}")
                    if len(x) > 1:
                        found.append(Line(result.arm.label, x, y))
            if found:
                charts.append(lines(f"{layer}: {what}", found, "env steps", "Euclidean norm", log_y=kind != "weights"))
    return Drawing(charts)


def _halves(size: Size) -> list[Arm]:
    every = ("--log.norms", str(max(100, size.steps // 40)))
    return [
        *(Arm("C51", ("c51", *_ENV, "--q.batch-size", str(n), *every, *shortened(size)), n) for n in size.points),
        *(Arm("A2C", ("a2c", *_ENV, "--env.num-envs", str(max(2, n // 5)), *_FIVE, *every), max(2, n // 5) * 5)
          for n in size.points),
    ]  # fmt: skip


def _saturation(results: Sequence[Result], size: Size) -> Drawing:
    return swept(
        lambda run: average(run.series("cosine/half")[1]), "cosine of half the batch's gradient with the whole's",
        "samples in a batch", "gradient saturation",
    )(results, size)  # fmt: skip


FIGURES = [
    Figure(
        "accel-3", "accel", "Figure 3: DQN and C51 with batches of 32 to 2048", _batches, curves,
        {
            "smoke": Size(2_000, _CARTPOLE, 1, (32,)),
            "small": Size(30_000, _CARTPOLE, 1, (32, 128, 512)),
            "full": Size(50_000_000, ATARI, 2, (32, 512, 2048)),
        },
        [SMALL_ENV, EARLY, TRAINING_GAMES, fewer("samples in a batch", 2048, steps=50_000_000),
         _ONE_RATE],
        said=[("scores of small and large batches", "Table 1: `coterie reproduce accel-table1`"), NOT_READ],
    ),
    Figure(
        "accel-5", "accel", "Figures 5 to 7: a secondary learner that trains from the primary's replay",
        _secondary, _followed,
        {
            "smoke": Size(2_500, _CARTPOLE, 1, (16, 32, 64)),
            "small": Size(25_000, _CARTPOLE, 1, (32, 128, 512)),
            "full": Size(50_000_000, _QBERT, 2, (64, 256, 2048)),
        },
        [SMALL_ENV, EARLY, _pairs_differ, fewer(steps=50_000_000), "Only one of the paper's games, at most."],
        said=[NOT_READ],
    ),
    Figure(
        "accel-8", "accel", "Figure 8: norms of weights, gradients and steps, Adam and RMSProp", _rules, _norms,
        {
            "smoke": Size(2_000, _CARTPOLE, 1, (32,)),
            "small": Size(30_000, _CARTPOLE, 1, (32, 512)),
            "full": Size(50_000_000, _QBERT, 1, (32, 2048)),
        },
        [SMALL_ENV, EARLY, fewer("samples in a batch", 2048, steps=50_000_000),
         _ONE_RATE,
         "RMSProp with a learning rate of 2.5e-4 and Adam's epsilon; the paper's for C51 are not available here."],
        said=[NOT_READ],
    ),
    Figure(
        "accel-saturation", "accel", "Gradient saturation: half a batch beside the whole", _halves, _saturation,
        {
            "smoke": Size(3_000, _CARTPOLE, 1, (40,)),
            "small": Size(20_000, _CARTPOLE, 2, (40, 160, 640)),
            "full": Size(5_000_000, _BREAKOUT, 2, (32, 128, 512, 2048)),
        },
        [SMALL_ENV, EARLY, "C51 and A2C on one game; the paper's own choice is not available here."],
        said=[("noise alone", "1 / sqrt 2 = 0.7071"), NOT_READ],
    ),
]  # fmt: skip
