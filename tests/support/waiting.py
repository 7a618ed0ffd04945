"""Waiting for something that another thread or process does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from coterie.runs.starting import Starting

T = TypeVar("T")

PATIENCE = 60.0  # seconds; a busy machine with two cores starts a process in about 5


def wait_until(predicate: Callable[[], T], seconds: float = PATIENCE, what: str = "") -> T:
    """The first true value of `predicate`. Fails after `seconds`."""
    end = time.monotonic() + seconds
    while not (found := predicate()):
        assert time.monotonic() < end, f"not within {seconds:.0f} s: {what or predicate}"
        time.sleep(0.02)
    return found


def printed(starting: Starting) -> None:
    """Wait until all that was to be shown before is printed."""
    if starting._thread is not None:
        starting.show((done := threading.Event()).set)
        assert done.wait(PATIENCE)
