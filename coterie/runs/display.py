"""The live display: rich on a terminal, a plain line every ten seconds elsewhere."""

from __future__ import annotations

import math
import time
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

_PLAIN_EVERY, _LIVE_EVERY = 10.0, 0.2  # seconds
_LOSSES = {"policy_loss": "policy", "value_loss": "value", "entropy": "entropy", "kl": "kl", "grad_norm": "grad norm"}


def _number(value: Any) -> str:
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 10 else f"{value:.1f}"


def _duration(seconds: float) -> str:
    if seconds >= 86400 * 1000:
        return "-"  # no rate yet
    hours, rest = divmod(int(seconds), 3600)
    clock = f"{hours % 24}:{rest // 60:02}:{rest % 60:02}"
    return clock if hours < 24 else f"{hours // 24} d {clock}"


class Display:
    """The progress of a run. `update` is called once per rollout and limits its own rate.

    It shows `env_steps`, `env_steps_per_s`, `frames_per_s`, `mean_return`, `episodes`, `stages` (stage -> share of the
    time), `eval_return`, `eval_stderr`, and `losses` (until the next ones).
    """

    def __init__(
        self, total: int, title: str, start_steps: int = 0, quiet: bool = False, console: Console | None = None
    ) -> None:
        self.console = console or Console(highlight=False)
        self.total, self.title, self.quiet = total, title, quiet
        self.live: Live | None = None
        self.status: dict[str, Any] = {"env_steps": start_steps}
        self.losses: dict[str, Any] = {}
        self.best = -math.inf
        self.begin, self.shown = time.monotonic(), -math.inf

    def __enter__(self) -> Display:
        self.begin = time.monotonic()
        if not self.quiet:
            if self.console.is_terminal and not self.console.is_dumb_terminal:
                # No refresh thread: it would take the learner's core between rollouts.
                self.live = Live(self._render(), console=self.console, auto_refresh=False)
                self.live.start()
            else:
                self.console.print(self.title, markup=False, soft_wrap=True)
        return self

    def __exit__(self, *error: object) -> None:
        self._show()
        if self.live is not None:
            self.live.stop()
            self.live = None

    def note(self, text: str) -> None:
        """Print a line that stays."""
        if not self.quiet:
            self.console.print(text, markup=False, soft_wrap=True)

    def update(self, status: dict[str, Any], force: bool = False) -> None:
        """Show `status`, unless the last one was shown a moment ago; with `force` always."""
        self.losses = status.get("losses", self.losses)
        self.best = max(self.best, status.get("eval_return", -math.inf))  # NaN compares False and changes nothing
        self.status = status
        now = time.monotonic()
        if force or now - self.shown >= (_LIVE_EVERY if self.live else _PLAIN_EVERY):
            self.shown = now
            self._show()

    def lines(self) -> list[str]:
        """The text below the progress bar."""
        s = self.status
        first = (
            f"{s['env_steps']:,} of {self.total:,} env steps | {_number(s.get('env_steps_per_s'))} steps/s, "
            f"{_number(s.get('frames_per_s'))} frames/s"
        )
        second = f"return {_number(s.get('mean_return'))} (last 100 of {s.get('episodes', 0):,} episodes)"
        if "eval_return" in s:
            second += f" | eval {_number(s['eval_return'])} +- {_number(s.get('eval_stderr'))}"
            second += f", best {_number(self.best)}"
        third = ", ".join(f"{k} {100 * v:.0f}%" for k, v in s.get("stages", {}).items())
        fourth = ", ".join(f"{text} {_number(self.losses[k])}" for k, text in _LOSSES.items() if k in self.losses)
        return [first, second, *(["time: " + third] if third else []), *(["loss: " + fourth] if fourth else [])]

    def eta(self) -> str:
        left = max(0, self.total - self.status["env_steps"])
        return _duration(left / max(self.status.get("env_steps_per_s", 0.0), 1e-9))

    def _show(self) -> None:
        if self.live is not None:
            self.live.update(self._render(), refresh=True)
        elif not self.quiet:
            self.console.print(" | ".join([*self.lines(), f"ETA {self.eta()}"]), markup=False, soft_wrap=True)

    def _render(self) -> RenderableType:
        done = min(self.status["env_steps"] / max(self.total, 1), 1.0)
        bar = Table.grid(expand=True, padding=(0, 1, 0, 0))
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True)
        clock = f"{100 * done:.1f}%  {_duration(time.monotonic() - self.begin)}  ETA {self.eta()}"
        bar.add_row(ProgressBar(total=1.0, completed=done), clock)
        return Group(Text(self.title, style="bold"), bar, *(Text(line) for line in self.lines()))
