"""Many runs, K at a time, each a process on its own share of the cores: seeds, small grids, and what a figure needs.

What has finished is not run again, and what was interrupted is resumed: the same command goes on where it stopped.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.config import Config
from coterie.parallel.affinity import available_cores
from coterie.parallel.signals import STOP, on_signals
from coterie.runs import checkpoint
from coterie.runs.metrics import RUN_FILES, file_name, read_metrics
from coterie.types import EXIT_INTERRUPTED, ConfigError, CoterieError

_RANK = (0, EXIT_INTERRUPTED, 2, 1)  # exit codes, the worst last
_GRACE_S = 120
_STOP = (*STOP, signal.SIGHUP)
_LINE_S = 10.0  # between two lines about all runs together


@dataclass(frozen=True)
class Job:
    """One run: `coterie train ARGS` into `folder`."""

    name: str
    args: tuple[str, ...]
    folder: Path


def parse_seeds(text: str) -> list[int]:
    """`3..5` or `0,2,7`. Raises `ConfigError`."""
    if match := re.fullmatch(r"(\d+)\.\.(\d+)", text):
        first, last = int(match[1]), int(match[2])
        if first <= last:
            return list(range(first, last + 1))
    elif re.fullmatch(r"\d+(,\d+)*", text):
        seeds = [int(n) for n in text.split(",")]
        if len(set(seeds)) == len(seeds):
            return seeds
    raise ConfigError(f"--seeds: {text!r} is not A..B with A <= B, or A,B,C that differ")


def parse_jobs(text: str | None) -> int:
    """1 without a text. Raises `ConfigError`."""
    if text is not None and not re.fullmatch(r"[1-9]\d*", text):
        raise ConfigError(f"--jobs: {text!r} is not a positive number")
    return int(text or 1)


def parse_grid(axes: Sequence[str]) -> list[dict[str, str]]:
    """`optim.lr=1e-3,3e-4` and the like: every combination, the last axis fastest. Raises `ConfigError`."""
    names, values = [], []
    for axis in axes:
        name, _, rest = axis.partition("=")
        each = [value for value in rest.split(",") if value]
        if not name or not each:
            raise ConfigError(f"--grid: {axis!r} is not OPTION=VALUE,VALUE,...")
        if name in ("seed", "out"):
            raise ConfigError(f"--grid: {name} is not for a grid; --seeds and --out are for it")
        if len(set(each)) < len(each):
            raise ConfigError(f"--grid: {axis!r} has a value twice")
        if name in names:
            raise ConfigError(f"--grid: {name} is there twice")
        names.append(name)
        values.append(each)
    return [dict(zip(names, combination, strict=True)) for combination in itertools.product(*values)]


def plan_runs(args: Sequence[str], config: Config, seeds: Sequence[int], grid: Sequence[dict[str, str]]) -> list[Job]:
    """A run for each point of the grid and each seed; its folder's name tells which it is. Raises `ConfigError`."""
    base = config.out or time.strftime(f"runs/{config.preset}-{file_name(config.env.id)}-%m%d-%H%M%S")
    jobs = []
    for point in grid:
        words = "".join("-" + file_name(f"{name.rpartition('.')[2]}-{value}") for name, value in point.items())
        options = [word for name, value in point.items() for word in (f"--{name}", value)]
        for seed in seeds:
            name = ", ".join([*(f"{k} {v}" for k, v in point.items()), f"seed {seed}"])
            folder = Path(f"{base}{words}-seed{seed}")
            jobs.append(Job(name, (*args, *options, "--seed", str(seed)), folder))
    if len({job.folder for job in jobs}) < len(jobs):
        raise ConfigError(
            "--grid: two of its options have one last name and the same values; their folders would be one"
        )
    return jobs


def run_jobs(jobs: Sequence[Job], at_once: int) -> int:
    """Run them; returns the worst exit code. A line for each run that ends, and now and then one about all.
    Raises `ConfigError` where another process runs one of them.
    """
    todo = []
    for job in jobs:
        if _same(job) and complete(job.folder):
            print(f"{job.name}: {_ended(job.folder)} (was there) {job.folder}", flush=True)
        else:
            todo.append(job)
    slots = max(1, min(at_once, len(todo)))
    cores = available_cores()
    shares = [cores[i::slots] or [cores[i % len(cores)]] for i in range(slots)]
    running: dict[int, tuple[subprocess.Popen[bytes], Job]] = {}
    done, worst, told, stop = len(jobs) - len(todo), 0, time.monotonic(), list[int]()
    with on_signals(stop.append, _STOP):
        try:
            while (todo or running) and not stop:
                for slot in range(slots):
                    if slot not in running and todo:
                        job = todo.pop(0)
                        running[slot] = (_start(job, shares[slot]), job)
                time.sleep(0.2)
                for slot, (process, job) in list(running.items()):
                    if process.poll() is not None:
                        del running[slot]
                        done += 1
                        worst = max(worst, _severity(process.returncode), key=_RANK.index)
                        print(f"{job.name}: {_ended(job.folder)} (exit {process.returncode}) {job.folder}", flush=True)
                if running and time.monotonic() - told > _LINE_S:
                    told = time.monotonic()
                    print(_together([job for _, job in running.values()], done, len(jobs)), flush=True)
        finally:
            _end(running)
    if stop:
        print("stopped; with --out the same command goes on where they stopped")
        return EXIT_INTERRUPTED
    return worst


def _end(running: dict[int, tuple[subprocess.Popen[bytes], Job]]) -> None:
    """Ask all that run for a checkpoint and their end, and wait for that."""
    for process, _ in running.values():
        process.terminate()
    for process, job in running.values():
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            print(f"{job.folder}: did not end within {_GRACE_S} s and was killed; its last checkpoint stands")


def complete(folder: Path) -> bool:
    """Whether a run has all its env steps, or its summary says that it has finished."""
    with suppress(OSError, ValueError, KeyError):
        if json.loads((folder / "summary.json").read_text())["status"] == "finished":
            return True
    newest = checkpoint.latest(folder / "checkpoints")
    with suppress(OSError, ValueError, KeyError):  # killed between its last checkpoint and its summary
        steps = json.loads((folder / "config.json").read_text())["steps"]
        return newest is not None and bool(json.loads((newest / "state.json").read_text())["env_steps"] >= steps)
    return False


def _same(job: Job) -> bool:
    """Whether this job was begun before. Raises `ConfigError` where its folder holds a run of something else."""
    try:
        before = json.loads(_note(job).read_text())
    except (OSError, ValueError):
        if (job.folder / "config.json").exists():
            raise ConfigError(
                f"--out: {job.folder} holds a run that this command did not begin; name another"
            ) from None
        return False
    if before != list(job.args):
        raise ConfigError(
            f"--out: {job.folder} was begun with other options ({' '.join(before)}); name another, or remove it"
        )
    return True


def _note(job: Job) -> Path:
    """Beside the run's folder: the options that it was begun with."""
    return Path(f"{job.folder}.args.json")


def _severity(code: int) -> int:
    return code if code in _RANK else 1


def _start(job: Job, cores: list[int]) -> subprocess.Popen[bytes]:
    begun = _same(job)
    resumed = begun and checkpoint.latest(job.folder / "checkpoints") is not None
    words = ["resume", str(job.folder)] if resumed else ["train", *job.args, "--out", str(job.folder)]
    job.folder.parent.mkdir(parents=True, exist_ok=True)
    with _note(job).open("a+") as note, Path(f"{job.folder}.txt").open("ab" if resumed else "wb") as log:
        try:
            fcntl.flock(note, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the run inherits it, and lets go of it when it ends
        except OSError:
            raise ConfigError(f"--out: {job.folder} is being trained by another process") from None
        if begun and not resumed:
            _clear(job.folder)
        note.truncate(0)
        note.write(json.dumps(list(job.args)))
        note.flush()
        process = subprocess.Popen(
            [sys.executable, "-m", "coterie", *words], stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            pass_fds=[note.fileno()], process_group=0,  # Ctrl-C is for the sweep to pass on, once
        )  # fmt: skip
    if hasattr(os, "sched_setaffinity"):
        with suppress(OSError):
            os.sched_setaffinity(process.pid, cores)  # before it has started a thread
    return process


def _clear(folder: Path) -> None:
    """Remove what a run left that ended before its first checkpoint, and nothing else."""
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    for name in (*RUN_FILES, "events.out.*"):
        for path in folder.glob(name):
            path.unlink(missing_ok=True)


def _together(jobs: Sequence[Job], done: int, whole: int) -> str:
    """One line about all that run now, from their last lines of metrics."""
    steps, rate = 0, 0.0
    for job in jobs:
        with suppress(CoterieError, IndexError):  # a line that is being written, or none yet
            last = [line for line in read_metrics(job.folder) if "env_steps_per_s" in line][-1]
            steps, rate = steps + last["env_steps"], rate + (last["env_steps_per_s"] or 0.0)
    return f"{done} of {whole} done, {len(jobs)} run: {steps:,} env steps so far, {rate:,.0f} env steps/s together"


def _result(summary: dict[str, Any]) -> str:
    mean = summary["mean_return"]
    shown = "-" if mean is None else f"{mean:.1f}"
    return f"{summary['status']}, mean return {shown}, {summary['env_steps']:,} env steps"


def _ended(folder: Path) -> str:
    try:
        return _result(json.loads((folder / "summary.json").read_text()))
    except (OSError, ValueError):
        lines = Path(f"{folder}.txt").read_text().splitlines()
        return lines[-1] if lines else "no output"
