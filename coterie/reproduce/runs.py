"""From a figure to its runs and back: each arm's commands in folders of their own, what of them is done, how long the
rest takes.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from coterie.report.runs import RecordedRun, read_run
from coterie.report.sections import final_return
from coterie.reproduce.draw import rate
from coterie.reproduce.figure import Arm, Figure, Result, Size
from coterie.sweep import Job, run_jobs
from coterie.types import ConfigError, CoterieError

_TELL_S = 3600.0  # that `bench`, `plan` or `eval` may take at most


@dataclass(frozen=True)
class Planned:
    """A command of an arm: a run to train, or something whose JSON is kept in `job.folder` with `.json` behind."""

    arm: Arm
    env: str
    job: Job


def planned(figure: Figure, size: Size, budget: str, folder: Path) -> list[Planned]:
    """Every command of a figure, arm by arm, env by env, seed by seed."""
    every = {"smoke": "0.1", "small": "0.5"}.get(budget, "10")
    log = ["--log.every", every, "--log.tensorboard", "False"] + ["--env.decorrelate", "0"] * (budget == "smoke")
    found = []
    for i, arm in enumerate(figure.arms(size)):
        where = " ".join([*[arm.panel] * bool(arm.panel), arm.label, *[f"{arm.x:g}"] * math.isfinite(arm.x)])
        for env in arm.envs or size.envs:
            args = tuple(arg.replace("{env}", env) for arg in arm.args)
            place = folder / _plain(f"{i:02}-{where}-{env}")
            if arm.verb != "train":
                found.append(Planned(arm, env, Job(f"{where}, {env}", args, place)))
                continue
            for seed in range(size.seeds):
                words = (*args, "--steps", str(size.steps), *log, "--seed", str(seed))
                name = f"{where}, {env}, seed {seed}"
                found.append(Planned(arm, env, Job(name, words, place.with_name(f"{place.name}-seed{seed}"))))
    return found


def run(plans: Sequence[Planned], at_once: int) -> int:
    """Do what is not done; returns the worst exit code."""
    code = run_jobs([p.job for p in plans if p.arm.verb == "train"], at_once)
    for plan in plans:
        if plan.arm.verb != "train" and code != 75:
            tell([plan.arm.verb, *plan.job.args, "--json"], plan.job.folder)
            print(f"{plan.job.name}: {plan.arm.verb} {_json(plan.job.folder)}", flush=True)
    return code


def tell(words: Sequence[str], stem: Path) -> dict[str, Any]:
    """What a command tells as JSON; asked once, and kept. Raises `CoterieError` where it fails."""
    path = _json(stem)
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        pass
    else:
        return found
    try:
        done = subprocess.run(
            [sys.executable, "-m", "coterie", *words], capture_output=True, text=True, timeout=_TELL_S, check=False,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise CoterieError(f"coterie {' '.join(words)}: not done within {_TELL_S:.0f} s") from None
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no output"]
        raise CoterieError(f"coterie {' '.join(words)}: {last[0]}")
    found = json.loads(done.stdout)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}")
    draft.write_text(json.dumps(found))
    draft.rename(path)
    return found


def gather(figure: Figure, size: Size, plans: Sequence[Planned]) -> list[Result]:
    """What is there of each arm; greedy games are played where the figure asks for them and they are not there yet."""
    results = {id(arm): Result(arm) for arm in (p.arm for p in plans)}
    for plan in plans:
        result = results[id(plan.arm)]
        if plan.arm.verb != "train":
            result.told.append(tell([plan.arm.verb, *plan.job.args, "--json"], plan.job.folder))
        elif (plan.job.folder / "config.json").exists():
            result.runs.append(read_run(plan.job.folder))
    if figure.evaluate:
        for result in results.values():
            for env in result.envs:
                result.evaluations[env] = _evaluated(result, env, figure.evaluate)
    return list(results.values())


def _evaluated(result: Result, env: str, games: int) -> dict[str, Any]:
    """Greedy games of the seed whose final return is the best."""
    best = max((run for run in result.runs if run.env == env), key=_order)
    stem = best.folder.with_name(f"{best.folder.name}-eval{games}")
    return tell(["eval", str(best.folder), "--episodes", str(games), "--json"], stem)


def _order(run: RecordedRun) -> float:
    score = final_return(run)
    return score if score == score else -float("inf")


def estimate(figure: Figure, size: Size, plans: Sequence[Planned], probes: Path, at_once: int) -> float:
    """Seconds that what is not done will take, from the rate of a short run of every arm on every env, which is made
    now where it is not there.
    """
    if not any(p.arm.verb == "train" for p in plans):
        return size.seconds * len(plans)
    short = replace(size, steps=figure.sizes["smoke"].steps, seeds=1)
    tries = planned(figure, short, "smoke", probes)
    run_jobs([p.job for p in tries], 1)  # one at a time: it is about how fast it is
    rates = {(p.job.name.rpartition(", seed")[0]): rate(read_run(p.job.folder)) for p in tries if _there(p.job)}
    seconds = 0.0
    for plan in plans:
        speed = rates.get(plan.job.name.rpartition(", seed")[0], float("nan"))
        if not speed > 0:
            raise CoterieError(f"{plan.job.name}: its short run told no rate: {probes}")
        done = read_run(plan.job.folder).lines[-1:] if _there(plan.job) else []
        seconds += max(0.0, size.steps - sum(line["env_steps"] for line in done)) / speed
    return seconds / at_once


def _there(job: Job) -> bool:
    return (job.folder / "config.json").exists()


def _json(stem: Path) -> Path:
    return stem.with_name(f"{stem.name}.json")


def _plain(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text).strip("-")


def sized(figure: Figure, budget: str) -> Size:
    """`budget`: smoke, small, full, or env steps of each run, then with small's other sizes."""
    if budget in figure.sizes:
        return figure.sizes[budget]
    if re.fullmatch(r"[1-9]\d*", budget):
        return replace(figure.sizes["small"], steps=int(budget))
    raise ConfigError(f"--budget: {budget!r} is not smoke, small, full or a number of env steps")
