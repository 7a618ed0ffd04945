"""The HTML page: one self-contained file without scripts. A run's folder is data: nothing that it names is imported."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass

from coterie import presets
from coterie.errors import ConfigError
from coterie.extras import needs
from coterie.presets.common import flat
from coterie.runs.config_io import to_dict
from coterie.runs.files import read_json
from coterie.tools.report import sections
from coterie.tools.report.charts import Chart
from coterie.tools.report.runs import RecordedRun, methods
from coterie.tools.report.tables import Table, changes, checklist, outcomes, settings
from coterie.types import Spec

LARGEST_VIDEO = 30 * 2**20


@dataclass(frozen=True)
class Section:
    title: str
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()
    videos: Sequence[tuple[str, str]] = ()  # each an mp4 in base64 and its caption


@dataclass(frozen=True)
class Page:
    title: str
    intro: Sequence[str] = ()
    parts: Sequence[Section] = ()

    def html(self, refresh: int = 0) -> str:
        """`refresh`: seconds after which a browser reloads it; 0: never."""
        with needs("a page", "plots"):
            from jinja2 import Environment, PackageLoader
        environment = Environment(loader=PackageLoader("coterie.tools", "report"), autoescape=True)
        parts = [part for part in self.parts if part.charts or part.tables or part.videos]
        return environment.get_template("page.html").render(
            title=self.title, intro=self.intro, sections=parts, refresh=refresh
        )


def of_runs(runs: Sequence[RecordedRun], title: str, live: bool = False) -> Page:
    """A page about one run, or one that compares several. `live`: without the parts that never change."""
    found = methods(runs)
    charts, finals = sections.aggregates(found)
    differ = settings(found)
    tables = [outcomes(found), *([finals] if len(runs) > 1 else []), *([differ] if differ else [])]
    if len(found) == 1 and not live and (changed := _changes(runs[0])) is not None:
        tables.append(changed)
    parts = [
        Section("Returns", [*sections.returns(found), *charts, *sections.evaluations(found)]),
        Section("Runs", tables=tables),
        Section("Diagnostics", [chart for method in found for chart in sections.diagnostics(method)]),
        Section("Video", videos=[video for run in runs if not live and (video := _video(run)) is not None]),
        Section("Reproducibility", tables=[checklist(found)]),
    ]
    last = max((line["env_steps"] for run in runs for line in run.lines), default=0)
    counts = f"{len(runs)} run{'s' * (len(runs) > 1)} of {len(found)} method{'s' * (len(found) > 1)}"
    intro = [f"{counts}, at most {last:,} env steps. Runs with the same settings and different seeds are one method."]
    if len(found) < len(runs):
        intro.append("The diagnostics are those of each method's first run.")
    return Page(title, intro, parts)


def _changes(run: RecordedRun) -> Table | None:
    """Changes to a built-in preset, without the env: a preset needs its spaces only, which the run has recorded."""
    if run.preset not in presets.PRESETS:
        return None
    try:
        spec = Spec.from_json(read_json(run.folder / "spec.json", dict) or {})
        recorded = json.dumps(to_dict(presets.make(run.preset, run.env, spec)))  # as the run's own: with lists
        return changes(run, flat(json.loads(recorded)))
    except (ConfigError, KeyError, ValueError, TypeError):  # an older or damaged spec.json
        return None


def _video(run: RecordedRun) -> tuple[str, str] | None:
    """The video that `coterie watch` left in the run's folder."""
    path = run.folder / "watch.mp4"
    if path.is_symlink() or not path.exists() or path.stat().st_size > LARGEST_VIDEO:
        return None
    return base64.b64encode(path.read_bytes()).decode(), f"An episode of {run.folder.name} ({run.env})"
