"""Synchronous learners along flight records: in threads of one process, with the sums that their processes computed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from torch import Tensor

from coterie.exchange.allreduce import AllReduce
from coterie.exchange.base import Setup
from coterie.exchange.shared_sum import added_up
from coterie.flight.life import RecordedLife, RecordEnds

_ALONE = "no further: the replay of another learner ended before this sum"


class Meeting:
    """Where the learners of a replay meet."""

    def __init__(self, lives: Sequence[RecordedLife]) -> None:
        self.lives = len(lives)
        self.before = dict[int, Callable[[], None]]()  # by learner: called before each sum, which may fail
        self._here, self._ended, self._changed = set[int](), set[int](), threading.Condition()
        self._given: dict[int, Tensor] = {}
        self._sum: Tensor | None = None  # the last one
        self._sums = 0

    def come(self, learner: int, learners: int) -> None:
        """Wait for the others."""
        with self._changed:
            self._here.add(learner)
            self._changed.notify_all()
            self._changed.wait_for(lambda: len(self._here) == learners or self._ended or self.lives < learners)

    def add_up(self, learner: int, learners: int, tensor: Tensor) -> bool:
        """`tensor` becomes the sum; False if another learner gives none: one was killed early, or has ended."""
        with self._changed:
            number = self._sums
            self._given[learner] = tensor
            if len(self._given) == learners:
                self._sum = added_up([self._given[rank] for rank in range(learners)])
                self._given, self._sums = {}, number + 1
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._sums > number or self._ended or self.lives < learners)
            if self._sums == number:
                return False
            assert self._sum is not None
            tensor.copy_(self._sum)
            return True

    def end(self, learner: int) -> None:
        """It gives no more."""
        with self._changed:
            self._ended.add(learner)
            self._changed.notify_all()


class RecordedAllReduce(AllReduce):
    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.meeting: Meeting = setup.peers.shared_in_replay

    def __enter__(self) -> AllReduce:
        self.meeting.come(self.rank, self.learners)
        return self

    def __exit__(self, *error: object) -> None:
        self.meeting.end(self.rank)

    def add_up(self, tensor: Tensor) -> None:
        self.meeting.before[self.rank]()
        if self.learners > 1 and not self.meeting.add_up(self.rank, self.learners, tensor):
            raise RecordEnds(_ALONE)
