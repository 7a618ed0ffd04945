"""What a flight record holds of one life of a learner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Note = Callable[..., None]  # takes an event: its kind, then what JSON can hold
Event = list[Any]


def unrecorded(*event: Any) -> None:
    """The `Note` of a run without a record."""


class RecordEnds(Exception):
    """A replay needs what came after the end of a record, so that it can compare no further."""


@dataclass(frozen=True)
class RecordedLife:
    """The record of a learner's life."""

    path: Path
    header: dict[str, Any]
    events: list[Event]
    damage: str = ""  # why the rest of it cannot be read, unless its process was killed there

    @property
    def end(self) -> str | None:
        """The error that ended it; empty: none did; None: it was killed."""
        return next((reason for (reason,) in reversed(self.of("end"))), None)

    def of(self, kind: str) -> list[Event]:
        """The events of a kind, without its name."""
        return [event[1:] for event in self.events if event[0] == kind]
