"""Signals that end a run or a process of it. Loads nothing slow: they are handled from a command's first moment."""

from __future__ import annotations

import ctypes
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

from coterie.errors import CoterieError

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)  # before a fork
STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # Ctrl-C, a scheduler, a closed terminal
WARNING = signal.SIGUSR1  # of a scheduler: the machine may be taken away soon
HANDLED = (*STOP, WARNING)  # by the parent alone
_TOGETHER_S = 10.0  # signals within this time have one cause: a sweep that is busy passes them on late


@contextmanager
def on_signals(note: Callable[[signal.Signals], None], numbers: Sequence[signal.Signals] = STOP) -> Iterator[None]:
    """Pass these signals to `note` meanwhile: an exception that can be raised anywhere may be swallowed, or leave
    something half done. Outside the main thread (some notebooks) handlers stay as they are, as does a SIGHUP that is
    ignored (nohup).
    """
    before = {}
    try:
        for number in numbers:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, lambda n, frame: note(signal.Signals(n)))
    except ValueError:
        pass
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _TooLong(BaseException):
    """Not an `Exception`: code that tries again after every error must end, too."""


@contextmanager
def time_limit(seconds: float, reason: str) -> Iterator[None]:
    """Raise a `CoterieError` where the body takes longer; its trace says what the body did. Without effect outside the
    main thread, and in native code until that returns to Python.
    """
    trace = ""

    def over(number: int, frame: FrameType | None) -> None:
        nonlocal trace
        trace = trace or "".join(traceback.format_stack(frame))
        raise _TooLong

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGALRM, over)
    outer = signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)  # again each second, if something catches it
    try:
        yield
    except _TooLong:
        raise CoterieError(reason, trace) from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *outer)


def is_second(number: signal.Signals, since: float) -> bool:
    """Whether a signal that comes `since` seconds after a first one asks to end at once. A terminal that closes may
    send SIGHUP twice; a batch system signals a sweep and its runs, and the sweep signals the runs as well.
    """
    return number == signal.SIGINT or (number != signal.SIGHUP and since > _TOGETHER_S)


def stop_with_parent() -> None:
    """Between fork and exec: SIGTERM for this process when the thread that started it has ended, on Linux."""
    if hasattr(_LIBC, "prctl"):
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


@contextmanager
def blocked_signals() -> Iterator[None]:
    """For a child process that is being started, which must not die of them before it calls `ignore_signals`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_signals() -> None:
    """In a child process: a terminal or a batch system sends them to the whole group, and the parent handles them."""
    for number in HANDLED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)  # for the processes that an env starts


def name_of(number: int) -> str:
    """A signal's name; real-time signals have none."""
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def end_with_parent(grace: bool) -> None:
    """Have the kernel end this process when the thread that started it has ended, on Linux: a thread of Python that
    watches the parent does not run while native code holds Python's lock (GIL). `grace`: it has twelve seconds to end.
    """
    if not hasattr(_LIBC, "prctl"):
        return
    number = signal.SIGKILL
    if grace:
        number = signal.SIGUSR2  # which is 12; its handler is the C function `alarm`, called with that number
        _LIBC.signal(number, ctypes.cast(_LIBC.alarm, ctypes.c_void_p))
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    _LIBC.prctl(_PR_SET_PDEATHSIG, number)
