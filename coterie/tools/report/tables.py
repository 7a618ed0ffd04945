"""Tables of a report: how runs have ended, what differs between methods or from a preset, and the checklist."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from coterie.errors import counted
from coterie.tools.report.runs import Method, RecordedRun, differences, option_text

_LAST = 0.1  # the share of a run's env steps that its final return is the mean of


@dataclass(frozen=True)
class Table:
    """`rows` under `head`, all of them text."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    text: str = ""


def final_return(run: RecordedRun) -> float:
    """Mean over the last tenth of the run's env steps, NaN if no episode has ended."""
    x, y = run.series(run.score)
    return float(y[x >= x[-1] * (1 - _LAST)].mean()) if len(x) else math.nan


def outcomes(methods: Sequence[Method]) -> Table:
    """Each run's status and final metrics."""
    rows = []
    for method in methods:
        for run in method.runs:
            timed = [line for line in run.lines if "env_steps_per_s" in line]  # not evaluations, of earlier steps
            last = {**(timed or run.lines or [{}])[-1], **run.summary}
            evals = run.series("eval/return")[1]
            energy = (run.summary.get("energy") or {}).get("frames_per_kj")
            counts = [number(last.get(name)) for name in ("env_steps", "seconds", "env_steps_per_s")]
            best = number(max(evals) if len(evals) else None)
            scores = [number(final_return(run)), best, number(energy)]
            status = f"{run.status}: {reason}" if (reason := run.summary.get("reason")) else run.status
            rows.append([str(run.folder), method.label, run.env, str(run.seed), status, *counts, *scores])
    names = "run, method, env, seed, status, env steps, seconds, env steps/s, final return, best evaluation, frames/kJ"
    return Table("Runs", names.split(", "), rows)


def settings(methods: Sequence[Method]) -> Table | None:
    """The options in which the methods differ; None if they have the same."""
    differ = {k: values for k, values in differences([m.runs[0] for m in methods]).items() if k != "env.id"}
    rows = [[name, *map(option_text, values)] for name, values in differ.items()]
    return Table("What differs", ["option", *(method.label for method in methods)], rows) if rows else None


def changes(run: RecordedRun, default: dict[str, Any]) -> Table | None:
    """The options that the user changed from the preset's `default`, which is as flat as the run's config. A resolved
    `auto` is no change.
    """
    rows = [
        [name, option_text(default.get(name)), option_text(value)]
        for name, value in run.config.items()
        if value != default.get(name) and name not in ("seed", "out") and not _is_auto(name, default.get(name))
    ]
    return Table(f"Changed from preset {run.preset}", ["option", "preset", "here"], rows) if rows else None


def _is_auto(name: str, value: Any) -> bool:
    return value == "auto" or (name in ("env.num_envs", "env.threads", "env.groups") and value == 0)


def checklist(methods: Sequence[Method]) -> Table:
    """The machine learning reproducibility checklist (Pineau et al. 2020), as far as runs record the answers."""
    runs = [run for method in methods for run in method.runs]
    machines = [run.machine for run in runs if run.machine]

    def each(values: Iterable[str]) -> str:
        counts = Counter(values)
        if not counts:
            return "not recorded (the run is not finished, or is of an older version)"
        return "; ".join(f"{value} ({n} runs)" if len(counts) > 1 else value for value, n in counts.items())

    seeds = sorted({run.seed for run in runs})
    hours = sum(float(run.lines[-1]["seconds"]) for run in runs if run.lines) / 3600
    rows = [
        ["command", each(m["command"] for m in machines)],
        ["settings", "config.json of each run's folder: `coterie train FOLDER/config.json --out NEW` repeats the run"],
        ["how settings were chosen", "not known to this page: add it where you publish it"],
        ["runs", f"{len(runs)}, of {counted(len(methods), 'method')}; all runs given to this page are shown"],
        ["seeds", ", ".join(map(str, seeds))],
        ["measure", "undiscounted return of whole training episodes, mean of the last 100; evaluations where drawn"],
        ["central tendency and variation", "mean over seeds, interquartile mean; 95% bootstrap intervals over seeds"],
        ["software", each(", ".join(f"{k} {v}" for k, v in m["versions"].items()) for m in machines)],
        ["computing", each(f"{m['processor']}, {m['cores']} cores, {m['gpus']} GPUs" for m in machines)],
        ["system", each(m["system"] for m in machines)],
        ["time", f"{hours:.2f} h of all runs together"],
    ]
    return Table("Reproducibility", ["question", "answer"], rows)


def number(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
