"""The display: what it says on a terminal of any width, and in a log."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from coterie.runs import display
from coterie.runs.display import Display

STATUS: dict[str, Any] = {
    **{"env_steps": 250_000, "env_steps_per_s": 956.3, "frames_per_s": 3825.2, "mean_return": 23.41, "episodes": 1170},
    **{"stages": {"env": 0.42, "train": 0.45}, "eval_return": 25.03, "eval_stderr": 1.2},
    "losses": {"policy_loss": -0.0123, "value_loss": math.nan, "lr": 1e-3},
}
SAYS = [
    "250,000 of 1,000,000 env steps",
    "956.3 steps/s, 3,825 frames/s",
    "return 23.4 (last 100 of 1,170 episodes)",
    "eval 25.0 +- 1.2, best 25.0",
    "time: env 42%, train 45%",
    "loss: policy -0.0123, value -",
    "ETA 0:13:04",
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
    file = shown.console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_a_log_gets_a_line_every_ten_seconds(clock: Clock) -> None:
    with Display(1_000_000, "ppo x Pong-v5", console=console()) as shown:
        for second in range(35):
            clock.now = 1.0 + second
            shown.update({**STATUS, "env_steps": second})
        clock.now += 1
        shown.update({**STATUS, "env_steps": 777}, force=True)
        shown.note("a [note] that stays")
    lines = text_of(shown).splitlines()
    assert lines[0] == "ppo x Pong-v5"
    counts = [line.split()[0] for line in lines[1:]]
    assert counts == ["0", "10", "20", "30", "777", "a", "777"], "and the last state at the end"
    assert lines[-2] == "a [note] that stays"
    assert "\x1b" not in text_of(shown)


@pytest.mark.parametrize("width", [10, 20, 40, 80, 120, 200])
def test_the_live_display_fits_any_terminal(width: int) -> None:
    plain = Console(file=io.StringIO(), width=width, height=50, force_terminal=True, color_system=None)
    shown = Display(1_000_000, "ppo x Breakout-v5 x inline x solo", console=plain)
    shown.update(STATUS)
    plain.print(shown._render())
    line, *rows = text_of(shown).splitlines()  # the first is the plain line that `update` wrote: it is not entered
    assert [s for s in SAYS if s not in line] == []
    assert max(map(cell_len, rows)) <= width
    words = " ".join(" ".join(rows).split())
    if width >= 40:
        assert [s for s in [*SAYS, "25.0%"] if s not in words] == []
    assert len(rows) == 6 or width < 80


def test_the_live_display_redraws_at_most_five_times_a_second(clock: Clock) -> None:
    with Display(1_000_000, "t", console=console(terminal=True)) as shown:
        before = text_of(shown).count("env steps")
        for i in range(1000):
            clock.now = 2.0 + i / 1000
            shown.update({**STATUS, "env_steps": i})
        assert text_of(shown).count("env steps") - before == 5
    assert "999 of 1,000,000" in text_of(shown), "the last state at the end"


@pytest.mark.parametrize("terminal", [True, False])
def test_a_quiet_display_prints_nothing(terminal: bool) -> None:
    with Display(10, "t", quiet=True, console=console(terminal=terminal)) as shown:
        shown.note("x")
        shown.update(STATUS, force=True)
    assert text_of(shown) == ""


def test_the_best_evaluation_and_the_last_losses_stay() -> None:
    with Display(1_000_000, "t", console=console(200)) as shown:
        for score in (3.0, 8.0, math.nan, 5.0):
            shown.update({**STATUS, "eval_return": score})
        bare = {k: v for k, v in STATUS.items() if k != "losses"}
        shown.update({**bare, "eval_return": 5.0}, force=True)
    last = text_of(shown).splitlines()[-1]
    assert "eval 5 +- 1.2, best 8" in last
    assert "policy -0.0123" in last


def test_before_the_first_rollout_and_without_a_rate_there_is_no_eta() -> None:
    with Display(1_000_000, "t", start_steps=500, console=console(200)) as shown:
        pass
    assert "500 of 1,000,000 env steps | - steps/s" in text_of(shown)
    assert text_of(shown).rstrip().endswith("ETA -")
    shown.update({"env_steps": 0, "env_steps_per_s": 5.0})
    assert shown.eta() == "2 d 7:33:20"


def test_an_error_inside_leaves_the_terminal_usable() -> None:
    shown = Display(10, "t", console=console(terminal=True))
    with pytest.raises(RuntimeError, match="boom"), shown:
        raise RuntimeError("boom")
    assert text_of(shown).count("\x1b[?25l") == text_of(shown).count("\x1b[?25h") == 1, "the cursor is shown again"
