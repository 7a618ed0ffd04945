"""Prints a start-up status after a second of silence. Imports nothing that loads slowly."""

from __future__ import annotations

import os
import sys
import threading
import time

_SILENCE_S = 1.0
_ERASE = "\r\x1b[2K"  # the line, on a terminal


class Starting:
    """The start of a run: `step` is what it does now, empty once there was a rollout. `begin`: its unix time.

    On a terminal the line is replaced by the next one, and erased when anything else is printed.
    """

    def __init__(self, step: str = "", begin: float = 0.0, quiet: bool = False) -> None:
        self.step, self.begin = step, begin or time.time()
        self.code = 0  # of the exit that a signal has asked for
        self.notes: list[str] = []  # for the run's log
        self._printed = time.monotonic() - (time.time() - self.begin)  # when the silence began
        self._said, self._in_place = "", False
        self._lock, self._over = threading.Lock(), threading.Event()
        if not quiet:
            threading.Thread(target=self._watch, name="coterie-start", daemon=True).start()

    def doing(self, step: str) -> None:
        if self.code:  # what a signal's handler raises may be swallowed
            raise SystemExit(self.code)
        self.step = step

    def prints(self) -> None:
        """Something else is printed now."""
        with self._lock:
            self._printed = time.monotonic()
            if self._in_place:
                sys.stdout.write(_ERASE)
                sys.stdout.flush()
            self._in_place = False

    def close(self) -> None:
        """Stop printing."""
        self._over.set()
        self.prints()

    def _watch(self) -> None:
        while not self._over.wait(0.1):
            with self._lock:
                silent = time.monotonic() - self._printed >= _SILENCE_S
                if silent and self.step != self._said and not self._over.is_set():
                    self._say()

    def _say(self) -> None:
        self._said, self._printed = self.step, time.monotonic()
        self._in_place = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        line = f"starting: {self.step}"
        sys.stdout.write(f"{_ERASE}{line}" if self._in_place else f"{line}\n")
        sys.stdout.flush()
