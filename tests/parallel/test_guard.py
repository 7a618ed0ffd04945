"""The process beside a run of one process."""

from __future__ import annotations

import subprocess

from coterie.parallel import guard


def test_a_guard_that_the_kernel_does_not_end_in_time_raises_nothing(monkeypatch):
    """What the run raised must be seen, not how long the kernel took."""
    beside = guard.StallGuard(900.0, "run")
    wait = beside._popen.wait

    def too_long(seconds: float) -> int:
        raise subprocess.TimeoutExpired("guard", seconds)

    monkeypatch.setattr(beside._popen, "wait", too_long)
    beside.close()
    assert wait(60) < 0


def test_a_watch_that_wakes_as_the_run_ends_is_no_error() -> None:
    beside = guard.StallGuard(900.0, "run")
    beside.close()
    beside.alive()
