"""Record the results of `coterie reproduce`: docs/results/figures.md has a table of all figures, then the
tables and the first picture of each figure's largest budget so far.

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
HEAD = """# The papers' figures

Every figure and table of the five papers as [`coterie reproduce`](../guides/reproduce.md) made it, with the largest
budget so far, beside the values that the paper states. Machine: 2 CPU cores, no GPU. Most budgets are small, with one
seed and environments that learn in minutes: they show that a figure works, and seldom what the paper found.

At this size some figures show the paper's effect: without V-trace a large policy lag ends learning (impala-e1), larger
batches and more simulators cost sample efficiency (seed-batch), and the distance to consensus stays below its bound
(gala-2a). Others do not: in gala-table1 GALA-A2C scores less than A2C on CartPole.

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


def anchor(title: str) -> str:
    """The id that the site gives to a heading."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower())


def summary(sections: dict[str, str]) -> str:
    """A table with a row for each figure: what was trained and for how long."""
    rows = ["| figure | shows | envs | budget, size of each run | seeds | training |", "|---" * 6 + "|"]
    for name in FIGURES:
        if name not in sections:
            rows.append(f"| {name} | | | none | | |")
            continue
        title = sections[name].partition("\n")[0].removeprefix("## ")
        facts = re.search(r"^`.* --budget (\S+)`: (.*?)\. \d{4}-\d\d-\d\d(.*)$", sections[name], re.M)
        if facts is None:
            raise SystemExit(f"{name}: its section has no line with its command")
        budget, work, cost = facts.groups()
        each = re.search(r"([\d,]+ env steps|\d+ s) of each", work)
        seeds, took = re.search(r"(\d+) seeds?", work), re.search(r"in all; (.*) of training", cost)
        envs = dict.fromkeys(env for part in work.split(", ") if " " not in part for env in part.split(","))
        cells = [
            f"[{name}](#{anchor(title)})",
            title.removeprefix(f"{name}: "),
            ", ".join(envs),
            f"{budget}, {each[1]}" if each else budget,
            seeds[1] if seeds else "",
            took[1] if took else "",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs/reproduce"))
    root = parser.parse_args().folder
    page = DOCS / "results" / "figures.md"
    written = re.findall(r"^(## ([\w-]+): .*?)(?=^## |\Z)", page.read_text(), re.M | re.S) if page.exists() else []
    sections = {name: text.rstrip() + "\n" for text, name in written}
    for name in FIGURES:
        budgets = [path.parent for path in root.glob(f"{name}/*/tables.md")]
        if budgets:
            largest = max(budgets, key=cost)
            known = re.search(r"; ([\d,]+) env steps in all", sections.get(name, ""))
            if not known or int(known[1].replace(",", "")) <= cost(largest)[0]:
                sections[name] = section(name, largest)
    tables = "\n".join(sections[name] for name in FIGURES if name in sections)
    page.write_text(f"{HEAD}\n{summary(sections)}\n{tables}")


if __name__ == "__main__":
    main()
