"""Keep a run's curve in the repository: docs/curves/NAME.csv (at most 200 points a run) and NAME.png.

python benchmarks/curves.py NAME RUN [RUN ...] [--goal RETURN]
"""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path

CURVES = Path(__file__).parents[1] / "docs" / "curves"


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

    CURVES.mkdir(exist_ok=True)
    figure, (by_steps, by_time) = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True)
    with (CURVES / f"{options.name}.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["run", "seed", "env_steps", "seconds", "mean_return"])
        for i, run in enumerate(options.runs):
            config = json.loads((run / "config.json").read_text())
            label = options.labels[i] if i < len(options.labels) else f"seed {config['seed']}"
            lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
            points = [p for p in lines if p.get("mean_return") is not None]
            points = points[:: max(1, len(points) // 200)] + points[-1:]
            for p in points:
                table.writerow(
                    [label, config["seed"], p["env_steps"], round(p["seconds"], 1), round(p["mean_return"], 2)]
                )
            by_steps.plot([p["env_steps"] for p in points], [p["mean_return"] for p in points], label=label)
            by_time.plot([p["seconds"] for p in points], [p["mean_return"] for p in points], label=label)
    for axes, text in ((by_steps, "env steps"), (by_time, "seconds")):
        axes.set_xlabel(text)
        axes.grid(alpha=0.3)
        if options.goal is not None:
            axes.axhline(options.goal, color="grey", linestyle="--", linewidth=1)
    by_steps.set_ylabel("return, last 100 games")
    by_steps.legend(fontsize=8)
    figure.suptitle(options.name, fontsize=10)
    figure.tight_layout()
    figure.savefig(CURVES / f"{options.name}.png", dpi=80)


if __name__ == "__main__":
    main()
