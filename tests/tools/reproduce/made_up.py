"""Results of a figure's arms with known numbers instead of trained ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from coterie.tools.report.runs import RecordedRun
from coterie.tools.reproduce.figure import Arm, Figure, Result, Size


def run(
    arm: Arm, env: str = "CartPole-v1", seed: int = 0, level: float = 100.0, rate: float = 500.0, **more: float
) -> RecordedRun:
    """A run of 1,000 env steps whose mean return is `level` from half on, at `rate` env steps/s; `more`: on every line,
    with __ for a slash.
    """
    metrics = {name.replace("__", "/"): value for name, value in more.items()}
    rates = {"env_steps_per_s": rate, "frames_per_s": 4 * rate}
    lines = [
        {"env_steps": n, "seconds": n / rate, "mean_return": level * min(1.0, n / 500), **rates, **metrics}
        for n in range(100, 1001, 100)
    ]
    config = {"preset": arm.args[0], "env.id": env, "seed": seed}
    energy = {"frames_per_kj": None, "reason": "no counter"}
    summary = {"status": "finished", "env_steps": 1000, "seconds": 1000 / rate, "energy": energy}
    return RecordedRun(Path(f"{arm.label}-{arm.x:g}-{env}-{seed}"), config, lines, summary, {})


def results(
    figure: Figure,
    size: Size,
    level: Callable[[Arm, str, int], float] = lambda arm, env, seed: 100.0,
    rate: Callable[[Arm], float] = lambda arm: 500.0,
    **more: float,
) -> list[Result]:
    """Every arm of a figure with a made-up run for each env and seed."""
    found = []
    for arm in figure.arms(size):
        result = Result(arm)
        for env in arm.envs or size.envs:
            if figure.verb != "train":
                result.reports.append(report(figure, arm, env))
                continue
            for seed in range(size.seeds):
                result.runs.append(run(arm, env, seed, level(arm, env, seed), rate(arm), **more))
            result.evaluations[env] = {"mean_return": 21.0, "stderr": 0.5}
        found.append(result)
    return found


def report(figure: Figure, arm: Arm, env: str) -> dict[str, Any]:
    """The parts of the JSON of `coterie bench` or `plan` that a figure uses."""
    if figure.verb == "bench":
        return {"env": env, "cores": 2, "env_only": 1000.0 * arm.x, "acting": 700.0 * arm.x, "training": 300.0 * arm.x}
    prices = {("decoupled", 1): 80.0, ("central", 1): 20.0, ("inline", 1): 50.0, ("central", 2): 99.0}
    layouts = [
        {
            "layout": {"acting": acting, "learners": learners},
            "frames_per_s": 1e4 * arm.x,
            "dollars_per_billion_frames": price,
            "bottleneck": "gpu",
        }
        for (acting, learners), price in prices.items()
    ]
    return {"env": env, "layouts": layouts}
