"""Keep what `coterie reproduce` found: docs/figures.md has the tables of each figure's largest budget so far, and
docs/results.md the list of the commands.

python benchmarks/figures.py [FOLDER]     (runs/reproduce)
"""

from __future__ import annotations

import json
import re
import sys
from datetime import date, timedelta
from pathlib import Path

from coterie.reproduce.catalogue import FIGURES

DOCS = Path(__file__).parents[1] / "docs"
HEAD = """# What the papers' figures came to

Of each figure the largest budget that has been run, as [`coterie reproduce`](reproduce.md) wrote its tables. Most are
small ones, on two cores and on environments that learn in minutes: they show that a figure is made, and seldom what the
paper found.

*Written by `python benchmarks/figures.py`.*
"""


def cost(budget: Path) -> tuple[float, float]:
    """Env steps and seconds of all runs; of what is only measured, when that was."""
    steps = seconds = 0.0
    for summary in budget.glob("runs/*/summary.json"):
        told = json.loads(summary.read_text())
        steps, seconds = steps + told["env_steps"], seconds + told["seconds"]
    return (steps, seconds) if steps else (0.0, (budget / "tables.md").stat().st_mtime)


def main() -> None:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/reproduce")
    page = DOCS / "figures.md"
    known = dict(re.findall(r"^(## ([\w-]+): .*?)(?=^## |\Z)", page.read_text(), re.M | re.S)) if page.exists() else {}
    sections = {name: text for text, name in known.items()}
    for name in FIGURES:
        budgets = [path.parent for path in root.glob(f"{name}/*/tables.md")]
        if budgets:
            largest = max(budgets, key=cost)
            steps, seconds = cost(largest)
            title, command, *rest = (largest / "tables.md").read_text().split("\n\n")
            took = f"{date.today()}"
            if steps:
                took += f"; {steps:,.0f} env steps in all, {timedelta(seconds=round(seconds))} of training"
            line, told = command.split(": ", 1)
            body = "\n\n".join([f"`{line}`: {told} {took}.", *rest]).rstrip()
            sections[name] = f"## {name}: {title.removeprefix('## ')}\n\n{body}\n\n"
    page.write_text(HEAD + "\n" + "\n".join(sections[name].rstrip() + "\n" for name in FIGURES if name in sections))
    rows = ["| figure | the largest budget so far | of training |", "|---|---|---|"]
    for name in FIGURES:
        text = sections.get(name, "")
        command, took = re.search(r"`(coterie reproduce .*?)`", text), re.search(r"([\d:]+) of training", text)
        rows.append(f"| {name} | {command[0] if command else 'none'} | {took[1] if took else ''} |")
    results = DOCS / "results.md"
    marks = r"(<!-- figures -->\n).*?(<!-- end of figures -->)"
    text = "\n".join(rows)
    results.write_text(re.sub(marks, lambda m: f"{m[1]}{text}\n{m[2]}", results.read_text(), flags=re.S))


if __name__ == "__main__":
    main()
