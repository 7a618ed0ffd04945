"""The env steps of a run on the board, and how many of them passed between a snapshot and its update."""

from __future__ import annotations

from coterie.exchange.base import OwnSteps
from coterie.parallel.board import COUNTS, Board


class BoardSteps:
    """A run's env steps on the board: the rows that any learner has begun to learn from."""

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
    """Env steps that other learners began between a snapshot of the weights and the update made with it."""

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
