"""The live display: a panel on a terminal, a short line every 30 seconds elsewhere."""

from __future__ import annotations

import itertools
import math
import time
from datetime import timedelta
from functools import partial
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from coterie.runs.starting import Starting

_PLAIN_EVERY, _LIVE_EVERY = 30.0, 0.2  # seconds
_FIRST_PLAIN = 5.0  # a log has its first line of progress after this time
_LOSSES = {"policy_loss": "policy", "value_loss": "value", "q_loss": "q", "entropy": "entropy", "kl": "kl"}
_FAULTS = {"envs_replaced": "envs replaced", "restarts": "learners restarted", "skipped_batches": "batches skipped"}
_BARS, _CURVE = "▁▂▃▄▅▆▇█", 24  # columns of the curve
_POINTS = 240  # of the curve's history


def _number(value: Any) -> str:
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 10 else f"{value:.1f}"


def _duration(seconds: float) -> str:
    if seconds >= 86400 * 1000:
        return "-"  # no rate yet
    return str(timedelta(seconds=int(seconds)))


def curve(values: list[float], columns: int = _CURVE) -> str:
    """The values as a line of bars, from the lowest to the highest of them; each column is the mean of its share."""
    if len(values) < 2:
        return ""
    columns = min(columns, len(values))
    bounds = [len(values) * i // columns for i in range(columns + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(bounds)]
    low, high = min(means), max(means)
    return "".join(_BARS[round((x - low) / (high - low) * (len(_BARS) - 1)) if high > low else 0] for x in means)


class Display:
    """The progress of a run. `update` is called once per rollout and limits its own rate.

    It shows `env_steps`, `env_steps_per_s`, `frames_per_s`, `mean_return`, `episodes`, `stages` (stage -> share of the
    time), `restarts` of learners, `eval_return`, `eval_stderr`, and the last `metrics` (a line of metrics.jsonl).
    """

    def __init__(
        self, total: int, title: str, start_steps: int = 0, quiet: bool = False, console: Console | None = None,
        starting: Starting | None = None, best: float | None = None,
    ) -> None:  # fmt: skip
        self.console = console or Console(highlight=False)
        self.total, self.title, self.quiet = total, title, quiet
        self.live: Live | None = None
        self._draws = False  # while the thread does
        self.starting, self.start_steps = starting or Starting(quiet=quiet), start_steps  # its thread prints
        self.status: dict[str, Any] = {"env_steps": start_steps}
        self.metrics: dict[str, Any] = {}
        self.returns: list[float] = []  # the mean return, at equal distances of env steps
        self.best = -math.inf if best is None else best
        self.begin = time.monotonic()
        self.shown = -math.inf
        self.said = -1, None  # env steps and evaluation of the last line

    def __enter__(self) -> Display:
        self.begin = time.monotonic()
        if not self.quiet:
            if self.console.is_terminal and not self.console.is_dumb_terminal:
                self.starting.says = False  # the panel shows it
                # No refresh thread: it would take the learner's core between rollouts.
                self.live = Live(console=self.console, auto_refresh=False, get_renderable=self._render)
                self.starting.show(self.live.start)
            else:
                self.note(self.title)
                self.shown = self.begin + _FIRST_PLAIN - _PLAIN_EVERY
        return self

    def __exit__(self, *error: object) -> None:
        if self.live is None:
            if (self.status["env_steps"], self.status.get("eval_return")) != self.said:
                self._show()
        else:
            self.starting.show(self.live.stop)  # with the last state
            self.live = None

    def note(self, text: str) -> None:
        """Print a line that stays."""
        if self.live is not None:
            self.starting.show(partial(self.console.print, text, markup=False, soft_wrap=True))
        elif not self.quiet:
            self.starting.show(lambda: print(text, file=self.console.file, flush=True))

    def doing(self, step: str) -> None:
        """Show what start-up does, until there is a rollout."""
        self.starting.doing(step)
        if self.live is not None:
            self._show()

    def update(self, status: dict[str, Any], force: bool = False) -> None:
        """Show `status`, unless the last one was shown a moment ago; with `force` always."""
        self.metrics = status.get("metrics", self.metrics)
        self.best = max(self.best, status.get("eval_return", -math.inf))  # NaN compares False and changes nothing
        self.status = status
        if self.starting.step and status["env_steps"] > self.start_steps:
            self.starting.says = False
            self.starting.doing("")
        mean = status.get("mean_return")
        due = (status["env_steps"] - self.start_steps) * _POINTS // max(self.total - self.start_steps, 1)
        if mean is not None and math.isfinite(mean) and len(self.returns) <= due:
            self.returns.append(mean)
        now = time.monotonic()
        waits = self.live is None and bool(self.starting.step)  # a log needs no line without rates
        if force or (not waits and now - self.shown >= (_LIVE_EVERY if self.live else _PLAIN_EVERY)):
            self.shown = now
            self._show()

    def rows(self) -> list[tuple[str, str]]:
        """What the panel shows below the progress bar: a name and a text in each row."""
        s, m = self.status, self.metrics
        found = [("starting", self.starting.step)] if self.starting.step else []
        found += [
            ("env steps", f"{s['env_steps']:,} of {self.total:,}"),
            ("return", f"{_number(s.get('mean_return'))}  (last 100 of {s.get('episodes', 0):,} episodes)"),
        ]
        if line := curve(self.returns):
            found.append(("", line))
        if "eval_return" in s:
            score = f"{_number(s['eval_return'])} +- {_number(s.get('eval_stderr'))}"
            found.append(("evaluation", f"{score}, best {_number(self.best)}"))
        found.append(("speed", f"{_number(s.get('env_steps_per_s'))} env steps/s"))
        if s.get("frames_per_s") != s.get("env_steps_per_s"):
            found[-1] = ("speed", f"{found[-1][1]}, {_number(s.get('frames_per_s'))} frames/s")
        stages = sorted(s.get("stages", {}).items(), key=lambda stage: -stage[1])
        if text := ", ".join(f"{name} {100 * share:.0f}%" for name, share in stages if share >= 0.005):
            found.append(("time", text))
        if "policy_lag/mean" in m:
            lag = f"{_number(m['policy_lag/mean'])} on average, {_number(m.get('policy_lag/p95'))} in 95%"
            found.append(("policy lag", f"{lag} (learner steps)"))
        if text := ", ".join(f"{text} {_number(m[k])}" for k, text in _LOSSES.items() if k in m):
            found.append(("loss", text))
        found.append(("faults", self._faults() or "none"))
        return found

    def line(self) -> str:
        """One line for a log: what changes, and only that."""
        s = self.status
        parts = [
            f"{s['env_steps']:,} of {self.total:,} env steps",
            f"{_number(s.get('env_steps_per_s'))} steps/s",
            f"return {_number(s.get('mean_return'))}",
        ]
        if "eval_return" in s:
            parts.append(f"eval {_number(s['eval_return'])} (best {_number(self.best)})")
        return ", ".join([*parts, *filter(None, [self._faults()]), f"ETA {self.eta()}"])

    def eta(self) -> str:
        left = max(0, self.total - self.status["env_steps"])
        return _duration(left / max(self.status.get("env_steps_per_s", 0.0), 1e-9))

    def _faults(self) -> str:
        counts = {**self.metrics, **self.status}
        return ", ".join(f"{counts[k]:,.0f} {text}" for k, text in _FAULTS.items() if counts.get(k))

    def _show(self) -> None:
        if self.live is None:
            self.said = self.status["env_steps"], self.status.get("eval_return")
            self.note(self.line())
        elif not self._draws:  # else the terminal is slow, or is not read
            self._draws = True
            self.starting.show(partial(self._draw, self.live))

    def _draw(self, live: Live) -> None:
        self._draws = False  # before it: a terminal may refuse one, and take the next
        live.refresh()

    def _render(self) -> RenderableType:
        done = min(self.status["env_steps"] / max(self.total, 1), 1.0)
        bar = Table.grid(expand=True, padding=(0, 1, 0, 0))
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True)
        clock = f"{100 * done:.1f}%  {_duration(time.monotonic() - self.begin)}  ETA {self.eta()}"
        bar.add_row(ProgressBar(total=1.0, completed=done), clock)
        rows = Table.grid(padding=(0, 2, 0, 0))
        rows.add_column(style="dim", no_wrap=True)
        rows.add_column()
        for name, text in self.rows():
            rows.add_row(name, Text(text, style="" if name else "green"))
        return Panel(Group(bar, rows), title=Text(self.title, style="bold"), title_align="left")
