"""The link between runs, as the supervisor uses it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from coterie.parallel.shm import SharedArrays


class Net(NamedTuple):
    """What the learners of all runs must share."""

    digest: str  # of the network's names and shapes
    weights: int
    moments: int


class Link(Protocol):
    """Carries messages between the learners of this run and those of other runs."""

    # Begin, before the learners do. `join`: they are to take the others' weights; returns whether there are any.
    def start(self, memory: SharedArrays, join: bool, stop: Callable[[], bool]) -> bool: ...
    def cut(self) -> bool: ...  # break it, as a broken network does; returns whether there was one to break
    def lines(self) -> list[str]: ...  # for the log
    def gauges(self, env_steps: int) -> dict[str, float]: ...
    def close(self, over: bool) -> None: ...  # `over`: this run has ended for good
