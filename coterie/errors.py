"""Errors of one line, and the exit code of a run that was interrupted. It loads nothing slow."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

EXIT_INTERRUPTED = 75  # EX_TEMPFAIL: checkpointed on a signal, go on with `resume`


class CoterieError(Exception):
    """An error whose message is one line meant for the person who started the run. `trace`: the traceback of a bug, for
    the screen and the log; empty where the line says all.
    """

    def __init__(self, message: object = "", trace: str = "") -> None:
        super().__init__(message)
        self.trace = trace
        if trace:
            self.add_note(trace)


class ConfigError(CoterieError):
    """A setting that cannot work: names the field and what it may be. Ends the program with exit code 2."""


def reason_of(error: BaseException) -> str:
    """An error's message on one line; of an operating system's error, the reason alone."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(reason.split()) or type(error).__name__


def json_object(name: str, text: str) -> dict[str, Any]:
    """The JSON object that `text` holds. Raises a `ConfigError` about the field `name` if it holds none."""
    with suppress(ValueError):
        if isinstance(found := json.loads(text), dict):
            return found
    raise ConfigError(f"{name}: {text!r:.60} is not a JSON object")


def first_line(error: BaseException) -> str:
    """What an error says, without the trace that others' libraries put behind it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def counted(number: int, noun: str) -> str:
    """`1 env`, `2,000 envs`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def one_line(error: BaseException) -> str:
    """An error's message on one line, with its class unless it is one of Coterie's."""
    text, kind = " ".join(str(error).split()), type(error).__name__
    return text if isinstance(error, CoterieError) else f"{kind}: {text}" if text else kind
