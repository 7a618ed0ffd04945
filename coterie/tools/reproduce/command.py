"""`coterie reproduce FIGURE`: run what a figure of the papers needs, and write a page, a picture and a table of it."""

from __future__ import annotations

import csv
import difflib
import io
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from coterie.tools.report.charts import HEAD
from coterie.tools.report.command import save, write
from coterie.tools.report.page import Page, Section
from coterie.tools.report.runs import Method
from coterie.tools.report.sections import Table, checklist, outcomes
from coterie.tools.reproduce.catalogue import FIGURES
from coterie.tools.reproduce.draw import named
from coterie.tools.reproduce.figure import PAPERS, Drawing, Figure, Result, Size
from coterie.tools.reproduce.runs import Stopped, estimate, gather, planned, run, sized
from coterie.tools.sweep import parse_jobs
from coterie.types import EXIT_INTERRUPTED, ConfigError, CoterieError


def reproduce(args: list[str], parser: ArgumentParser, refuse: Callable[[list[str]], None]) -> int:
    """`refuse`: raises a `ConfigError` where a preset with its options cannot be."""
    parser.add_argument("figures", nargs="*", help="names, or all; without one they are listed")
    parser.add_argument("--budget", default="small", help="smoke, small, full, or env steps of each run")
    parser.add_argument("--env", default="", help="instead of the figure's envs: one, or several with commas")
    parser.add_argument("--seeds", type=int, default=0, help="how many of each; default: as the budget says")
    parser.add_argument("--jobs", help="runs at once; default: 1")
    parser.add_argument("--out", default="runs/reproduce", help="folder")
    parser.add_argument("--dry-run", action="store_true", help="say what would run, and how long it would take")
    asked = parser.parse_args(args)
    if not asked.figures:
        print(listing())
        return 0
    names = list(FIGURES) if asked.figures == ["all"] else asked.figures
    for name in names:
        if name not in FIGURES:
            near = difflib.get_close_matches(name, FIGURES, 1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ConfigError(f"FIGURE: {name!r} is unknown; {hint}`coterie reproduce` lists them")
    at_once = parse_jobs(asked.jobs)
    if asked.seeds < 0:
        raise ConfigError(f"--seeds: {asked.seeds} is not a number of seeds")
    worst = 0
    for name in names:
        figure = FIGURES[name]
        size = sized(figure, asked.budget)
        if asked.env:
            size = replace(size, envs=tuple(env.strip() for env in asked.env.split(",")))
        if asked.seeds:
            size = replace(size, seeds=asked.seeds)
        where = "-".join([asked.budget, *([asked.env.replace(",", "-").replace("/", "-")] if asked.env else [])])
        words = ["coterie reproduce", name, f"--budget {asked.budget}", *([f"--env {asked.env}"] if asked.env else []),
                 *([f"--seeds {asked.seeds}"] if asked.seeds else [])]  # fmt: skip
        try:
            code = _one(figure, size, asked.budget, Path(asked.out) / name / where, " ".join(words), at_once,
                        asked.dry_run, refuse)  # fmt: skip
        except Stopped:
            print("stopped; the same command goes on where it was")
            return EXIT_INTERRUPTED
        except CoterieError as error:  # an env that is not here, say: of several figures the others are made
            if len(names) == 1:
                raise
            print(f"{name}: {error}", flush=True)
            code = 1
        if code == EXIT_INTERRUPTED:
            return EXIT_INTERRUPTED
        worst = max(worst, code)
    return worst


def _one(
    figure: Figure, size: Size, budget: str, folder: Path, command: str, at_once: int, dry: bool,
    refuse: Callable[[list[str]], None],
) -> int:  # fmt: skip
    plans = planned(figure, size, budget, folder / "runs")
    for plan in {(id(plan.arm), plan.env): plan for plan in plans}.values():  # said before anything runs
        if plan.arm.verb == "train":
            refuse(list(plan.job.args))
    if figure.timed and at_once > 1:
        print(f"{figure.name}: is about time, so one run at a time")
        at_once = 1
    steps = f" of {size.steps:,} env steps" if size.steps else f" of {size.seconds:g} s"
    print(f"{figure.name}: {figure.title}: {len(plans)} commands{steps}, {at_once} at a time", flush=True)
    if dry or size.steps > figure.sizes["small"].steps or budget == "full":
        found = estimate(figure, size, plans, folder.parent / f"probe-{folder.name}")
        if found is None:
            return EXIT_INTERRUPTED
        seconds, trained = found
        told = "about" if trained else "more than"
        why = "" if trained else "; some of these ended before they had begun to train"
        took = timedelta(seconds=round(seconds))
        print(f"{figure.name}: {told} {took}, going by a short run of each{why}", flush=True)
    if dry:
        for plan in plans:
            print(f"coterie {plan.arm.verb} {' '.join(plan.job.args)}")
        return 0
    code = run(plans, at_once)
    if code == EXIT_INTERRUPTED:
        return code
    results, missing = gather(figure, plans)
    drawn = figure.draw(results, size)
    for path in _written(figure, size, command, folder, results, missing, drawn):
        print(path)
    return code


def _written(
    figure: Figure,
    size: Size,
    command: str,
    folder: Path,
    results: Sequence[Result],
    missing: Sequence[str],
    drawn: Drawing,
) -> list[Path]:
    """The page, its pictures, its numbers, its tables."""
    runs = [Method(named(result.arm), result.runs) for result in results if result.runs]
    envs = ", ".join(dict.fromkeys(env for result in results for env in result.envs)) or ", ".join(size.envs)
    seeds = f"{size.seeds} seed{'s' * (size.seeds > 1)}"
    facts = [
        f"{command}: {size.steps:,} env steps of each run, {seeds}, {envs}." if size.steps
        else f"{command}: {size.seconds:g} s of each measurement, {envs}.",
        f"From {PAPERS[figure.paper]}.",
        f"Not as in the paper: {' '.join(scaled(figure, size))}",
    ]  # fmt: skip
    if unfinished := [str(r.folder) for result in results for r in result.runs if not r.finished]:
        facts.append(f"Have not finished, and are drawn as far as they went: {', '.join(unfinished)}.")
    if missing:
        facts.append(f"Failed, and are not drawn: {', '.join(missing)}.")
    if figure.said:
        stated = Table("What the paper states", ["", "paper"], figure.said)
        drawn = Drawing(drawn.charts, [*drawn.tables, stated])
    page = Page(figure.title, facts, [
        Section("The figure", drawn.charts, drawn.tables),
        Section("Runs", tables=[outcomes(runs)] if runs else []),
        Section("Reproducibility", tables=[checklist(runs)] if runs else []),
    ])  # fmt: skip
    paths = [write(page, folder / "index.html")]
    texts = {"data.csv": _csv(drawn), "tables.md": _markdown(figure, facts, drawn.tables)}
    texts |= {f"{i}.svg": chart.svg for i, chart in enumerate(drawn.charts, 1)}
    for old in folder.glob("*.svg"):
        old.unlink()
    return paths + [save(folder / name, text) for name, text in texts.items()]


def scaled(figure: Figure, size: Size) -> list[str]:
    """What is to be said of this size."""
    notes = (note if isinstance(note, str) else note(size) for note in figure.scaled)
    return [note for note in notes if note]


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
    blocks = []
    for key, paper in PAPERS.items():
        rows = [f"  {f.name:{width}}  {f.title}" for f in FIGURES.values() if f.paper == key]
        blocks.append("\n".join([paper, *rows]))
    tail = "coterie reproduce NAME [--budget smoke|small|full|N]; each writes a page, pictures and a table"
    return "\n\n".join([*blocks, tail])
