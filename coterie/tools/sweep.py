"""Many commands, K at a time, each a process on its own share of the cores: the runs of a sweep or of a figure.

A finished run is not repeated and an interrupted one is resumed, so the same command continues where it stopped.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from shlex import quote
from typing import Any

from coterie.config import Config
from coterie.parallel.hardware import available_cores
from coterie.parallel.signals import HANDLED, WARNING, on_signals, stop_with_parent
from coterie.runs import checkpoint
from coterie.runs.files import read_json
from coterie.runs.metrics import RUN_FILES, file_name, read_metrics
from coterie.runs.starting import Starting, discard_stdout
from coterie.types import EXIT_INTERRUPTED, ConfigError, CoterieError

_RANK = (0, EXIT_INTERRUPTED, 2, 1)  # exit codes, the worst last
_GRACE_S = 120
_PROGRESS_S = 10.0  # between two lines of progress
_FILES = (".json", ".toml", ".yaml", ".yml")  # that a config may be in


@dataclass(frozen=True)
class Job:
    """`coterie VERB ARGS`: a run to train in `folder`, or a command whose `--json` report goes to `folder`.json."""

    name: str
    args: tuple[str, ...]
    folder: Path
    verb: str = "train"

    def beside(self, suffix: str) -> Path:
        """A file beside the folder: `.args.json` has the options that it began with, `.txt` what it printed."""
        return self.folder.with_name(f"{self.folder.name}{suffix}")

    def done(self) -> bool:
        """Whether it began with these options and finished. Raises `ConfigError` if its folder holds something else."""
        return self._begun() and (complete(self.folder) if self.verb == "train" else self.report() is not None)

    def report(self) -> dict[str, Any] | None:
        """The JSON report, None if there is none yet."""
        return read_json(self.beside(".json"), dict)

    def outcome(self, code: int = 0) -> str:
        """How it ended, in one line. After a failure: the last line of its output."""
        if self.verb != "train" and self.report() is not None:
            return f"{self.verb} done"
        if code in (0, EXIT_INTERRUPTED) and (summary := read_json(self.folder / "summary.json", dict)) is not None:
            mean = summary["mean_return"]
            shown = "-" if mean is None else f"{mean:.1f}"
            return f"{summary['status']}, mean return {shown}, {summary['env_steps']:,} env steps"
        lines = self.beside(".txt").read_text(errors="replace").splitlines()
        return lines[-1] if lines else "no output"

    def start(self, cores: list[int]) -> subprocess.Popen[bytes]:
        """Begin it, or resume it from its last checkpoint. Raises `ConfigError` if another process runs it."""
        begun, train = self._begun(), self.verb == "train"
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)}
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as opened:
            note = opened.enter_context(self.beside(".args.json").open("a+"))
            try:
                fcntl.flock(note, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the child inherits it: it is held until that ends
            except BlockingIOError:
                raise ConfigError(f"--out: {self.folder} is being trained by another process") from None
            except OSError:
                pass  # a file system without locks: the run itself says so
            resumed = train and begun and checkpoint.latest(self.folder / "checkpoints") is not None
            if begun and not resumed:
                self._clear()
            if not begun:  # or a full disk would leave an empty note of a run that can be continued
                note.truncate(0)
                note.write(json.dumps(self._asked()))
                note.flush()
            log = opened.enter_context(self.beside(".txt").open("ab" if resumed else "wb"))
            out = log if train else opened.enter_context(self.beside(".json").open("wb"))
            process = subprocess.Popen(
                self._command(resumed), stdin=subprocess.DEVNULL, stdout=out, stderr=log,
                env=env, pass_fds=[note.fileno()],
                process_group=0,  # Ctrl-C reaches this process only, which passes it on
                preexec_fn=_prepare,
            )  # fmt: skip
        if hasattr(os, "sched_setaffinity"):
            with suppress(OSError):
                os.sched_setaffinity(process.pid, cores)  # before it has started a thread
        return process

    def _command(self, resumed: bool) -> list[str]:
        python, folder = [sys.executable, "-P", "-m", "coterie"], str(self.folder)
        if resumed:
            return [*python, "resume", folder, *["--trust"] * ("--trust" in self.args)]
        return [*python, self.verb, *self.args, *(["--out", folder] if self.verb == "train" else ["--json"])]

    def _begun(self) -> bool:
        before = read_json(self.beside(".args.json"), list)
        if before is None:
            if (self.folder / "config.json").exists():
                raise ConfigError(f"--out: {self.folder} holds a run that this command did not begin; name another")
            return False
        before = _without_out(before)  # earlier versions saved it
        words = [word for word in before if isinstance(word, str)]
        if before != (list(self.args) if words == before else self._asked()):  # earlier versions saved the words alone
            other = "other options" if words != list(self.args) else "a different config file"
            said = f"{self.folder} was begun with {other} ({' '.join(words)})"
            raise ConfigError(f"--out: {said}; name another, or remove it")
        return True

    def _asked(self) -> list[Any]:
        """Its options, and what the config files among them hold."""
        files = [Path(word.removeprefix("--config=")) for word in self.args if word.endswith(_FILES)]
        return [*self.args, *({"sha256": sha256(file.read_bytes()).hexdigest()} for file in files if file.is_file())]

    def _clear(self) -> None:
        """Remove the files of a run that ended before its first checkpoint, and nothing else."""
        shutil.rmtree(self.folder / "checkpoints", ignore_errors=True)
        for name in (*RUN_FILES, "events.out.*"):
            for path in self.folder.glob(name):
                path.unlink(missing_ok=True)


def _without_out(words: Sequence[Any]) -> list[Any]:
    """Options without `--out`, which names the folder of a whole sweep."""
    pairs = zip(["", *words], words, strict=False)
    return [word for last, word in pairs if last != "--out" and str(word).partition("=")[0] != "--out"]


def _prepare() -> None:
    """Between fork and exec of a run."""
    stop_with_parent()
    signal.signal(WARNING, signal.SIG_IGN)  # until it handles that, with log.checkpoint_on_warning


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
        if not name or not each:
            raise ConfigError(f"--grid: {axis!r} is not OPTION=VALUE,VALUE,...")
        if name in ("seed", "out"):
            raise ConfigError(f"--grid: {name} cannot be in a grid; use --seeds or --out")
        if len(set(each)) < len(each):
            raise ConfigError(f"--grid: {axis!r} has a value twice")
        if name.replace("-", "_") in [other.replace("-", "_") for other in names]:
            raise ConfigError(f"--grid: {name} is given twice")
        names.append(name)
        values.append(each)
    return [dict(zip(names, combination, strict=True)) for combination in itertools.product(*values)]


def plan_runs(args: Sequence[str], config: Config, seeds: Sequence[int], grid: Sequence[dict[str, str]]) -> list[Job]:
    """A run for each point of the grid and each seed; folders begin with `config.out`. Raises `ConfigError`."""
    if config.ray.storage:
        raise ConfigError("ray.storage: all runs of a sweep would share it; leave it empty, or start them one by one")
    base, args, jobs = os.path.expanduser(config.out).rstrip("/"), _without_out(args), []
    for point in grid:
        words = "".join("-" + file_name(f"{name.rpartition('.')[2]}-{value}") for name, value in point.items())
        options = [word for name, value in point.items() for word in (f"--{name}", value)]
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
    done, worst, printed, stop = whole - len(todo), 0, time.monotonic(), list[int]()

    def note(number: signal.Signals) -> None:
        if number != WARNING:
            stop.append(number)
        else:  # those that do not wait for it ignore it
            for process, _ in running.values():
                process.send_signal(number)

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


def complete(folder: Path) -> bool:
    """Whether a run has all its env steps, or its summary says that it has finished."""
    if (read_json(folder / "summary.json", dict) or {}).get("status") == "finished":
        return True
    steps = (read_json(folder / "config.json", dict) or {}).get("steps", math.inf)
    with suppress(CoterieError, KeyError, TypeError):  # killed between its last checkpoint and its summary
        return bool(checkpoint.env_steps(folder / "checkpoints") >= steps)
    return False


def progress(jobs: Sequence[Job], done: int, whole: int) -> str:
    """One line about all running jobs, from their last lines of metrics."""
    steps, rate = 0, 0.0
    for job in jobs:
        with suppress(CoterieError, IndexError):  # a line that is being written, or none yet
            last = [line for line in read_metrics(job.folder) if "env_steps_per_s" in line][-1]
            steps, rate = steps + last["env_steps"], rate + (last["env_steps_per_s"] or 0.0)
    return f"{done} of {whole} done, {len(jobs)} running: {steps:,} env steps so far, {rate:,.0f} env steps/s in all"
