"""The figures of A3C with GAE: entropy, unroll length ("lag"), lambda, number of workers and learning rate."""

from __future__ import annotations

from coterie.tools.reproduce.draw import curves
from coterie.tools.reproduce.figure import NOT_READ, Arm, Figure, Size, fewer, on

_WORKERS = fewer(learners=64)
_PRESET = (
    "What is not varied is the preset's, and not the paper's defaults (learning rate 1e-4, unrolls of 20, lambda 1, "
    "no entropy "
    "bonus)."
)
_V3 = on(("LunarLander-v3", "Hopper-v5"), "Version 3 (LunarLander) or 5 (Hopper) stands for the paper's 2.")
_LIMITS = "Time limits are not treated as ends, as its code did."
_CURVES = "The paper has curves of single runs over games of one worker; ours are over env steps of all workers."


def _base(size: Size) -> tuple[str, ...]:
    return ("a3c", "--env", "{env}", "--learners", str(size.learners))


def _entropy(size: Size) -> list[Arm]:
    base, schedule = _base(size), "--algo.entropy-schedule"
    step = ("--algo.entropy-coef", "0.01", f"{schedule}.kind", "steps", f"{schedule}.by", "episodes", f"{schedule}.at")
    games = str(size.points[0] * size.learners)  # of all workers; the paper's are of each
    return [
        Arm("beta 0", (*base, "--algo.entropy-coef", "0")),
        Arm("beta 0.01", (*base, *step, games, f"{schedule}.factors", "1")),
        Arm("dynamic", (*base, *step, games, f"{schedule}.factors", "0")),
    ]


def _lag(size: Size) -> list[Arm]:
    return [Arm(f"unroll {n}", (*_base(size), "--algo.unroll-length", str(n))) for n in size.points]


def _lambda(size: Size) -> list[Arm]:
    base = (*_base(size), "--algo.unroll-length", str(size.points[0]))
    return [Arm(f"lambda {value}", (*base, "--algo.gae-lambda", value)) for value in ("0.98", "0.99", "1.0")]


def _workers(size: Size) -> list[Arm]:
    return [Arm(f"{n} workers", ("a3c", "--env", "{env}", "--learners", str(n))) for n in size.points]


def _rate(size: Size) -> list[Arm]:
    return [Arm(f"learning rate {lr}", (*_base(size), "--optim.lr", lr)) for lr in ("1e-3", "1e-4", "1e-5")]


_MOON, _HILL, _HOPPER = ("LunarLander-v3",), ("MountainCar-v0",), ("Hopper-v5",)


def _of_lag(name: str, title: str, envs: tuple[str, ...]) -> Figure:
    sizes = {
        "smoke": Size(4_000, envs, 1, (4, 20), 2),
        "small": Size(60_000, envs, 1, (4, 20, 100), 8),
        "full": Size(5_000_000, envs, 5, (4, 20, 100), 64),
    }
    return Figure(
        name, "a3c-gae", title, _lag, curves, sizes, [_WORKERS, _PRESET, _CURVES, _V3, _LIMITS], said=[NOT_READ]
    )


FIGURES = [
    Figure(
        "a3c-gae-3-entropy", "a3c-gae", "Figure 3: the entropy bonus on MountainCar", _entropy, curves,
        {
            "smoke": Size(4_000, _HILL, 1, (10,), 2),
            "small": Size(80_000, _HILL, 1, (100,), 8),
            "full": Size(5_000_000, _HILL, 5, (1000,), 64),
        },
        [_WORKERS, _PRESET, _CURVES, _V3, _LIMITS, fewer("games of each worker with the bonus", 1000)],
        said=[NOT_READ],
    ),
    _of_lag("a3c-gae-3-lag", "Figure 3: the unroll length on LunarLander", _MOON),
    Figure(
        "a3c-gae-3-lambda", "a3c-gae", "Figure 3: lambda on LunarLander with unrolls of 100", _lambda, curves,
        {
            "smoke": Size(4_000, _MOON, 1, (20,), 2),
            "small": Size(80_000, _MOON, 1, (100,), 8),
            "full": Size(5_000_000, _MOON, 5, (100,), 64),
        },
        [_WORKERS, _PRESET, _CURVES, _V3, _LIMITS],
        said=[NOT_READ],
    ),
    Figure(
        "a3c-gae-3-workers", "a3c-gae", "Figure 3: the number of workers, over time, on LunarLander", _workers, curves,
        {
            "smoke": Size(4_000, _MOON, 1, (1, 2)),
            "small": Size(60_000, _MOON, 1, (1, 8, 24)),
            "full": Size(5_000_000, _MOON, 5, (1, 24, 64)),
        },
        [_PRESET, _CURVES, _V3, _LIMITS,
         "The paper's cluster has at least as many cores as workers; here workers share cores in turns."],
        timed=True,
        said=[NOT_READ],
    ),
    _of_lag("a3c-gae-4-lag", "Figure 4: the unroll length on Hopper", _HOPPER),
    Figure(
        "a3c-gae-4-lr", "a3c-gae", "Figure 4: the learning rate on Hopper", _rate, curves,
        {
            "smoke": Size(4_000, _HOPPER, 1, (), 2),
            "small": Size(60_000, _HOPPER, 1, (), 8),
            "full": Size(5_000_000, _HOPPER, 5, (), 64),
        },
        [_WORKERS, _PRESET, _CURVES, _V3, _LIMITS],
        said=[NOT_READ],
    ),
]  # fmt: skip
