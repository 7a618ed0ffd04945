"""Results of a figure's arms with numbers that a test knows, instead of trained ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from coterie.tools.report.runs import RecordedRun
from coterie.tools.reproduce.figure import Arm, Figure, Result, Size

LINES = 10


def run(
    arm: Arm, env: str = "CartPole-v1", seed: int = 0, level: float = 100.0, rate: float = 500.0, **more: float
) -> RecordedRun:
    """A run of 1,000 env steps whose mean return is `level` from half on, at `rate` env steps/s; `more`: on every line,
    with __ for a slash.
    """
    told = {name.replace("__", "/"): value for name, value in more.items()}
    lines: list[dict[str, Any]] = [
        {
            "env_steps": 100 * i, "seconds": 100 * i / rate, "mean_return": level * min(1.0, i / 5),
            "env_steps_per_s": rate, "frames_per_s": 4 * rate, **told,
        }
        for i in range(1, LINES + 1)
    ]  # fmt: skip
    config = {"preset": arm.args[0], "env.id": env, "seed": seed}
    summary = {"status": "finished", "env_steps": 1000, "seconds": 1000 / rate,
               "energy": {"frames_per_kj": None, "reason": "no counter"}}  # fmt: skip
    return RecordedRun(Path(f"{arm.label}-{arm.x:g}-{env}-{seed}"), config, lines, summary, {})


def results(
    figure: Figure, size: Size, level: Callable[[Arm, str, int], float] = lambda arm, env, seed: 100.0,
    rate: Callable[[Arm], float] = lambda arm: 500.0, **more: float,
) -> list[Result]:  # fmt: skip
    """Every arm of a figure with a made-up run for each env and seed."""
    found = []
    for arm in figure.arms(size):
        result = Result(arm)
        for env in arm.envs or size.envs:
            for seed in range(size.seeds):
                if arm.verb == "train":
                    result.runs.append(run(arm, env, seed, level(arm, env, seed), rate(arm), **more))
                else:
                    result.told.append(told(arm, env))
            result.evaluations[env] = {"mean_return": 21.0, "stderr": 0.5}
        found.append(result)
    return found


def told(arm: Arm, env: str) -> dict[str, Any]:
    """What `coterie bench` or `plan` prints, as far as a figure looks at it."""
    if arm.verb == "bench":
        return {"env": env, "cores": 2, "env_only": 1000.0 * arm.x, "acting": 700.0 * arm.x, "training": 300.0 * arm.x}
    layouts = [
        {
            "layout": {"acting": acting, "exchange": "solo"}, "frames_per_s": 1e4 * arm.x,
            "dollars_per_billion_frames": price, "bottleneck": "gpu",
        }
        for acting, price in (("decoupled", 80.0), ("central", 20.0), ("inline", 50.0))
    ]  # fmt: skip
    return {"env": env, "layouts": layouts}


def cells(tables: Sequence[Any]) -> str:
    """All text of some tables."""
    return "\n".join(
        " | ".join(row) for table in tables for row in [[table.title, table.text], table.head, *table.rows]
    )
