"""How long a run takes to start: seconds from the start of the process to its first env step and to its first learner
step, of some commands.

    python benchmarks/startup.py [--turns 5] [--only NAME ...] [--out FILE.json] [--page]

Each run is started alone, in turn, and says itself when its steps were. The first turn is a warm-up, which fills the
page cache and is not counted. `--page` writes the table of docs/benchmarks/speed.md. Measure on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

from marked import replaced

import coterie

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "benchmarks" / "speed.md"
COMMANDS = {
    "ppo": "ppo --env CartPole-v1",
    "ppo, 2 learners": "ppo --env LunarLander-v3 --learners 2",
    "impala": "impala --env CartPole-v1",
    "seed-vtrace": "seed-vtrace --env CartPole-v1",
    "ppo, Atari": "ppo --env Breakout-v5",
    "impala, Atari": "impala-paper --env Breakout-v5",
    "ppo, env workers": "ppo --env CartPole-v1 --env.backend workers",
}


class LearnerStep(coterie.Callback):
    """A callback that writes when the first learner step was done."""

    def on_rollout(self, run: Any) -> None:
        if not (path := Path(run.folder, "learner_step")).exists():
            path.write_text(str(time.time()))


def first_steps(options: str, folder: Path) -> tuple[float, float]:
    """Start a run that ends after its first rollouts; returns the seconds to its first env step and learner step."""
    command = [sys.executable, "-m", "coterie", "train", *options.split(), "--steps", "1", "--out", str(folder)]
    begin = time.time()
    subprocess.run([*command, "--callbacks", "startup:LearnerStep"], stdout=subprocess.DEVNULL, check=True, cwd=HERE)
    learner_step = float((folder / "learner_step").read_text()) - begin
    return float(json.loads((folder / "summary.json").read_text())["first_step_s"]), learner_step


def measure(names: list[str], turns: int) -> dict[str, Any]:
    env: dict[str, list[float]] = {name: [] for name in names}
    learner: dict[str, list[float]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as scratch:
        for turn in range(turns + 1):
            for number, name in enumerate(names):
                found = first_steps(COMMANDS[name], Path(scratch) / f"{turn}-{number}")
                if turn:
                    env[name].append(round(found[0], 3))
                    learner[name].append(round(found[1], 3))
                line = f"{found[0]:.2f} s to the first env step, {found[1]:.2f} s to the first learner step"
                print(f"{f'turn {turn}' if turn else 'warm-up'}: {name}: {line}", file=sys.stderr)
    return {
        name: {
            "command": f"coterie train {COMMANDS[name]}",
            "first_step_s": env[name],
            "first_learner_step_s": learner[name],
        }
        for name in names
    }


def table(result: dict[str, Any]) -> str:
    machine = result["machine"]
    lines = [
        f"{machine['processor']}, {machine['cores']} cores; {result['date']}; [raw data](data/startup.json).",
        "",
        "| command | first env step, median (s) | range | first learner step, median (s) | range |",
        "|---|---|---|---|---|",
    ]
    for run in result["runs"].values():
        kinds = (run["first_step_s"], run["first_learner_step_s"])
        cells = (f"{statistics.median(x):.2f} | {min(x):.2f} to {max(x):.2f}" for x in kinds)
        lines.append(f"| `{run['command']}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    from coterie.runs.machine import describe

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=COMMANDS, default=list(COMMANDS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--page", action="store_true")
    options = parser.parse_args()
    if options.page and options.only != list(COMMANDS):
        parser.error("--page: the page has all commands: leave out --only")
    load = round(os.getloadavg()[0], 2)
    runs = measure(options.only, options.turns)
    result = {"date": date.today().isoformat(), "load": load, "machine": describe(), "runs": runs}
    print(table(result))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    if options.page:
        PAGE.write_text(replaced(PAGE.read_text(), "startup", "python benchmarks/startup.py --page", table(result)))


if __name__ == "__main__":
    main()
