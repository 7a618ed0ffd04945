"""What befalls envs by chance: that one is replaced, and that a callback sets an attribute."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

KINDS = ("replaced", "set")


class EnvEvents:
    """The events of some groups of envs: kind, first env of the group, answers that it had from its envs since they
    were made, then the instances or the attributes. `note` takes them for a record; `recorded` are repeated.
    """

    def __init__(self, note: Callable[..., None] = lambda *event: None, recorded: Iterable[list[Any]] = ()) -> None:
        self.note = note
        self._recorded = {(kind, *at): what for kind, *at, what in recorded if kind in KINDS}

    def take(self, kind: str, group: int, answers: int) -> Any:
        """What is to be repeated there, or None."""
        return self._recorded.pop((kind, group, answers), None)
