"""The board: plain numbers in shared memory in which the processes of a run write their progress.

Every count has one writer, so nothing is locked and no increment is lost when a process dies.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from coterie.errors import CoterieError
from coterie.parallel.clock import awake
from coterie.parallel.seqlock import Seqlock
from coterie.parallel.shm import InSharedMemory, Layout
from coterie.types import Array

#: What each learner, and each actor, counts. `produced`: rows acted; `delivered`: those that an actor has handed to its
#: learner; `dropped`: those that central acting could not complete to rollouts; `started`: rows that a learner has
#: begun to learn from (budgets and schedules read their sum); `learned`: rows that it has learned from; `in_flight`:
#: rows that are left in its memory at the end.
COUNTS = (
    "produced", "delivered", "started", "learned", "masked", "learner_steps", "samples_trained",
    "policy_lag_max", "skipped", "replaced", "episodes", "dropped", "in_flight",
)  # fmt: skip
# Bits of an order, below 16: write a checkpoint; evaluate before it; end the run after it; do not train after it.
SAVE, EVALUATE, LAST, HOLD = 1, 2, 4, 8
_ATTRIBUTES = 4096  # bytes for the attributes that callbacks set


class Board(InSharedMemory):
    """One row of counts for each learner, then for each actor, and the orders of their parent."""

    def __init__(self, learners: int, actors: int = 0) -> None:
        rows = learners + actors
        layout: Layout = {
            "counts": ((rows,), [(name, "int64") for name in COUNTS]),
            "heartbeat": ((rows,), "float64"),
            "alive": ((rows,), "float64"),
            "blocked": ((rows,), "int64"),
            "order": ((), [(name, "int64") for name in ("order", "stop", "closed", "sealed")]),
            "evaluated": ((1,), "int64"),
            "begun": ((1,), "int64"),
            "arrivals": ((learners,), "int64"),
            "version": ((1,), "int64"),
            "attributes": ((_ATTRIBUTES,), "uint8"),
        }
        super().__init__(layout, "coterie-board")

    def _bind(self, arrays: Mapping[str, Array]) -> None:
        self.counts: Array = arrays["counts"]
        self.heartbeats: Array = arrays["heartbeat"]  # monotonic time of its last heartbeat
        self.alive: Array = arrays["alive"]  # when its interpreter last ran; 0: it does not show that
        self._blocked: Array = arrays["blocked"]
        self._order: Array = arrays["order"]
        self.evaluated: Array = arrays["evaluated"]  # number of the last order whose evaluation has ended
        self.begun: Array = arrays["begun"]  # 1 once the callbacks have started
        self._arrivals: Array = arrays["arrivals"]
        self.learners = len(self._arrivals)
        self._attributes: Array = arrays["attributes"]  # of all envs, as JSON
        self._lock, self._version = Seqlock(arrays["version"]), arrays["version"].data  # read at each env step

    def write(self, row: int, counts: Mapping[str, int]) -> None:
        for name, value in counts.items():
            self.counts[name][row] = value
        self.heartbeat(row)

    def heartbeat(self, row: int) -> None:
        self.heartbeats[row] = time.monotonic()

    def start(self, row: int) -> None:
        """A process is started in place of one that may have been killed at any point."""
        self._blocked[row] = self.alive[row] = 0
        self.heartbeat(row)

    def read(self, row: int) -> dict[str, int]:
        return dict(zip(COUNTS, self.counts[row].tolist(), strict=True))

    def sum(self, name: str) -> int:
        return int(self.counts[name].sum())

    @property
    def in_flight(self) -> int:
        """At the end: what the learners have found in their memory, and the actors' unfinished rollouts."""
        actors = map(self.read, range(self.learners, len(self.counts)))
        return self.sum("in_flight") + sum(row["produced"] - row["delivered"] for row in actors)

    def give(self, what: int) -> int:
        """Order all learners to save, or to save and evaluate; returns the order's number. One order at a time."""
        self._order["order"] = (self.order[0] + 1) << 4 | what  # one word: a learner that reads one reads the other
        return self.order[0]

    @property
    def order(self) -> tuple[int, int]:
        """The number of the latest order, and what it asks for."""
        return divmod(int(self._order["order"]), 16)

    def seal(self) -> None:
        """The checkpoint of the latest order is complete."""
        self._order["sealed"] = self.order[0]

    @property
    def sealed(self) -> int:
        """The number of the last order whose checkpoint is complete."""
        return int(self._order["sealed"])

    def set_attribute(self, name: str, value: Any) -> None:
        """Set an attribute of all envs. Only learner 0 does that."""
        _, before = self.attributes(0) or (0, {})
        text = json.dumps({**before, name: value}).encode().ljust(_ATTRIBUTES)
        if len(text) > _ATTRIBUTES:
            raise CoterieError(f"set_env: all attributes together exceed {_ATTRIBUTES} bytes as JSON")
        with self._lock.writing(0):
            self._attributes[:] = memoryview(text)

    def attributes(self, known: int) -> tuple[int, dict[str, Any]] | None:
        """The version of the attributes and all of them, where they are newer than version `known`."""
        if (version := self._version[0]) == known:
            return None
        text = self._lock.read(0, self._attributes.tobytes)
        return None if text is None else (version, json.loads(text))

    def continue_orders(self, before: Board) -> None:
        """Count on from the orders of `before`: no two orders of a run have the same number, or the same draft."""
        self._order["order"], self._order["sealed"] = before.order[0] << 4, before.sealed
        if before.attributes(0) is not None:  # envs that are made later have them, too
            with self._lock.writing(0):
                self._attributes[:] = before._attributes

    def meet(self, rank: int, timeout: float) -> None:
        """A barrier for all learners."""
        self._arrivals[rank] += 1
        end = awake() + timeout
        while self._arrivals.min() < self._arrivals[rank]:
            if awake() > end:
                raise CoterieError(f"another learner hangs: learner {rank} waited for {timeout:g} s")
            time.sleep(1e-4)

    @contextmanager
    def blocked(self, row: int) -> Iterator[None]:
        """Meanwhile this process waits for others, and does not count as hung."""
        self._blocked[row] = 1
        try:
            yield
        finally:
            self.heartbeat(row)  # it may have waited for long
            self._blocked[row] = 0

    def all_blocked(self, rows: Iterable[int]) -> bool:
        return all(self._blocked[row] for row in rows)

    def stale(self, silent: Mapping[int, float], limit: float) -> list[int]:
        """The rows that are silent for more than `limit` of these seconds, the longest first. A blocked process is
        among them only where no other is at work.
        """
        stale = sorted((row for row, seconds in silent.items() if seconds > limit), key=lambda row: -silent[row])
        return [row for row in stale if not self._blocked[row]] or (stale if len(stale) == len(silent) else [])

    def stop(self, resumes: bool = False) -> None:
        """Ask all learners to end their training. `resumes`: it is to go on later."""
        self._order["stop"] = 2 if resumes else 1

    @property
    def resumes(self) -> bool:
        return int(self._order["stop"]) == 2

    @property
    def stopping(self) -> bool:
        return bool(self._order["stop"])

    def close(self) -> None:
        """Ask the actors to end: nothing more will be learned."""
        self._order["closed"] = 1

    @property
    def closed(self) -> bool:
        return bool(self._order["closed"])
