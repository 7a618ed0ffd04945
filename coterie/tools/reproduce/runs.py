"""From a figure to its runs and back: each arm's commands in folders of their own, their results, and how long they
take.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from coterie.errors import EXIT_INTERRUPTED, ConfigError, CoterieError
from coterie.runs import checkpoint
from coterie.runs.metrics import file_name
from coterie.tools.job import Job
from coterie.tools.report.runs import read_run
from coterie.tools.reproduce.figure import Arm, ArmResult, Figure, Size
from coterie.tools.reproduce.measures import begins, order, rate
from coterie.tools.sweep import run_jobs


@dataclass(frozen=True)
class Planned:
    """A command of an arm."""

    arm: Arm
    env: str
    job: Job


def planned(figure: Figure, size: Size, budget: str, folder: Path) -> list[Planned]:
    """Every command of a figure, arm by arm, env by env, seed by seed."""
    every = {"smoke": "0.1", "full": "10"}.get(budget, "0.5")
    log = ["--log.every", every, "--log.tensorboard", "False"] + ["--env.decorrelate", "0"] * (budget == "smoke")
    found = []
    for i, arm in enumerate(figure.arms(size)):
        where = " ".join([*[arm.panel] * bool(arm.panel), arm.label, *[f"{arm.x:g}"] * math.isfinite(arm.x)])
        for env in arm.envs or size.envs:
            args = tuple(arg.replace("{env}", env) for arg in arm.args)
            place = folder / file_name(f"{i:02}-{where}-{env}")
            if figure.verb != "train":
                found.append(Planned(arm, env, Job(f"{where}, {env}", args, place, figure.verb)))
                continue
            for seed in range(size.seeds):
                words = (*args, "--steps", str(size.steps), *log, "--seed", str(seed))
                name = f"{where}, {env}, seed {seed}"
                found.append(Planned(arm, env, Job(name, words, place.with_name(f"{place.name}-seed{seed}"))))
    return found


def gather(plans: Sequence[Planned]) -> tuple[list[ArmResult], list[str]]:
    """The results of each arm, and the names of missing ones."""
    missing = []
    results = {id(plan.arm): ArmResult(plan.arm) for plan in plans}
    for plan in plans:
        result = results[id(plan.arm)]
        if plan.job.verb == "train" and _exists(plan.job):
            result.runs.append(read_run(plan.job.folder))
        elif plan.job.verb != "train" and (report := plan.job.report()) is not None:
            result.reports.append(report)
        else:
            missing.append(plan.job.name)
    return list(results.values()), missing


def evaluate(figure: Figure, results: Sequence[ArmResult]) -> int:
    """Greedy episodes of each arm's best seed on each env, where the figure asks for them. Returns the exit code."""
    jobs = {}
    for result in results:
        for env in result.envs if figure.evaluate else []:
            best = max(result.of(env), key=order).folder
            if (newest := checkpoint.latest(best / "checkpoints")) is not None:
                stem = best.with_name(f"{best.name}-{newest.name}-eval{figure.evaluate}")
                args = (str(best.resolve()), "--episodes", str(figure.evaluate))
                jobs[id(result), env] = Job(f"evaluation of {best.name}", args, stem, "eval")
    todo = [job for job in jobs.values() if job.report() is None]  # its name says all, wherever the folder is now
    code = run_jobs(todo, 1) if todo else 0
    for result in results:
        for env in result.envs:
            if (id(result), env) in jobs and (report := jobs[id(result), env].report()) is not None:
                result.evaluations[env] = report
    return code


def estimate(figure: Figure, size: Size, plans: Sequence[Planned], probes: Path) -> tuple[float, bool] | None:
    """Seconds that the remaining commands will take, from the rate of a short run of every arm on every env, which is
    made now if it is missing; starts and evaluations are not counted. Several at once share the machine, so they are
    no faster. With it, whether all short runs began to train. None if interrupted. Raises `CoterieError` if a short run
    failed.
    """
    if figure.verb != "train":
        return size.seconds * sum(plan.job.report() is None for plan in plans), True
    short = replace(size, steps=figure.sizes["smoke"].steps, seeds=1)
    tries = planned(figure, short, "smoke", probes)
    if run_jobs([p.job for p in tries], 1) == EXIT_INTERRUPTED:
        return None
    probed = {p.job.name.rpartition(", seed")[0]: read_run(p.job.folder) for p in tries if _exists(p.job)}
    rates = {name: rate(one) for name, one in probed.items()}
    trained = all(begins(one) < short.steps for one in probed.values())
    seconds = 0.0
    for plan in plans:
        speed = rates.get(plan.job.name.rpartition(", seed")[0], math.nan)
        if not speed > 0:
            raise CoterieError(f"{plan.job.name}: its short run has no rate: {probes}")
        done = read_run(plan.job.folder).lines[-1:] if _exists(plan.job) else []
        seconds += max(0.0, size.steps - sum(line["env_steps"] for line in done)) / speed
    return seconds, trained


def _exists(job: Job) -> bool:
    return (job.folder / "config.json").exists()


def sized(figure: Figure, budget: str) -> Size:
    """`budget`: smoke, small, full, or env steps of each run with the rest as in small. Raises `ConfigError`."""
    if budget in figure.sizes:
        return figure.sizes[budget]
    if re.fullmatch(r"[1-9]\d*", budget):
        if figure.verb != "train":
            raise ConfigError(f"--budget: {figure.name} trains nothing; give smoke, small or full")
        return replace(figure.sizes["small"], steps=int(budget))
    raise ConfigError(f"--budget: {budget!r} is not smoke, small, full or a number of env steps")
