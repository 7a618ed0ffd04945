"""The HTML page: everything inside one file, nothing fetched, no script."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass

from coterie import presets
from coterie.runs.config_io import to_dict
from coterie.tools.report import sections
from coterie.tools.report.charts import Chart
from coterie.tools.report.runs import RecordedRun, flat, methods
from coterie.tools.report.sections import Table
from coterie.types import ConfigError

_LARGEST_VIDEO = 30 * 2**20


@dataclass(frozen=True)
class Video:
    """`data`: an mp4 in base64."""

    data: str
    text: str


@dataclass(frozen=True)
class Section:
    title: str
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()
    videos: Sequence[Video] = ()


@dataclass(frozen=True)
class Page:
    title: str
    intro: Sequence[str] = ()
    parts: Sequence[Section] = ()

    def html(self, refresh: int = 0) -> str:
        """`refresh`: seconds after which a browser asks for it anew; 0: never."""
        try:
            from jinja2 import Environment, PackageLoader
        except ImportError:
            raise ConfigError("pages need: pip install 'coterie[plots]'") from None
        environment = Environment(loader=PackageLoader("coterie.tools", "report"), autoescape=True)
        parts = [part for part in self.parts if part.charts or part.tables or part.videos]
        return environment.get_template("page.html").render(
            title=self.title, intro=self.intro, sections=parts, refresh=refresh
        )


def of_runs(runs: Sequence[RecordedRun], title: str, live: bool = False) -> Page:
    """A page about one run, or about several beside one another. `live`: without what never changes."""
    found = methods(runs)
    charts, finals = sections.aggregates(found)
    settings = sections.settings(found)
    tables = [sections.outcomes(found), *([finals] if len(runs) > 1 else []), *([settings] if settings else [])]
    if len(found) == 1 and not live and (changed := _changes(runs[0])) is not None:
        tables.append(changed)
    parts = [
        Section("Returns", [*sections.returns(found), *charts, *sections.evaluations(found)]),
        Section("Runs", tables=tables),
        Section("Machinery", [chart for method in found for chart in sections.machinery(method)]),
        Section("A game", videos=[video for run in runs if not live and (video := _video(run)) is not None]),
        Section("Reproducibility", tables=[sections.checklist(found)]),
    ]
    last = max((line["env_steps"] for run in runs for line in run.lines), default=0)
    intro = [f"{len(runs)} run{'s' * (len(runs) > 1)} of {len(found)} method{'s' * (len(found) > 1)}, "
             f"{last:,} env steps at most. The same settings with different seeds are one method."]  # fmt: skip
    if len(found) < len(runs):
        intro.append("Lag, consensus, gradients and times are those of each method's first run.")
    return Page(title, intro, parts)


def _changes(run: RecordedRun) -> Table | None:
    if run.preset not in presets.PRESETS:
        return None
    try:
        return sections.changes(run, flat(to_dict(presets.make(run.preset, run.env))))
    except ConfigError:  # an env that is not here
        return None


def _video(run: RecordedRun) -> Video | None:
    """What `coterie watch` has left in the run's folder."""
    path = run.folder / "watch.mp4"
    if not path.exists() or path.stat().st_size > _LARGEST_VIDEO:
        return None
    return Video(base64.b64encode(path.read_bytes()).decode(), f"A game of {run.folder.name} ({run.env})")
