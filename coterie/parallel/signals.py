"""SIGINT and SIGTERM ask for an end. Their handlers only note them: an exception that comes out of any line at all may
be swallowed, or leave something half done.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

STOP = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def on_signals(note: Callable[[signal.Signals], None], numbers: Sequence[signal.Signals] = STOP) -> Iterator[None]:
    """Pass these signals to `note` meanwhile. Outside the main thread (some notebooks) handlers stay as they are."""
    before = {}
    try:
        for number in numbers:
            before[number] = signal.signal(number, lambda n, frame: note(signal.Signals(n)))
    except ValueError:
        pass
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
