"""How long a run takes to start: seconds from the start of the process to its first env step, of some commands.

    python benchmarks/startup.py [--turns 5] [--only NAME ...] [--out FILE.json]

Each run is started alone, in turn, and says itself when its first step was: `first_step_s` in its summary. The first
turn is a warm-up, which fills the page cache and is not counted. Measure on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

from coterie.runs.machine import describe

COMMANDS = {
    "ppo": "ppo --env CartPole-v1",
    "ppo, 2 learners": "ppo --env LunarLander-v3 --learners 2",
    "impala": "impala --env CartPole-v1",
    "seed-vtrace": "seed-vtrace --env CartPole-v1",
    "ppo, Atari": "ppo --env Breakout-v5",
    "ppo, env workers": "ppo --env CartPole-v1 --env.backend workers",
}


def first_step(options: str, folder: Path) -> float:
    """Start a run that ends after its first rollouts; returns the seconds to its first env step."""
    command = [sys.executable, "-m", "coterie", "train", *options.split(), "--steps", "1", "--out", str(folder)]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return float(json.loads((folder / "summary.json").read_text())["first_step_s"])


def measure(names: list[str], turns: int) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as scratch:
        for turn in range(turns + 1):
            for number, name in enumerate(names):
                found = first_step(COMMANDS[name], Path(scratch) / f"{turn}-{number}")
                if turn:
                    seconds[name].append(round(found, 3))
                print(f"{f'turn {turn}' if turn else 'warm-up'}: {name}: {found:.2f} s", file=sys.stderr)
    return {name: {"command": f"coterie train {COMMANDS[name]}", "first_step_s": seconds[name]} for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=COMMANDS, default=list(COMMANDS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    machine = describe()
    runs = measure(options.only, options.turns)
    print(f"{machine['processor']}, {machine['cores']} cores, load before the start {load:.1f}\n")
    print("| command | first env step, median (s) | range (s) |\n|---|---|---|")
    for run in runs.values():
        times = run["first_step_s"]
        print(f"| `{run['command']}` | {statistics.median(times):.2f} | {min(times):.2f} to {max(times):.2f} |")
    if options.out is not None:
        result = {"date": date.today().isoformat(), "load": round(load, 2), "machine": machine, "runs": runs}
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
