"""From a figure to its runs and back: each arm's commands in folders of their own, what of them is done, how long the
rest takes.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from subprocess import PIPE
from typing import Any

from coterie.parallel.signals import on_signals
from coterie.runs import checkpoint
from coterie.runs.metrics import file_name
from coterie.tools.report.command import save
from coterie.tools.report.runs import RecordedRun, read_run
from coterie.tools.reproduce.draw import begins, order, rate
from coterie.tools.reproduce.figure import Arm, Figure, Result, Size
from coterie.tools.sweep import Job, run_jobs
from coterie.types import EXIT_INTERRUPTED, ConfigError, CoterieError

_TELL_S = 3600.0  # that `bench`, `plan` or `eval` may take at most
_END_S = 10.0  # that they may take to end


class Stopped(Exception):
    """SIGINT or SIGTERM came while a command was waited for."""


@dataclass(frozen=True)
class Planned:
    """A command of an arm: a run to train, or something whose JSON is kept in `job.folder` with `.json` behind."""

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
        if plan.arm.verb != "train" and code != EXIT_INTERRUPTED:
            try:
                tell([plan.arm.verb, *plan.job.args, "--json"], plan.job.folder)
                print(f"{plan.job.name}: {plan.arm.verb} {_json(plan.job.folder)}", flush=True)
            except CoterieError as error:  # the others are drawn
                print(f"{plan.job.name}: {error}", flush=True)
                code = 1
    return code


def tell(words: Sequence[str], stem: Path) -> dict[str, Any]:
    """What a command tells as JSON; asked once, and kept with the words. Raises `CoterieError` where it fails, and
    `Stopped`.
    """
    if (kept := _kept(words, stem)) is not None:
        return kept
    stop, end = list[int](), time.monotonic() + _TELL_S
    command = [sys.executable, "-m", "coterie", *words]
    with (
        on_signals(stop.append),
        subprocess.Popen(command, stdout=PIPE, stderr=PIPE, text=True, start_new_session=True) as process,
    ):
        while True:
            try:
                out, err = process.communicate(timeout=0.2)
                break
            except subprocess.TimeoutExpired:
                if not stop and time.monotonic() < end:
                    continue
                process.terminate()
                try:
                    process.communicate(timeout=_END_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                if stop:
                    raise Stopped from None
                raise CoterieError(f"coterie {' '.join(words)}: not done within {_TELL_S:.0f} s") from None
    if process.returncode:
        last = (err or out).strip().splitlines()[-1:] or ["no output"]
        raise CoterieError(f"coterie {' '.join(words)}: {last[0]}")
    found: dict[str, Any] = json.loads(out)
    save(_json(stem), json.dumps({"words": list(words), "told": found}))
    return found


def _kept(words: Sequence[str], stem: Path) -> dict[str, Any] | None:
    with suppress(OSError, ValueError, KeyError):
        kept = json.loads(_json(stem).read_text())
        if kept["words"] == list(words):
            return dict(kept["told"])
    return None


def gather(figure: Figure, plans: Sequence[Planned]) -> tuple[list[Result], list[str]]:
    """What is there of each arm, and what is not; greedy games are played where the figure asks for them and they are
    not there yet.
    """
    missing = []
    results = {id(arm): Result(arm) for arm in (p.arm for p in plans)}
    for plan in plans:
        result = results[id(plan.arm)]
        told = _kept([plan.arm.verb, *plan.job.args, "--json"], plan.job.folder) if plan.arm.verb != "train" else None
        if told is not None:
            result.told.append(told)
        elif plan.arm.verb == "train" and _there(plan.job):
            result.runs.append(read_run(plan.job.folder))
        else:
            missing.append(plan.job.name)
    if figure.evaluate:
        for result in results.values():
            for env in result.envs:
                runs = [run for run in result.runs if run.env == env]
                if (found := _evaluated(runs, figure.evaluate)) is not None:
                    result.evaluations[env] = found
    return list(results.values()), missing


def _evaluated(runs: Sequence[RecordedRun], games: int) -> dict[str, Any] | None:
    """Greedy games of the seed whose final return is the best; None before it has a checkpoint."""
    best = max(runs, key=order)
    newest = checkpoint.latest(best.folder / "checkpoints")
    if newest is None:
        return None
    stem = best.folder.with_name(f"{best.folder.name}-{newest.name}-eval{games}")
    with suppress(CoterieError):  # without a score it is a row that says so
        return tell(["eval", str(best.folder), "--episodes", str(games), "--json"], stem)
    return None


def estimate(figure: Figure, size: Size, plans: Sequence[Planned], probes: Path) -> tuple[float, bool] | None:
    """Seconds that what is not done will take, from the rate of a short run of every arm on every env, which is made
    now where it is not there; starts and evaluations are not counted. Several at once are taken to share the machine:
    they are no faster together. With it, whether all of them had begun to train. None where it was stopped meanwhile.
    Raises `CoterieError` where a short run failed.
    """
    if not any(p.arm.verb == "train" for p in plans):
        return size.seconds * len(plans), True
    short = replace(size, steps=figure.sizes["smoke"].steps, seeds=1)
    tries = planned(figure, short, "smoke", probes)
    if run_jobs([p.job for p in tries], 1) == EXIT_INTERRUPTED:
        return None
    probed = {p.job.name.rpartition(", seed")[0]: read_run(p.job.folder) for p in tries if _there(p.job)}
    rates = {name: rate(one) for name, one in probed.items()}
    trained = all(begins(one) < short.steps for one in probed.values())
    seconds = 0.0
    for plan in plans:
        speed = rates.get(plan.job.name.rpartition(", seed")[0], math.nan)
        if not speed > 0:
            raise CoterieError(f"{plan.job.name}: its short run told no rate: {probes}")
        done = read_run(plan.job.folder).lines[-1:] if _there(plan.job) else []
        seconds += max(0.0, size.steps - sum(line["env_steps"] for line in done)) / speed
    return seconds, trained


def _there(job: Job) -> bool:
    return (job.folder / "config.json").exists()


def _json(stem: Path) -> Path:
    return stem.with_name(f"{stem.name}.json")


def sized(figure: Figure, budget: str) -> Size:
    """`budget`: smoke, small, full, or env steps of each run, then with small's other sizes. Raises `ConfigError`."""
    if budget in figure.sizes:
        return figure.sizes[budget]
    if re.fullmatch(r"[1-9]\d*", budget):
        if not figure.sizes["small"].steps:
            raise ConfigError(f"--budget: {figure.name} trains nothing; give smoke, small or full")
        return replace(figure.sizes["small"], steps=int(budget))
    raise ConfigError(f"--budget: {budget!r} is not smoke, small, full or a number of env steps")
