"""`coterie reproduce FIGURE`: make the runs of a figure of the papers, and write a page, pictures and tables of it."""

from __future__ import annotations

import csv
import io
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

from coterie.choices import unknown
from coterie.errors import EXIT_INTERRUPTED, ConfigError, CoterieError
from coterie.runs.files import save
from coterie.tools.report.charts import HEAD
from coterie.tools.report.page import Page, Section
from coterie.tools.report.runs import Method
from coterie.tools.report.tables import Table, checklist, outcomes
from coterie.tools.reproduce.drawings import Drawing, named
from coterie.tools.reproduce.figure import FIGURES, ArmResult, Figure, Size
from coterie.tools.reproduce.runs import estimate, evaluate, gather, planned, sized
from coterie.tools.reproduce.special import draw
from coterie.tools.reproduce.verdict import decide
from coterie.tools.sweep import parse_jobs, run_jobs

Refuse = Callable[[list[str]], None]  # raises `ConfigError` if a preset with these options is invalid


@dataclass(frozen=True)
class Order:
    """One figure at one size."""

    figure: Figure
    size: Size
    budget: str
    command: str
    folder: Path


def reproduce(asked: Namespace, refuse: Refuse) -> int:
    """Run the command; returns the worst exit code of its figures."""
    if not asked.figures:
        print(listing())
        return 0
    names = list(FIGURES) if asked.figures == ["all"] else asked.figures
    for name in names:
        if name not in FIGURES:
            raise unknown("FIGURE", name, FIGURES, "`coterie reproduce` lists them")
    at_once = parse_jobs(asked.jobs)
    if asked.seeds is not None and asked.seeds < 1:
        raise ConfigError(f"--seeds: {asked.seeds} is not a number of seeds")
    worst = 0
    for name in names:
        size = sized(FIGURES[name], asked.budget)
        given = [f"--budget {asked.budget}"]
        if asked.env:
            size = replace(size, envs=tuple(env.strip() for env in asked.env.split(",")))
            given.append(f"--env {asked.env}")
        if asked.seeds and FIGURES[name].verb != "train" and len(names) == 1:
            raise ConfigError(f"--seeds: {name} trains nothing, and its measurements have no seed")
        if asked.seeds and FIGURES[name].verb == "train":
            size = replace(size, seeds=asked.seeds)
            given.append(f"--seeds {asked.seeds}")
        where = "-".join([asked.budget, *([asked.env.replace(",", "-").replace("/", "-")] if asked.env else [])])
        command = " ".join(["coterie reproduce", name, *given])
        order = Order(FIGURES[name], size, asked.budget, command, Path(asked.out) / name / where)
        try:
            code = _reproduce(order, at_once, asked.dry_run, refuse)
        except CoterieError as error:  # an env that is not installed, for example: the other figures are made
            if len(names) == 1:
                raise
            print(f"{name}: {error}", flush=True)
            code = 1
        if code == EXIT_INTERRUPTED:
            return EXIT_INTERRUPTED
        worst = max(worst, code)
    return worst


def _reproduce(order: Order, at_once: int, dry: bool, refuse: Refuse) -> int:
    figure, size = order.figure, order.size
    plans = planned(figure, size, order.budget, order.folder / "runs")
    if figure.verb == "train":
        for plan in {(id(plan.arm), plan.env): plan for plan in plans}.values():  # before anything runs
            refuse(list(plan.job.args))
    if figure.timed and at_once > 1:
        print(f"{figure.name}: measures time, so one run at a time")
        at_once = 1
    steps = f" of {size.steps:,} env steps" if size.steps else f" of {size.seconds:g} s"
    print(f"{figure.name}: {figure.title}: {len(plans)} commands{steps}, {at_once} at a time", flush=True)
    if dry or size.steps > figure.sizes["small"].steps or order.budget == "full":
        found = estimate(figure, size, plans, order.folder.parent / f"probe-{order.folder.name}")
        if found is None:
            return EXIT_INTERRUPTED
        seconds, trained = found
        about = "about" if trained else "more than"
        how = ", estimated from a short run of each" if figure.verb == "train" else ""
        why = "" if trained else "; some of these ended before they began to train"
        print(f"{figure.name}: {about} {timedelta(seconds=round(seconds))}{how}{why}", flush=True)
    if dry:
        for plan in plans:
            print(f"coterie {plan.job.verb} {' '.join(plan.job.args)}")
        return 0
    code = run_jobs([plan.job for plan in plans], at_once)
    if code == EXIT_INTERRUPTED:
        return code
    results, missing = gather(plans)
    if (scored := evaluate(figure, results)) == EXIT_INTERRUPTED:
        return scored
    for path in _write(order, results, missing):
        print(path)
    return code or scored


def _write(order: Order, results: Sequence[ArmResult], missing: Sequence[str]) -> list[Path]:
    """The page, its pictures, its numbers, its tables."""
    figure, size, folder = order.figure, order.size, order.folder
    drawn = draw(figure, results, size)
    runs = [Method(named(result.arm), result.runs) for result in results if result.runs]
    named_envs = [env for result in results for envs in result.envs for env in envs.split(",")]  # or several tasks
    envs = ", ".join(dict.fromkeys(named_envs)) or ", ".join(size.envs)
    seeds = f"{size.seeds} seed{'s' * (size.seeds > 1)}"
    each = f"{size.steps:,} env steps of each run, {seeds}" if size.steps else f"{size.seconds:g} s of each measurement"
    verdict, checks = decide(figure, results, size)
    facts = [
        f"Verdict: {verdict}.",
        f"Claim: {figure.claim}",
        f"{order.command}: {each}, {envs}.",
        f"From {figure.source}.",
        f"Differences from the paper: {figure.notes(size)}",
    ]
    if unfinished := [str(r.folder) for result in results for r in result.runs if not r.finished]:
        facts.append(f"Unfinished: {', '.join(unfinished)}.")
    if missing:
        facts.append(f"Failed, not drawn: {', '.join(missing)}.")
    stated = Table("What the paper states", ["", "paper"], figure.stated)
    tables = [checks, *drawn.tables, stated]  # two kinds of drawing may give the same one
    drawn = Drawing(drawn.charts, [one for k, one in enumerate(tables) if one.rows and one not in tables[:k]])
    sections = [
        Section("The figure", drawn.charts, drawn.tables),
        Section("Runs", tables=[outcomes(runs)] if runs else []),
        Section("Reproducibility", tables=[checklist(runs)] if runs else []),
    ]
    page = Page(figure.title, facts, sections).html()
    texts = {"index.html": page, "data.csv": _csv(drawn), "tables.md": _markdown(figure, facts, drawn.tables)}
    texts |= {f"{i}.svg": chart.svg for i, chart in enumerate(drawn.charts, 1)}
    for old in folder.glob("*.svg"):
        old.unlink()
    return [save(folder / name, text, "--out") for name, text in texts.items()]


def _csv(drawn: Drawing) -> str:
    """Every number of every chart and table."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["chart", *HEAD])
    for chart in drawn.charts:
        for row in chart.rows:
            writer.writerow([chart.title, *(f"{v:.6g}" if isinstance(v, float) else v for v in row)])
    for table in drawn.tables:
        writer.writerow([])
        writer.writerow([table.title, *table.head])
        writer.writerows([table.title, *row] for row in table.rows)
    return out.getvalue()


def _markdown(figure: Figure, facts: Sequence[str], tables: Sequence[Table]) -> str:
    blocks = [f"## {figure.title}", *facts]
    for table in tables:
        lines = ["| " + " | ".join(cells) + " |" for cells in (table.head, ["---"] * len(table.head), *table.rows)]
        blocks += [f"**{table.title}**" + (f": {table.text}" if table.text else ""), "\n".join(lines)]
    return "\n\n".join(blocks) + "\n"


def listing() -> str:
    """All figures by paper."""
    width = max(len(name) for name in FIGURES)
    blocks = [
        "\n".join([source, *(f"  {f.name:{width}}  {f.title}" for f in FIGURES.values() if f.source == source)])
        for source in dict.fromkeys(figure.source for figure in FIGURES.values())
    ]
    tail = "coterie reproduce NAME [--budget smoke|small|full|N]; each writes a page, pictures and tables"
    return "\n\n".join([*blocks, tail])
