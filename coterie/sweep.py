"""`train --seeds A..B --jobs K`: the same run for several seeds, K at a time, each on its own share of the cores."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

from coterie.config import Config
from coterie.parallel.affinity import available_cores
from coterie.types import ConfigError


def parse_seeds(text: str) -> list[int]:
    """`3..5` or `0,2,7`."""
    if match := re.fullmatch(r"(\d+)\.\.(\d+)", text):
        first, last = int(match[1]), int(match[2])
        if first <= last:
            return list(range(first, last + 1))
    elif re.fullmatch(r"\d+(,\d+)*", text):
        return [int(n) for n in text.split(",")]
    raise ConfigError(f"--seeds: {text!r} is not A..B with A <= B, or A,B,C")


def run_seeds(args: list[str], config: Config, seeds: str, jobs: str | None) -> int:
    """Run every seed as a process of its own; returns the worst exit code. One line for each run that ends."""
    todo = parse_seeds(seeds)
    if jobs is not None and not re.fullmatch(r"[1-9]\d*", jobs):
        raise ConfigError(f"--jobs: {jobs!r} is not a positive number")
    slots = min(int(jobs or 1), len(todo))
    cores = available_cores()
    shares = [cores[i::slots] or cores for i in range(slots)]
    base = Path(config.out or f"runs/{config.preset}-{re.sub(r'[^A-Za-z0-9_.-]+', '-', config.env.id)}")
    stamp = "" if config.out else time.strftime("-%m%d-%H%M%S")
    running: dict[int, tuple[subprocess.Popen[bytes], int, Path]] = {}
    worst = 0
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        while todo or running:
            for slot in range(slots):
                if slot not in running and todo:
                    seed = todo.pop(0)
                    folder = Path(f"{base}{stamp}-seed{seed}")
                    running[slot] = (_start(args, seed, folder, shares[slot]), seed, folder)
            time.sleep(0.2)
            for slot, (process, seed, folder) in list(running.items()):
                if process.poll() is not None:
                    del running[slot]
                    worst = max(worst, _severity(process.returncode), key=_RANK.index)
                    print(f"seed {seed}: {_result(folder)} (exit {process.returncode}) {folder}", flush=True)
    except KeyboardInterrupt:
        for process, _, _ in running.values():
            process.terminate()  # they checkpoint; a terminal's Ctrl-C has reached them, too
        for process, _, folder in running.values():
            try:
                process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                print(f"{folder}: did not end within {_GRACE_S} s and was killed; its last checkpoint stands")
        return 75
    finally:
        signal.signal(signal.SIGTERM, before)
    return worst


_RANK = (0, 75, 2, 1)  # exit codes, the worst last
_GRACE_S = 120


def _severity(code: int) -> int:
    return code if code in _RANK else 1


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _start(args: list[str], seed: int, folder: Path, cores: list[int]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "coterie.cli", "train", *args, "--seed", str(seed), "--out", str(folder)]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with Path(f"{folder}.txt").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(process.pid, cores)  # before it has started a thread
    return process


def _result(folder: Path) -> str:
    try:
        summary = json.loads((folder / "summary.json").read_text())
    except (OSError, ValueError):
        lines = Path(f"{folder}.txt").read_text().splitlines()
        return lines[-1] if lines else "no output"
    return f"{summary['status']}, mean return {summary['mean_return']}, {summary['env_steps']:,} env steps"
