"""What a run prints, in a thread of its own: a terminal that is gone, or that is not read, holds up no run.

Before the first rollout it prints the current step of the start, after a second of silence. Imports nothing that loads
slowly.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from queue import Empty, SimpleQueue

_SILENCE_S = 1.0
_LEAVE_S = 5.0  # for a terminal to take what is left
_ERASE = "\r\x1b[2K"  # the line, on a terminal


def discard_stdout() -> None:
    """Print nothing more, so that Python's own exit has nothing to write: it would wait, or fail."""
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115


@contextmanager
def gc_paused() -> Iterator[None]:
    """Around the import of torch: no garbage is collected meanwhile, nor looked for later in what it has made."""
    first, collecting = "torch" not in sys.modules, gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if first:
            gc.freeze()
        if collecting:
            gc.enable()


class Starting:
    """The start of a run: `step` is what it does now, empty once there was a rollout. `begin`: its unix time.

    On a terminal the line is replaced by the next one, and erased when anything else is printed.
    """

    def __init__(self, step: str = "", begin: float = 0.0, quiet: bool = False) -> None:
        self.step, self.begin = step, begin or time.time()
        self.code = 0  # of the exit that a signal has asked for
        self.notes: list[str] = []  # for the run's log
        self.says, self.stuck = True, False  # whether it prints the steps; whether the terminal takes nothing more
        self._printed = time.monotonic() - (time.time() - self.begin)  # when the silence began
        self._said, self._in_place = "", False
        self._calls = SimpleQueue[Callable[[], object] | None]()
        self._thread = None if quiet else threading.Thread(target=self._print, name="coterie-screen", daemon=True)
        if self._thread is not None:
            self._thread.start()

    def doing(self, step: str) -> None:
        if self.code:  # what a signal's handler raises may be swallowed
            raise SystemExit(self.code)
        self.step = step

    def show(self, call: Callable[[], object]) -> None:
        """Have the thread call this, which prints something, after all that came before."""
        if self._thread is not None:
            self._calls.put(call)

    def say(self, line: str) -> None:
        self.show(partial(print, line, flush=True))

    def close(self) -> None:
        """Stop printing."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._calls.put(self._erase)
            self._calls.put(None)
            thread.join(_LEAVE_S)
            self.stuck = thread.is_alive()

    def _print(self) -> None:
        for call in iter(self._next, None):
            with suppress(Exception, SystemExit):  # which rich raises where a pipe is closed; log.txt has the lines
                self._erase()
                call()

    def _next(self) -> Callable[[], object] | None:
        while True:
            try:
                return self._calls.get(timeout=0.1 if self.says else None)
            except Empty:
                if self.says and self.step != self._said and time.monotonic() - self._printed >= _SILENCE_S:
                    return self._say

    def _erase(self) -> None:
        self._printed = time.monotonic()
        if self._in_place:
            self._in_place = False
            sys.stdout.write(_ERASE)
            sys.stdout.flush()

    def _say(self) -> None:
        self._said = self.step
        self._in_place = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        line = f"starting: {self.step}"
        sys.stdout.write(f"{_ERASE}{line}" if self._in_place else f"{line}\n")
        sys.stdout.flush()
