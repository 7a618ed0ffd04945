"""Record the results of `coterie reproduce`: docs/results/figures.md counts the verdicts of all figures and has a
table of them, those that differ from the paper first, then the tables and the first picture of each figure's largest
budget so far.

python benchmarks/figures.py [FOLDER]     (runs/reproduce)
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections import Counter
from datetime import date, timedelta
from pathlib import Path

from coterie.tools.reproduce.figure import FIGURES

DOCS = Path(__file__).parents[1] / "docs"
WORDS = ("differs", "undecided", "agrees")  # the failures first
HEAD = """# The papers' figures

Every figure and table of the five papers, and two of our own about stale data, as
[`coterie reproduce`](../guides/reproduce.md) made it, with the largest budget so far, beside the values that the paper
states. Machine: 2 CPU cores, no GPU. Most budgets are small, on environments that learn in minutes.

Each figure has a claim of its paper, and a verdict on it: `agrees`, `differs` or `undecided` (these runs cannot tell).
The rule was written on 25 November 2026, before the runs that it is applied to. A check of a claim compares two sides
on one environment. It holds if each side has at least three runs and every run of the one side is better than every run
of the other, which happens by chance once in 20 with three runs a side; it is reversed if the same is true the other
way round. Where a claim says "no less", equal runs hold, too, and a limit holds if every run keeps it. Four figures
that agree were undecided with fewer env steps. A figure agrees if all its checks hold, and differs if any is reversed.
Where an environment only stands in for the paper's, that is about the direction on the stand-in: it neither confirms
nor refutes a claim about 49 Atari games. [The guide](../guides/reproduce.md#verdicts) has the details.

Of all runs the repository has the numbers in the tables, not the curves.

*Written by `python benchmarks/figures.py`.*
"""


def cost(budget: Path) -> tuple[int, float, float]:
    """A sort key of the work in a budget's folder: env steps of all runs, the budget's size for figures that train
    nothing, and the seconds of all runs.
    """
    summaries = [json.loads(path.read_text()) for path in budget.glob("runs/*/summary.json")]
    steps, seconds = sum(one["env_steps"] for one in summaries), sum(one["seconds"] for one in summaries)
    return steps, float(("smoke", "small", "full").index(budget.name.partition("-")[0])) if not steps else 0.0, seconds


def section(name: str, budget: Path) -> str:
    title, *blocks = (budget / "tables.md").read_text().split("\n\n")
    at = next(i for i, block in enumerate(blocks) if block.startswith("coterie reproduce"))  # below verdict and claim
    top, command, rest = blocks[:at], blocks[at], blocks[at + 1 :]
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
    body = "\n\n".join([*top, f"`{line}`: {facts} {took}.", *rest, *pictures]).rstrip()
    return headed(name, f"{title}\n\n{body}\n")


def verdict(text: str) -> str:
    """The line below a section's title: one of `WORDS`."""
    return str(re.findall(r"\n\nVerdict: (\w+)\.\n", text)[0])


def headed(name: str, text: str) -> str:
    """A section below the figure's title, the verdict, and the claim and the differences as they are worded now."""
    figure = FIGURES[name]
    body = re.sub(r"\A.*\n+(Verdict: .*\n+)?(Claim: (.+\n)+\n)?", "", text)
    claim = " ".join(figure.claim.split())
    if size := re.search(r"^`.* --budget (smoke|small|full)`", body, re.M):
        notes = f"Differences from the paper: {figure.notes(figure.sizes[size[1]])}"
        body = re.sub(r"^Differences from the paper: .*$", lambda _: notes, body, flags=re.M)
    return f"## {name}: {figure.title}\n\nVerdict: {verdict(text)}.\n\nClaim: {claim}\n\n{body}"


def anchor(title: str) -> str:
    """The id that the site gives to a heading."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower())


def summary(sections: dict[str, str]) -> str:
    """The counts, and a table with a row for each figure: its verdict, what was trained and for how long."""
    verdicts = {name: verdict(sections[name]) if name in sections else "undecided (not made)" for name in FIGURES}
    ours = [name for name in FIGURES if name.startswith("staleness")]
    said = f"{counted([v for name, v in verdicts.items() if name not in ours])}; ours: "
    said += f"{counted([verdicts[name] for name in ours])}"
    said += f". {sum(not f.checks for f in FIGURES.values())} have no check, and their claims say why"
    rows = ["| figure | verdict | shows | envs | budget, size of each run | seeds | training |", "|---" * 7 + "|"]
    for name in sorted(FIGURES, key=lambda name: WORDS.index(verdicts[name].split()[0])):
        if name not in sections:
            rows.append(f"| {name} | {verdicts[name]} | | | none | | |")
            continue
        title = sections[name].partition("\n")[0].removeprefix("## ")
        facts = re.search(r"^`.* --budget ([^`\s]+)[^`]*`: (.*?)\. \d{4}-\d\d-\d\d(.*)$", sections[name], re.M)
        if facts is None:
            raise SystemExit(f"{name}: its section has no line with its command")
        budget, work, cost = facts.groups()
        each = re.search(r"([\d,]+ env steps|\d+ s) of each", work)
        seeds, took = re.search(r"(\d+) seeds?", work), re.search(r"in all; (.*) of training", cost)
        envs = dict.fromkeys(env for part in work.split(", ") if " " not in part for env in part.split(","))
        cells = [
            f"[{name}](#{anchor(title)})",
            verdicts[name],
            title.removeprefix(f"{name}: "),
            ", ".join(envs),
            f"{budget}, {each[1]}" if each else budget,
            seeds[1] if seeds else "",
            took[1] if took else "",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return f"**Figures and tables of the papers: {said}.**\n\n" + "\n".join(rows) + "\n"


def counted(verdicts: list[str]) -> str:
    counts = Counter(text.split()[0] for text in verdicts)
    return f"{len(verdicts)}, of which " + ", ".join(f"{word} {counts[word]}" for word in WORDS if counts[word])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs/reproduce"))
    root = parser.parse_args().folder
    page = DOCS / "results" / "figures.md"
    written = re.findall(r"^(## ([\w-]+): .*?)(?=^## |\Z)", page.read_text(), re.M | re.S) if page.exists() else []
    sections = {name: headed(name, text.rstrip() + "\n") for text, name in written}
    for name in FIGURES:
        budgets = [path.parent for path in root.glob(f"{name}/*/tables.md")]
        if budgets:
            largest = max(budgets, key=cost)
            known = re.search(r"; ([\d,]+) env steps in all", sections.get(name, ""))
            # A run ends a few env steps after its budget, so one of the same size may be a little shorter.
            if not known or 0.99 * int(known[1].replace(",", "")) <= cost(largest)[0]:
                sections[name] = section(name, largest)
    tables = "\n".join(sections[name] for name in FIGURES if name in sections)
    page.write_text(f"{HEAD}\n{summary(sections)}\n{tables}")


if __name__ == "__main__":
    main()
