"""Many commands, K at a time, each a process on its own share of the cores: the runs of a sweep or of a figure.

A finished run is not repeated and an interrupted one is resumed, so the same command continues where it stopped.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from shlex import quote

from coterie.config import Config
from coterie.errors import EXIT_INTERRUPTED, ConfigError, CoterieError
from coterie.parallel.hardware import available_cores
from coterie.parallel.signals import HANDLED, WARNING, is_second, on_signals
from coterie.runs.metrics import file_name, read_metrics
from coterie.runs.starting import Starting, discard_stdout
from coterie.tools.job import Job, without_out

_RANK = (0, EXIT_INTERRUPTED, 2, 1)  # exit codes, the worst last
_GRACE_S = 120
_PROGRESS_S = 10.0  # between two lines of progress


def parse_seeds(text: str) -> list[int]:
    """`3..5` or `0,2,7`. Raises `ConfigError`."""
    if match := re.fullmatch(r"(\d+)\.\.(\d+)", text):
        first, last = int(match[1]), int(match[2])
        if first <= last:
            return list(range(first, last + 1))
    elif re.fullmatch(r"\d+(,\d+)*", text):
        seeds = [int(n) for n in text.split(",")]
        if len(seeds) == 1:
            raise ConfigError(f"--seeds: {text} is one seed: --seed {text}, or 0..2 for three of them")
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
    names, values = list[str](), list[list[str]]()
    for axis in axes:
        name, _, rest = axis.partition("=")
        each = re.findall(r"\[[^]]*\]|\{(?:[^{}]|\{[^{}]*\})*\}|[^,]+", rest)  # a list or an object is one value
        if not name or not each or re.search(r"(^|,),|,$", rest):
            raise ConfigError(f"--grid: {axis!r} is not OPTION=VALUE,VALUE,...")
        if name in ("seed", "out"):
            raise ConfigError(f"--grid: {name} cannot be in a grid; use --seeds or --out")
        if len({_as_number(value) for value in each}) < len(each):
            raise ConfigError(f"--grid: {axis!r} has a value twice")
        if name.replace("-", "_") in [other.replace("-", "_") for other in names]:
            raise ConfigError(f"--grid: {name} is given twice")
        names.append(name)
        values.append(each)
    return [dict(zip(names, combination, strict=True)) for combination in itertools.product(*values)]


def _as_number(value: str) -> float | str:
    """1e-3 and 0.001 are the same."""
    with suppress(ValueError):
        return float(value)
    return value


def options_of(point: dict[str, str]) -> list[str]:
    """A point of a grid as words of a command."""
    return [word for name, value in point.items() for word in (f"--{name}", value)]


def plan_runs(args: Sequence[str], config: Config, seeds: Sequence[int], grid: Sequence[dict[str, str]]) -> list[Job]:
    """A run for each point of the grid and each seed; folders begin with `config.out`. Raises `ConfigError`."""
    if config.ray.storage:
        raise ConfigError("ray.storage: all runs of a sweep would share it; leave it empty, or start them one by one")
    base, args, jobs = os.path.expanduser(config.out).rstrip("/"), without_out(args), []
    for point in grid:
        words = "".join("-" + file_name(f"{name.rpartition('.')[2]}-{value}") for name, value in point.items())
        options = options_of(point)
        for seed in seeds:
            name = ", ".join([*(f"{k} {v}" for k, v in point.items()), f"seed {seed}"])
            folder = Path(f"{base}{words}-seed{seed}")
            jobs.append(Job(name, (*args, *options, "--seed", str(seed)), folder))
    if len({job.folder for job in jobs}) < len(jobs):
        raise ConfigError(
            "--grid: two options have the same last name and the same values, so their folders would be the same"
        )
    return jobs


def run_jobs(jobs: Sequence[Job], at_once: int, out: str = "") -> int:
    """Run them; returns the worst exit code. Prints a line for each job that ends, and now and then one of progress.
    `out`: with which `--out` the same command continues; "": it needs none. Raises `ConfigError` if another process
    runs one of them.
    """
    todo, screen = [], Starting()  # its thread waits for a terminal that is not read, which holds up no run
    screen.says = False
    try:
        for job in jobs:
            if job.done():
                screen.say(f"{job.name}: {job.outcome()} (already done) {job.folder}")
            else:
                todo.append(job)
        code = _run(todo, len(jobs), at_once, screen.say)
        if code == EXIT_INTERRUPTED:
            screen.say(f"stopped; the same command continues{f' with --out {quote(out)}' * bool(out)}")
        return code
    finally:
        screen.close()
        if screen.stuck:
            discard_stdout()


def _run(todo: list[Job], whole: int, at_once: int, say: Callable[[str], None]) -> int:
    slots = max(1, min(at_once, len(todo)))
    cores = available_cores()
    shares = [cores[i::slots] or [cores[i % len(cores)]] for i in range(slots)]
    running: dict[int, tuple[subprocess.Popen[bytes], Job]] = {}
    done, worst, printed, stop = whole - len(todo), 0, time.monotonic(), list[float]()

    def note(number: signal.Signals) -> None:
        again = number != WARNING and bool(stop) and is_second(number, time.monotonic() - stop[0])
        if again or number == WARNING:  # runs that do not wait for a warning ignore it
            for process, _ in running.values():
                process.send_signal(signal.SIGINT if again else number)  # after SIGTERM: end at once
        if number != WARNING:
            stop.append(time.monotonic())

    with on_signals(note, HANDLED):
        try:
            while (todo or running) and not stop:
                for slot in range(slots):
                    if slot not in running and todo:
                        job = todo.pop(0)
                        running[slot] = (job.start(shares[slot]), job)
                time.sleep(0.2)
                for slot, (process, job) in list(running.items()):
                    if (code := process.poll()) is not None:
                        del running[slot]
                        done += 1
                        worst = max(worst, code if code in _RANK else 1, key=_RANK.index)
                        say(f"{job.name}: {job.outcome(code)} (exit {code}) {job.folder}")
                if running and time.monotonic() - printed > _PROGRESS_S:
                    printed = time.monotonic()
                    say(progress([job for _, job in running.values()], done, whole))
        finally:
            _end(running, say)
    return EXIT_INTERRUPTED if stop else worst


def _end(running: dict[int, tuple[subprocess.Popen[bytes], Job]], say: Callable[[str], None]) -> None:
    """Ask all running jobs to write a checkpoint and exit, and wait for them."""
    for process, _ in running.values():
        process.terminate()
    for process, job in running.values():
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            say(f"{job.folder}: did not exit within {_GRACE_S} s and was killed; its last checkpoint is kept")


def progress(jobs: Sequence[Job], done: int, whole: int) -> str:
    """One line about all running jobs, from their last lines of metrics."""
    steps, rate = 0, 0.0
    for job in jobs:
        with suppress(CoterieError, IndexError):  # a line that is being written, or none yet
            lines = [line for line in read_metrics(job.folder) if "env_steps_per_s" in line]
            steps += lines[-1]["env_steps"]
            rates = [line["env_steps_per_s"] for line in lines if line["env_steps_per_s"]]  # 0 during an evaluation
            rate += rates[-1] if rates else 0.0
    so_far = f": {steps:,} env steps so far, {rate:,.0f} env steps/s in all" if steps else ""
    return f"{done} of {whole} done, {len(jobs)} running{so_far}"
