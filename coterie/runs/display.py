"""The live display: rich on a terminal, a plain line every ten seconds elsewhere."""

from __future__ import annotations

import math
import time
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

_PLAIN_EVERY, _LIVE_EVERY = 10.0, 0.2  # seconds
_LOSSES = ("policy_loss", "value_loss", "entropy", "kl", "grad_norm")


def _number(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 10 else f"{value:.1f}"


class Display:
    """`update` is called once per rollout and throttles itself; keys that it does not know are ignored."""

    def __init__(
        self, total: int, title: str, start_steps: int = 0, quiet: bool = False, console: Console | None = None
    ) -> None:
        self.console = console or Console(highlight=False)
        self.total, self.title, self.quiet = total, title, quiet
        self.live: Live | None = None
        self.status: dict[str, Any] = {}
        self.losses: dict[str, Any] = {}
        self.shown = 0.0
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(None),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(elapsed_when_finished=False),
            console=self.console,
            expand=True,
            speed_estimate_period=60,
        )
        self.task = self.bar.add_task(title, total=total, completed=start_steps)

    def __enter__(self) -> Display:
        if not self.quiet:
            if self.console.is_terminal:
                self.live = Live(self._render(), console=self.console, auto_refresh=False)
                self.live.__enter__()
            else:
                self.console.print(self.title, markup=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live is not None:
            self.live.update(self._render(), refresh=True)
            self.live.__exit__(kind, error, trace)
            self.live = None
        elif not self.quiet and self.status:
            self._plain()

    def note(self, text: str) -> None:
        """A line that stays."""
        if not self.quiet:
            self.console.print(text, markup=False, soft_wrap=True)

    def update(self, status: dict[str, Any]) -> None:
        self.losses = status.get("losses", self.losses)
        self.status = status
        now = time.monotonic()
        if self.quiet or now - self.shown < (_LIVE_EVERY if self.live else _PLAIN_EVERY):
            return
        self.shown = now
        if self.live is not None:
            self.bar.update(self.task, completed=status["env_steps"])
            self.live.update(self._render(), refresh=True)
        else:
            self._plain()

    def lines(self) -> list[str]:
        """What is shown below the bar."""
        s = self.status
        if not s:
            return ["starting"]
        first = (
            f"{s['env_steps']:,} of {self.total:,} env steps | {_number(s['env_steps_per_s'])} steps/s, "
            f"{_number(s['frames_per_s'])} frames/s"
        )
        second = f"mean return {_number(s['mean_return'])} ({s['episodes']:,} games)"
        if "eval_return" in s:
            second += f" | eval {_number(s['eval_return'])} +- {_number(s.get('eval_stderr'))}"
        third = "time: " + ", ".join(f"{k} {100 * v:.0f}%" for k, v in s.get("stages", {}).items())
        fourth = ", ".join(f"{k} {_number(self.losses[k])}" for k in _LOSSES if k in self.losses)
        return [line for line in (first, second, third, fourth) if line]

    def _plain(self) -> None:
        remaining = max(0, self.total - self.status["env_steps"]) / max(self.status["env_steps_per_s"], 1e-9)
        eta = (
            time.strftime("%H:%M:%S", time.gmtime(remaining)) if remaining < 86400 else f"{remaining / 86400:.1f} days"
        )
        self.console.print(" | ".join([*self.lines()[:3], f"ETA {eta}"]), markup=False, soft_wrap=True)

    def _render(self) -> Group:
        return Group(self.bar, *(Text(line, no_wrap=True, overflow="ellipsis") for line in self.lines()))
