"""Train every preset of benchmarks/league.toml with its default options, and draw the page of what they learned.

    python benchmarks/league.py list [PATTERN ...]  what is done, begun and left
    python benchmarks/league.py run [PATTERN ...]   train what is left, one run at a time, at idle priority
    python benchmarks/league.py page                docs/results/league.md and README's table from the records

A run's name is /PRESET/ENV/SEED; patterns are parts of it (`/Breakout`, `/sac/`). Ctrl-C or SIGTERM stops it with a
checkpoint, from which it goes on. Its record, docs/results/league/PRESET_ENV_SEED.json, holds the command, the settings
that it stood for, the date, the machine, the curve and the final score; that of a stopped run is marked as unfinished
and has no score. A record of other settings does not count.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import league_page
import numpy as np
from league_entries import ROOT, Entry, Record, entries

from coterie.acting.table import acting_kind
from coterie.cli.options import config_of
from coterie.parallel.hardware import available_cores
from coterie.runs.machine import processor
from coterie.tools.job import complete
from coterie.tools.report.runs import RecordedRun, read_run

POINTS = 80  # of a recorded curve
CORES = 2  # of runs that are laid out by the number of cores
STOPPED = (75, -signal.SIGTERM, -signal.SIGINT)
COTERIE = [sys.executable, "-m", "coterie"]
SB3 = ROOT / ".peers" / "sb3" / "bin" / "python"


def call(command: list[str], quiet: bool = False) -> str:
    """Run a command and wait for its end even if this process is stopped, for a run needs the time to write its
    checkpoint. Returns what it prints if `quiet`. Raises `CalledProcessError`.
    """
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE if quiet else None, text=True) as process:
        stopped = list[int]()

        def stop(number: int, frame: object) -> None:
            stopped.append(number)
            if number == signal.SIGTERM:  # the terminal sends SIGINT to the run, too
                process.terminate()

        old = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
        out, _ = process.communicate()
        for number, handler in old.items():
            signal.signal(number, handler)
    if process.returncode or stopped:
        raise subprocess.CalledProcessError(75 if stopped else process.returncode, command)
    return out or ""


def curve(run: RecordedRun) -> Record:
    """What the record of a run has at any time."""
    points = [(x["env_steps"], x["seconds"], x["mean_return"]) for x in run.lines if x.get("mean_return") is not None]
    at = np.unique(np.linspace(0, len(points) - 1, POINTS).round().astype(int)).tolist() if points else []
    return {
        "seconds": round(run.summary.get("seconds") or run.lines[-1]["seconds"]),
        "machine": {key: run.machine.get(key) for key in ("processor", "cores", "gpus")},
        "curve": [[points[i][0], round(points[i][1], 1), round(points[i][2], 2)] for i in at],
    }


def train(entry: Entry, folder: Path) -> Record:
    """Run an entry to its end. Raises `CalledProcessError` where the run is stopped or fails."""
    if entry.method.startswith("sb3-"):
        found: Record = json.loads(call([str(SB3), *entry.command[1:]], quiet=True).splitlines()[-1])
        return {**found, "machine": {"processor": processor(), **found["machine"]}}
    about, wanted = folder.with_name(f"{folder.name}.txt"), f"{entry.typed}\n{json.dumps(entry.settings)}\n"
    known = about.read_text() if about.exists() else "a command that is not known"
    if folder.exists() and known != wanted:
        raise FileExistsError(f"{folder} is of {known.splitlines()[0]}, or of other defaults: remove it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    about.write_text(wanted)
    if not (folder / "config.json").exists():
        quiet = ["--log.every", "1", "--log.tensorboard", "false", "--out", str(folder)]
        call([*COTERIE, *entry.command[1:], *quiet])
    elif not complete(folder):
        call([*COTERIE, "resume", str(folder)])
    final = json.loads(call([*COTERIE, "eval", str(folder), "--episodes", str(entry.episodes), "--json"], quiet=True))
    score = {key: final[key] for key in ("mean_return", "stderr", "episodes", "human_normalized")}
    return {"score": score, **curve(read_run(folder))}


def by_cores(entry: Entry) -> bool:
    """Whether learners, actors or envs of its run depend on the number of cores."""
    if entry.method.startswith("sb3-"):
        return False
    config = config_of(entry.command[2:])
    actors = config.actors == "auto" and acting_kind(config).own_policy
    return config.learners == "auto" or not config.env.num_envs or actors


def write(entry: Entry, record: Record) -> None:
    entry.path.parent.mkdir(parents=True, exist_ok=True)
    about = {"command": entry.typed, "settings": entry.settings, "date": datetime.date.today().isoformat()}
    entry.path.write_text(json.dumps(about | record, separators=(",", ":")) + "\n")


def give_way() -> None:
    """Use only idle cores, with all children. It also holds for other processes of this session."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with suppress(OSError):  # Linux shares cores among sessions first, where idle processes count as others do
        Path("/proc/self/autogroup").write_text("19")


def work(chosen: list[Entry], runs: Path) -> None:
    for entry in chosen:
        if entry.done:
            continue
        if by_cores(entry) and len(available_cores()) != CORES:
            print(f"--- {entry.name}: needs {CORES} cores, which decide its learners and envs", flush=True)
            continue
        if entry.method.startswith("sb3-") and not SB3.exists():
            print(f"--- {entry.name}: needs `make peers`", flush=True)
            continue
        folder = runs / entry.name.replace("/", "_")
        print(f"--- {entry.name}: {entry.typed}", flush=True)
        try:
            write(entry, train(entry, folder))
        except FileExistsError as error:
            print(error, flush=True)
        except subprocess.CalledProcessError as error:
            if error.returncode not in STOPPED:
                print(f"{entry.name} failed: {error}", flush=True)
                continue
            if (folder / "config.json").exists() and (run := read_run(folder)).lines:
                write(entry, {"unfinished": True, **curve(run)})
            raise SystemExit(75) from None  # it goes on next time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["list", "run", "page"])
    parser.add_argument("patterns", nargs="*")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "league", help="folder of the runs")
    options = parser.parse_args()
    chosen = [e for e in entries() if not options.patterns or any(p in f"/{e.name}" for p in options.patterns)]
    if options.what == "run":
        give_way()
        work(chosen, options.runs.absolute())
    elif options.what == "page":
        league_page.write()
    else:
        for entry in chosen:
            began = (options.runs / entry.name.replace("/", "_")).exists()
            print(f"{'done' if entry.done else 'begun' if began else 'left'}  {entry.typed}")


if __name__ == "__main__":
    main()
