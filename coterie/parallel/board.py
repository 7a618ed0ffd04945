"""The board: plain numbers in shared memory that the processes of a run tell each other.

Every number has one writer, so nothing is locked and no increment is lost, whoever dies.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from coterie.parallel.shm import SharedArrays
from coterie.types import Array

#: What each learner, and each actor, counts. `produced`: rows acted, whoever learns from them; `delivered`: those of
#: them that an actor has handed over; `dropped`: those that central acting could not make whole rollouts of; `started`:
#: rows that a learner has begun to learn from (budgets and schedules read their sum); `learned`: rows that it has.
COUNTS = (
    "produced", "delivered", "started", "learned", "masked", "learner_steps", "samples_trained",
    "policy_lag_max", "skipped", "replaced", "episodes", "dropped",
)  # fmt: skip
SAVE, EVALUATE, LAST = 1, 2, 4  # what an order asks for: a checkpoint, before it an evaluation, after it the end


class Board:
    """One row of counts for each learner, then for each actor, and the orders of whoever runs them."""

    def __init__(self, learners: int, actors: int = 0) -> None:
        self._shared = SharedArrays(
            {
                "counts": ((learners + actors, len(COUNTS)), "int64"),
                "here": ((learners,), "int64"),
                "beat": ((learners + actors,), "float64"),
                "order": ((4,), "int64"),
                "turns": ((learners,), "int64"),
                "waiting": ((learners + actors,), "int64"),
            },
            name="coterie-board",
        )
        self._bind()

    def _bind(self) -> None:
        arrays = self._shared.arrays
        self.counts: Array = arrays["counts"]
        self.here: Array = arrays["here"]  # 1 while a learner takes part
        self.beat: Array = arrays["beat"]  # monotonic time of its last sign of life
        self._waiting: Array = arrays["waiting"]
        self.turns: Array = arrays["turns"]  # turns that each learner has had, where they go one after the other
        self._order: Array = arrays["order"]  # number, what, stop, closed

    def __getstate__(self) -> dict[str, SharedArrays]:
        return {"_shared": self._shared}

    def __setstate__(self, state: dict[str, SharedArrays]) -> None:
        self._shared = state["_shared"]
        self._bind()

    def write(self, rank: int, counts: Mapping[str, int]) -> None:
        for name, value in counts.items():
            self.counts[rank, COUNTS.index(name)] = value
        self.beat[rank] = time.monotonic()

    def read(self, rank: int) -> dict[str, int]:
        return dict(zip(COUNTS, self.counts[rank].tolist(), strict=True))

    def sum(self, name: str) -> int:
        return int(self.counts[:, COUNTS.index(name)].sum())

    def give(self, what: int) -> int:
        """Order all learners to save, or to save and evaluate; returns the order's number. One order at a time."""
        self._order[1] = what
        self._order[0] += 1  # written last: who sees the number sees what it asks for
        return int(self._order[0])

    @property
    def order(self) -> tuple[int, int]:
        """Number of the latest order, and what it asks for."""
        return int(self._order[0]), int(self._order[1])

    def my_turn(self, rank: int) -> bool:
        """Learners before `rank` have had one turn more, those after it as many; who has left is passed over."""
        mine = self.turns[rank]
        ahead = self.turns > mine
        ahead[rank + 1 :] = self.turns[rank + 1 :] >= mine
        ahead[rank] = True
        return bool((ahead | (self.here == 0)).all())

    @contextmanager
    def waits(self, rank: int) -> Iterator[None]:
        """While a learner waits for others it is not the one that hangs."""
        self._waiting[rank] = 1
        try:
            yield
        finally:
            self._waiting[rank] = 0

    def all_wait(self, ranks: Iterable[int]) -> bool:
        return all(self._waiting[rank] for rank in ranks)

    def stale(self, ranks: Iterable[int], before: float) -> list[int]:
        """Those of `ranks` without a sign of life since `before`, the longest first: others may have gone on after it.
        Who merely waits for others only if all do.
        """
        all_of_them = list(ranks)
        silent = sorted((r for r in all_of_them if self.beat[r] < before), key=lambda r: float(self.beat[r]))
        return [r for r in silent if not self._waiting[r]] or (silent if len(silent) == len(all_of_them) else [])

    def stop(self) -> None:
        self._order[2] = 1

    def release(self) -> None:
        """Nobody will be started with it any more; who has it goes on reading it."""
        self._shared.close()

    def close(self) -> None:
        """Let the actors go: nobody will learn from what they do."""
        self._order[3] = 1

    @property
    def closed(self) -> bool:
        return bool(self._order[3])

    @property
    def stopping(self) -> bool:
        return bool(self._order[2])


class OwnSteps:
    """Counts a run's env steps from what one learner knows: its own rows times the number of learners."""

    def __init__(self, learners: int = 1) -> None:
        self.learners, self.own = learners, 0

    def add(self, rows: int) -> None:
        self.own += rows

    def start(self, own: int, total: int) -> None:
        self.own = own

    @property
    def total(self) -> int:
        return self.own * self.learners

    @property
    def others(self) -> int:
        return self.own * (self.learners - 1)


class BoardSteps:
    """Counts a run's env steps on the board: everybody's rows, the moment that somebody begins to learn from them."""

    def __init__(self, board: Board, rank: int) -> None:
        self._column = board.counts[:, COUNTS.index("started")]
        self._rank = rank

    def add(self, rows: int) -> None:
        self._column[self._rank] += rows

    def start(self, own: int, total: int) -> None:
        self._column[self._rank] = own

    @property
    def total(self) -> int:
        return int(self._column.sum())

    @property
    def others(self) -> int:
        return self.total - int(self._column[self._rank])


class Staleness:
    """Env steps that others began to learn from between a snapshot of the weights and the update made with it."""

    def __init__(self, steps: OwnSteps | BoardSteps) -> None:
        self.steps = steps
        self.mark = steps.others
        self.sum = self.updates = self.most = 0

    def snapshot(self) -> None:
        self.mark = self.steps.others

    def update(self) -> None:
        behind = self.steps.others - self.mark
        self.sum, self.updates, self.most = self.sum + behind, self.updates + 1, max(self.most, behind)

    def gauges(self) -> dict[str, float]:
        return {"staleness/mean": self.sum / max(1, self.updates), "staleness/max": self.most}
