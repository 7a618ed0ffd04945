"""The display: what it says on a terminal of any width, and in a log."""

from __future__ import annotations

import io
import math
import re
import threading
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from coterie.runs import display, starting
from coterie.runs.display import Display
from tests.support.waiting import printed

STATUS: dict[str, Any] = {
    "env_steps": 250_000,
    "env_steps_per_s": 956.3,
    "frames_per_s": 3825.2,
    "mean_return": 23.41,
    "episodes": 1170,
    "stages": {"env": 0.42, "train": 0.45, "pull": 0.001},
    "eval_return": 25.03,
    "eval_stderr": 1.2,
    "metrics": {"policy_loss": -0.0123, "value_loss": math.nan, "lr": 1e-3, "envs_replaced": 2, "policy_lag/mean": 1.5},
}
PANEL = [
    "250,000 of 1,000,000",
    "23.4 (last 100 of 1,170 episodes)",
    "25.0 +- 1.2, best 25.0",
    "956.3 env steps/s, 3,825 frames/s",
    "train 45%, env 42%",
    "1.5 on average",
    "policy -0.0123, value -",
    "2 envs replaced",
    "ETA 0:13:04",
    "25.0%",
]


class Clock:
    now = 1.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(display.time, "monotonic", clock)
    return clock


def console(width: int = 80, terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), width=width, height=50, force_terminal=terminal, highlight=False)


def text_of(shown: Display) -> str:
    printed(shown.starting)
    file = shown.console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_a_log_gets_a_short_line_every_thirty_seconds(clock: Clock) -> None:
    with Display(1_000_000, "ppo x Pong-v5", console=console()) as shown:
        for second in range(70):
            clock.now = 1.0 + second
            shown.update({**STATUS, "env_steps": second})
        clock.now += 1
        shown.update({**STATUS, "env_steps": 777}, force=True)
        shown.note("a [note] that stays")
        shown.update({**STATUS, "env_steps": 778})
    lines = text_of(shown).splitlines()
    assert lines[0] == "ppo x Pong-v5"
    counts = [line.split()[0] for line in lines[1:]]
    assert counts == ["5", "35", "65", "777", "a", "778"], "and the last state at the end"
    assert lines[-2] == "a [note] that stays"
    assert lines[-1] == (
        "778 of 1,000,000 env steps, 956.3 steps/s, return 23.4, eval 25.0 (best 25.0), 2 envs replaced, ETA 0:17:24"
    )
    assert "\x1b" not in text_of(shown)


def test_the_last_line_of_a_log_is_not_there_twice(clock: Clock) -> None:
    with Display(1000, "title", console=console()) as shown:
        shown.update({**STATUS, "env_steps": 777}, force=True)
    assert text_of(shown).count("777 of 1,000") == 1
    with Display(1000, "title", console=console()) as shown:
        shown.update({**STATUS, "env_steps": 777}, force=True)
        shown.update({**STATUS, "env_steps": 777, "eval_return": 99.5})
    assert "eval 99.5" in text_of(shown).splitlines()[-1]


def test_a_log_has_no_progress_and_the_panel_names_the_step_before_the_first_rollout(clock: Clock) -> None:
    for terminal in (False, True):
        with Display(1_000_000, "title", start_steps=500, console=console(terminal=terminal)) as shown:
            shown.doing("2 learners")
            clock.now += 10
            shown.update({**STATUS, "env_steps": 500})
            assert ("500 of" in text_of(shown), "2 learners" in text_of(shown)) == (terminal, terminal)
            shown.update({**STATUS, "env_steps": 501}, force=True)
            assert not shown.starting.step
        assert "501 of 1,000,000" in text_of(shown)


@pytest.mark.parametrize("width", [10, 20, 40, 80, 120, 200])
def test_the_live_panel_fits_any_terminal(width: int) -> None:
    plain = Console(file=io.StringIO(), width=width, height=50, force_terminal=True, color_system=None)
    shown = Display(1_000_000, "ppo x Breakout-v5 x inline x solo", console=plain, quiet=True)
    shown.update({**STATUS, "env_steps": 100_000, "mean_return": 1.0})
    shown.update(STATUS)
    plain.print(shown._render())
    rows = text_of(shown).splitlines()
    assert max(map(cell_len, rows)) <= width
    words = " ".join(" ".join(row.strip("│ ") for row in rows).split())
    if width >= 80:
        assert [s for s in PANEL if s not in words] == []
        assert "▁█" in words


def test_a_curve_shows_the_means_of_equal_shares() -> None:
    assert display.curve([1.0]) == ""
    assert display.curve([2.0, 2.0]) == "▁▁"
    assert display.curve([0.0, 7.0]) == "▁█"
    assert display.curve([float(i) for i in range(240)], columns=8) == "▁▂▃▄▅▆▇█"


def test_the_live_display_redraws_at_most_five_times_a_second(clock: Clock) -> None:
    with Display(1_000_000, "t", console=console(terminal=True)) as shown:
        before = text_of(shown).count("of 1,000,000")
        for i in range(1000):
            clock.now = 2.0 + i / 1000
            shown.update({**STATUS, "env_steps": i})
            printed(shown.starting)
        assert text_of(shown).count("of 1,000,000") - before == 5
    assert "999 of 1,000,000" in text_of(shown), "the last state at the end"


class Gone(io.StringIO):
    """A terminal that takes nothing: it blocks, or each write fails."""

    blocks: threading.Event | None = None
    error: type[OSError] = BrokenPipeError

    def write(self, text: str) -> int:
        if self.blocks is None:
            raise self.error
        self.blocks.wait()
        return super().write(text)


def test_a_panel_goes_on_after_a_write_that_failed(clock: Clock) -> None:
    with Display(1_000_000, "t", console=console(terminal=True)) as shown:
        assert text_of(shown), "the panel has been drawn"
        file = shown.console.file
        shown.console.file = gone = Gone()
        gone.error = BlockingIOError
        for i in range(3):
            clock.now += 1
            shown.update({**STATUS, "env_steps": i})
            printed(shown.starting)
        shown.console.file = file
        clock.now += 1
        shown.update({**STATUS, "env_steps": 777})
        assert "777 of 1,000,000" in text_of(shown)


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("blocks", [False, True])
def test_a_terminal_that_takes_nothing_holds_up_no_run(monkeypatch, terminal: bool, blocks: bool) -> None:
    monkeypatch.setattr(starting, "_LEAVE_S", 0.1 if blocks else 60.0)
    file = Gone()
    file.blocks = threading.Event() if blocks else None
    gone = Console(file=file, width=80, height=50, force_terminal=terminal, highlight=False)
    with Display(1_000_000, "title", console=gone) as shown:
        for steps in range(100):
            shown.update({**STATUS, "env_steps": steps}, force=True)
            if steps < 5:
                shown.note(f"note {steps}")
    thread = shown.starting._thread
    shown.starting.close()
    assert thread is not None
    assert shown.starting.stuck == blocks
    if file.blocks is not None:
        file.blocks.set()
        thread.join(30)
        assert "99 of 1,000,000" in file.getvalue(), "it takes all that was printed"
        lines = re.findall(r"note (\d+)", file.getvalue())
        assert lines == ["0", "1", "2", "3", "4"]
        assert file.getvalue().count("of 1,000,000") < 10 or not terminal, "it takes no panels of the past"


def test_quiet_is_silent_and_starts_no_thread(clock: Clock) -> None:
    before = threading.active_count()
    for terminal in (True, False):
        with Display(10, "t", quiet=True, console=console(terminal=terminal)) as shown:
            shown.note("x")
            shown.update(STATUS, force=True)
        assert text_of(shown) == ""
        assert threading.active_count() == before


def test_the_best_evaluation_and_the_last_metrics_stay() -> None:
    with Display(1_000_000, "t", console=console(200), best=8.0) as shown:  # of the run before it was resumed
        for score in (3.0, 7.0, math.nan, 5.0):
            shown.update({**STATUS, "eval_return": score})
        bare = {k: v for k, v in STATUS.items() if k != "metrics"}
        shown.update({**bare, "eval_return": 5.0}, force=True)
        rows = dict(shown.rows())
    assert "eval 5 (best 8)" in text_of(shown).splitlines()[-1]
    assert rows["evaluation"] == "5 +- 1.2, best 8"
    assert "policy -0.0123" in rows["loss"]
