"""Keep a run's curve in the repository: docs/results/curves/NAME.csv (at most 200 points a run and its greedy
episodes) and NAME.png.

python benchmarks/curves.py NAME RUN [RUN ...] [--goal RETURN] [--labels LABEL ...]
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import numpy as np

from coterie.tools.report.runs import read_run

CURVES = Path(__file__).parents[1] / "docs" / "results" / "curves"
AXES = ("env_steps", "seconds")
POINTS = 200  # of a run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--goal", type=float)
    parser.add_argument("--labels", nargs="*", default=[])
    options = parser.parse_args()
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    runs = list(map(read_run, options.runs))
    CURVES.mkdir(exist_ok=True)
    figure, both = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True)
    with (CURVES / f"{options.name}.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["run", "seed", *AXES, "mean_return", "greedy"])
        for i, run in enumerate(runs):
            label = options.labels[i] if i < len(options.labels) else f"seed {run.seed}"
            lines = [p for p in run.lines if p.get("mean_return") is not None]
            lines = [lines[k] for k in np.unique(np.linspace(0, len(lines) - 1, POINTS).round().astype(int)) if lines]
            evals = [p for p in run.lines if p.get("eval/return") is not None]
            points = [(p, "mean_return", "") for p in lines] + [(p, "eval/return", "yes") for p in evals]
            for p, name, greedy in sorted(points, key=lambda point: point[0]["env_steps"]):
                table.writerow([label, run.seed, p["env_steps"], round(p["seconds"], 1), round(p[name], 2), greedy])
            for axes, x in zip(both, AXES, strict=True):
                (line,) = axes.plot([p[x] for p in lines], [p["mean_return"] for p in lines], label=label)
                axes.plot([p[x] for p in evals], [p["eval/return"] for p in evals], "o", color=line.get_color(),
                          label=f"{label}, greedy episodes" if evals else None)  # fmt: skip
    for axes, text in zip(both, ("env steps", "seconds"), strict=True):
        axes.set_xlabel(text)
        axes.grid(alpha=0.3)
        if options.goal is not None:
            axes.axhline(options.goal, color="gray", linestyle="--", linewidth=1)
    both[0].set_ylabel("return, last 100 episodes")
    both[0].legend(fontsize=8)
    figure.suptitle(options.name, fontsize=10)
    figure.tight_layout()
    figure.savefig(CURVES / f"{options.name}.png", dpi=80)


if __name__ == "__main__":
    main()
