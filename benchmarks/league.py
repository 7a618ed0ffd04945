"""Train every preset of benchmarks/league.toml with its defaults, and draw the page of what they learned.

    python benchmarks/league.py list               what is done, under way and left
    python benchmarks/league.py run [PATTERN ...]  train what is left, one run at a time, at idle priority
    python benchmarks/league.py page               docs/results/league.md from the records

A run's name is PRESET/ENV/SEED; patterns are parts of it (`ppo/Breakout`). A stopped run goes on from its checkpoint.
Its record, docs/results/league/PRESET_ENV_SEED.json, holds the command, the machine, the curve and the final score.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from coterie.tools.report.runs import read_run
from coterie.tools.report.stats import band, interquartile_mean, interval, on_grid

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "docs" / "results" / "league"
POINTS = 80  # of a recorded curve
HEAD = """# The league

Every preset with its defaults, but for the budget: `python benchmarks/league.py run`. {done} of {total} runs are done;
the others are not started or not finished. No run was steered, stopped early or left out.

Score: the interquartile mean over seeds of the mean return of greedy episodes with the last weights, and its 95%
bootstrap interval where there are several seeds. Human = 1: the score between a random policy's (0) and a human's (1).
Seconds: mean wall-clock of training at idle priority beside other work, so an upper bound. Curves: mean over seeds and
its 95% interval.

Machine: two cores of an AMD EPYC, from 25 November 2026 on. Coterie: EnvPool, fp32 for vectors, the preset's number of
learners. Rows of `sb3_league.py`: Stable-Baselines3 with its library defaults and one gymnasium env, not tuned for the
task; Coterie's presets have settings of our own for vectors, so this does not compare the two implementations.

*Written by `python benchmarks/league.py page`.*
"""


@dataclass(frozen=True)
class Entry:
    """One run of the league."""

    group: str
    method: str
    env: str
    seed: int
    steps: int
    episodes: int

    @property
    def name(self) -> str:
        return f"{self.method}/{self.env}/{self.seed}"

    @property
    def record(self) -> Path:
        return RECORDS / f"{self.name.replace('/', '_')}.json"

    @property
    def command(self) -> list[str]:
        """As a user types it."""
        options = ["--env", self.env, "--steps", str(self.steps), "--seed", str(self.seed)]
        if self.method.startswith("sb3-"):
            return ["python", "benchmarks/peers/sb3_league.py", self.method.removeprefix("sb3-"), *options]
        return ["coterie", "train", self.method, *options]


def entries() -> Iterator[Entry]:
    table = tomllib.loads((Path(__file__).parent / "league.toml").read_text())
    for group, row in table.items():
        for seed in range(row["seeds"]):  # the first seed of everything comes first
            for env, steps in row["envs"].items():
                for method in [*row["presets"], *row["peers"]]:
                    yield Entry(group, method, env, seed, steps, row["episodes"])


def train(entry: Entry, folder: Path) -> None:
    """Run an entry to its end, and write its record. Raises `CalledProcessError` where the run is stopped or fails."""
    if entry.method.startswith("sb3-"):
        python = ROOT / ".peers" / "sb3" / "bin" / "python"
        done = subprocess.run([python, *entry.command[1:]], cwd=ROOT, check=True, capture_output=True, text=True)
        record = json.loads(done.stdout.splitlines()[-1])
    else:
        coterie = [sys.executable, "-m", "coterie"]
        if not (folder / "config.json").exists():
            quiet = ["--log.every", "1", "--log.tensorboard", "false", "--out", str(folder)]
            subprocess.run([*coterie, *entry.command[1:], *quiet], check=True)
        elif not read_run(folder).finished:
            subprocess.run([*coterie, "resume", str(folder)], check=True)
        score = [*coterie, "eval", str(folder), "--episodes", str(entry.episodes), "--json"]
        final = json.loads(subprocess.run(score, check=True, capture_output=True, text=True).stdout)
        run = read_run(folder)
        points = [
            (x["env_steps"], x["seconds"], x["mean_return"]) for x in run.lines if x.get("mean_return") is not None
        ]
        at = np.unique(np.linspace(0, len(points) - 1, POINTS).round().astype(int))
        record = {
            "seconds": round(run.summary["seconds"]),
            "machine": {key: run.machine.get(key) for key in ("processor", "cores", "gpus")},
            "score": {key: final[key] for key in ("mean_return", "stderr", "episodes", "human_normalized")},
            "curve": [[points[i][0], round(points[i][1], 1), round(points[i][2], 2)] for i in at],
        }
    RECORDS.mkdir(parents=True, exist_ok=True)
    entry.record.write_text(json.dumps({"command": " ".join(entry.command), **record}, separators=(",", ":")) + "\n")


def work(chosen: list[Entry], runs: Path) -> None:
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # and of all children
    for entry in chosen:
        if entry.record.exists():
            continue
        print(f"--- {entry.name}: {' '.join(entry.command)}", flush=True)
        try:
            train(entry, runs / entry.name.replace("/", "_"))
        except subprocess.CalledProcessError as error:
            if error.returncode in (75, -15, -2):
                raise SystemExit(error.returncode) from None  # it goes on next time
            print(f"{entry.name} failed: {error}", flush=True)


def read(entry: Entry) -> dict[str, Any] | None:
    return json.loads(entry.record.read_text()) if entry.record.exists() else None


def curves(env: str, found: dict[str, list[dict[str, Any]]]) -> str:
    """Draw an env's curves over env steps and over time; returns the file's name."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, both = plt.subplots(1, 2, figsize=(10, 3.4), sharey=True)
    for method, records in found.items():
        for axes, column in zip(both, (0, 1), strict=True):
            data = [np.array(record["curve"], float) for record in records]
            grid, rows = on_grid([(x[:, column], x[:, 2]) for x in data if len(x)])
            if not len(grid):
                continue
            middle, low, high = band(rows)
            (line,) = axes.plot(grid, middle, label=f"{method} ({len(records)})", linewidth=1.4)
            axes.fill_between(grid, low, high, color=line.get_color(), alpha=0.15)
    for axes, text in zip(both, ("env steps", "seconds"), strict=True):
        axes.set_xlabel(text)
        axes.grid(alpha=0.3)
    both[0].set_ylabel("return, last 100 training episodes")
    both[1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5), title="method (seeds)", title_fontsize=7)
    figure.suptitle(env, fontsize=10)
    figure.tight_layout()
    name = f"{env}.svg"
    figure.savefig(RECORDS / name)
    plt.close(figure)
    return name


def page() -> str:
    """The page's text; the pictures are drawn beside it."""
    found: dict[str, dict[str, dict[str, list[dict[str, Any]]]]] = defaultdict(lambda: defaultdict(dict))
    total = 0
    for entry in entries():
        total += 1
        if (record := read(entry)) is not None:
            found[entry.group][entry.env].setdefault(entry.method, []).append(record)
    done = sum(len(records) for envs in found.values() for methods in envs.values() for records in methods.values())
    lines = [HEAD.format(done=done, total=total)]
    for group, envs in found.items():
        lines.append(f"## {group.capitalize() if group != 'mujoco' else 'MuJoCo'}\n")
        for env, methods in envs.items():
            lines += [f"### {env}\n", "| command | seeds | env steps | score | interval | human = 1 | seconds |"]
            lines.append("|---|---|---|---|---|---|---|")
            ranked = sorted(methods.items(), key=lambda kv: -np.mean([r["score"]["mean_return"] for r in kv[1]]))
            for _, records in ranked:
                scores = np.array([record["score"]["mean_return"] for record in records])
                low, high = interval([scores])
                normal = [x for record in records if (x := record["score"].get("human_normalized")) is not None]
                cells = [
                    f"`{records[0]['command'].split(' --steps')[0]}`",
                    f"{len(records)}",
                    f"{records[0]['curve'][-1][0]:,}",
                    f"{interquartile_mean(scores):.1f}",
                    f"{low:.1f} to {high:.1f}" if len(scores) > 1 else "",
                    f"{np.mean(normal):.2f}" if normal else "",
                    f"{np.mean([record['seconds'] for record in records]):.0f}",
                ]
                lines.append(f"| {' | '.join(cells)} |")
            lines.append(f"\n![{env}: return over env steps and over seconds](league/{curves(env, methods)})\n")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["list", "run", "page"])
    parser.add_argument("patterns", nargs="*")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "league", help="folder of the runs")
    options = parser.parse_args()
    chosen = [e for e in entries() if not options.patterns or any(p in e.name for p in options.patterns)]
    if options.what == "run":
        work(chosen, options.runs)
    elif options.what == "page":
        (RECORDS.parent / "league.md").write_text(page())
    else:
        for entry in chosen:
            began = (options.runs / entry.name.replace("/", "_")).exists()
            print(f"{'done' if entry.record.exists() else 'begun' if began else 'left'}  {' '.join(entry.command)}")


if __name__ == "__main__":
    main()
