"""SIGINT and SIGTERM ask for an end. Handlers take note of them and raise nothing before the second one: an exception
that comes out of any line at all may be swallowed, or leave half of something done.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

STOP = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def hearing(note: Callable[[signal.Signals], None], numbers: Sequence[signal.Signals] = STOP) -> Iterator[None]:
    """Meanwhile these signals go to `note`; in a thread besides the main one (some notebooks) they stay whoever's
    they are.
    """
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
