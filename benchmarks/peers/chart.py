"""Draw docs/benchmarks/peers.svg, the chart of README, from docs/benchmarks/data/peers.json.

python benchmarks/peers/chart.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

DOCS = Path(__file__).parents[2] / "docs" / "benchmarks"
OURS, BF16, PEER = "#1f6fb4", "#8fbfe6", "#b9bec5"


def color(row: dict[str, Any]) -> str:
    if not row["name"].startswith("Coterie"):
        return PEER
    return BF16 if row["precision"] == "bf16" else OURS


def main() -> None:
    data = json.loads((DOCS / "data" / "peers.json").read_text())
    cases = list(data["cases"].values())
    mpl.rcParams.update({"svg.hashsalt": "coterie", "svg.fonttype": "none", "font.size": 9})
    figure = Figure(figsize=(7.2, 1.0 + sum(0.27 * len(c["rows"]) + 0.5 for c in cases)))
    axes = figure.subplots(len(cases), 1, squeeze=False)[:, 0]
    for case, axis in zip(cases, axes, strict=True):
        rows = sorted(case["rows"], key=lambda row: row["median"])
        labels = [f"{r['name']} ({r['simulator']}, {r['precision']})" for r in rows]
        colors = [color(r) for r in rows]
        medians = [r["median"] for r in rows]
        errors = [[r["median"] - min(r["rates"]) for r in rows], [max(r["rates"]) - r["median"] for r in rows]]
        bars = axis.barh(labels, medians, color=colors, xerr=errors, error_kw={"ecolor": "#555", "lw": 0.8})
        axis.bar_label(bars, [f" {m:,.0f}" for m in medians], padding=6)
        axis.set_title(case["title"], loc="left", fontsize=10, fontweight="bold")
        axis.set_xlim(0, 1.18 * max(max(r["rates"]) for r in rows))
        axis.spines[["top", "right"]].set_visible(False)
        axis.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes[-1].set_xlabel(f"env steps/s while training, 2 cores of {data['processor']}; range of the turns", loc="right")
    figure.tight_layout()
    figure.savefig(DOCS / "peers.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
