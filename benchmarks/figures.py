"""Record the results of `coterie reproduce`: docs/results/figures.md has the tables and the first picture of each
figure's largest budget so far, and docs/results/learning.md the list of the commands.

python benchmarks/figures.py [FOLDER]     (runs/reproduce)
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from datetime import date, timedelta
from pathlib import Path

from coterie.tools.reproduce.figure import FIGURES

DOCS = Path(__file__).parents[1] / "docs"
HEAD = """# Results of the papers' figures

The tables of [`coterie reproduce`](../guides/reproduce.md), for each figure the largest budget so far. Most are small,
on two cores and on environments that learn in minutes: they show that the figure works, and seldom what the paper
found.

*Written by `python benchmarks/figures.py`.*
"""


def cost(budget: Path) -> tuple[int, float, float]:
    """A sort key of the work in a budget's folder: env steps of all runs, the budget's size for figures that train
    nothing, and the seconds of all runs.
    """
    summaries = [json.loads(path.read_text()) for path in budget.glob("runs/*/summary.json")]
    steps, seconds = sum(one["env_steps"] for one in summaries), sum(one["seconds"] for one in summaries)
    return steps, float(("smoke", "small", "full").index(budget.name)) if not steps else 0.0, seconds


def section(name: str, budget: Path) -> str:
    title, command, *rest = (budget / "tables.md").read_text().split("\n\n")
    steps, _, seconds = cost(budget)
    took = f"{date.fromtimestamp((budget / 'tables.md').stat().st_mtime)}"
    if steps:
        took += f"; {steps:,} env steps in all; {timedelta(seconds=round(seconds))} of training"
    line, facts = command.split(": ", 1)
    pictures = []
    if (budget / "1.svg").exists():  # the figure's own page has the others
        (DOCS / "results" / "figures").mkdir(parents=True, exist_ok=True)
        shutil.copyfile(budget / "1.svg", DOCS / "results" / "figures" / f"{name}.svg")
        pictures.append(f"![](figures/{name}.svg)")
    body = "\n\n".join([f"`{line}`: {facts} {took}.", *rest, *pictures]).rstrip()
    return f"## {name}: {title.removeprefix('## ')}\n\n{body}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs/reproduce"))
    root = parser.parse_args().folder
    page, results = DOCS / "results" / "figures.md", DOCS / "results" / "learning.md"
    written = re.findall(r"^(## ([\w-]+): .*?)(?=^## |\Z)", page.read_text(), re.M | re.S) if page.exists() else []
    sections = {name: text.rstrip() + "\n" for text, name in written}
    for name in FIGURES:
        budgets = [path.parent for path in root.glob(f"{name}/*/tables.md")]
        if budgets:
            largest = max(budgets, key=cost)
            known = re.search(r"; ([\d,]+) env steps in all", sections.get(name, ""))
            if not known or int(known[1].replace(",", "")) <= cost(largest)[0]:
                sections[name] = section(name, largest)
    page.write_text(HEAD + "\n" + "\n".join(sections[name] for name in FIGURES if name in sections))
    rows = ["| figure | the largest budget so far | of training |", "|---|---|---|"]
    for name in FIGURES:
        text = sections.get(name, "")
        command, took = re.search(r"`(coterie reproduce .*?)`", text), re.search(r"in all; ([^;]*?) of training", text)
        rows.append(f"| {name} | {command[0] if command else 'none'} | {took[1] if took else ''} |")
    table = "\n".join(rows)
    marks = r"(<!-- figures -->\n).*?(<!-- end of figures -->)"
    results.write_text(re.sub(marks, lambda m: f"{m[1]}{table}\n{m[2]}", results.read_text(), flags=re.S))


if __name__ == "__main__":
    main()
