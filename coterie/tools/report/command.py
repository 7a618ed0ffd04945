"""The commands `coterie report RUN`, `coterie compare RUN RUN ...` and `coterie dashboard RUN`."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

from coterie.errors import ConfigError
from coterie.runs.files import save, unlinked
from coterie.tools.report.dashboard import serve
from coterie.tools.report.page import LARGEST_VIDEO, of_runs
from coterie.tools.report.runs import find_runs


def report(options: Namespace) -> int:
    """Write a run's page. Raises `CoterieError`, as the others here do."""
    runs = find_runs([options.run])
    if len(runs) > 1:
        raise ConfigError(f"{options.run}: holds {len(runs)} runs; name one, or use `coterie compare {options.run}`")
    run = runs[0]
    if options.video:
        from coterie.tools.watch import watch

        path, *_ = watch(run.folder, trust=options.trust)
        if path.stat().st_size > LARGEST_VIDEO:
            print(f"coterie: {path} has more than {LARGEST_VIDEO >> 20} MiB: the page is without it", file=sys.stderr)
    out = Path(options.out) if options.out else unlinked(run.folder / "report.html")
    print(save(out, of_runs(runs, run.title).html(), "--out"))
    return 0


def compare(options: Namespace) -> int:
    """Write a page about several runs."""
    runs = find_runs(options.runs)
    if len(runs) < 2:
        raise ConfigError(f"compare: give two runs or more ({options.runs[0]} is one); `coterie report` is for one")
    print(save(Path(options.out), of_runs(runs, "Comparison of runs").html(), "--out"))
    return 0


def dashboard(options: Namespace) -> int:
    """Serve a run's page until Ctrl-C."""
    if not 0 <= options.port <= 65535:
        raise ConfigError(f"--port: {options.port} is not from 0 to 65535")
    serve(options.run, options.port)
    return 0
