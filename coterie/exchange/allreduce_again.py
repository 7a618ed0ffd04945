"""Synchronous learners along flight records: in threads of one process, with the sums that their processes computed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch import Tensor
from torch._C._distributed_c10d import HashStore, ProcessGroupGloo  # torch.distributed has them under no other name

from coterie.exchange.allreduce import AllReduce
from coterie.exchange.base import Setup
from coterie.flight.life import Life, RecordEnds

_PATIENCE = timedelta(minutes=30)  # for a learner whose envs are slow
_ALONE = "no further: the replay of another learner ended before this sum"


class Meeting:
    """Where the learners of a replay meet."""

    def __init__(self, lives: Sequence[Life]) -> None:
        self.store, self.lives = HashStore(), len(lives)
        self.before = dict[int, Callable[[], None]]()  # by learner: called before each sum, which may fail
        self._here, self.ended, self._changed = set[int](), set[int](), threading.Condition()

    def come(self, learner: int, learners: int) -> bool:
        """Wait for the others; returns whether all have come. One that was killed early does not."""
        with self._changed:
            self._here.add(learner)
            self._changed.notify_all()
            self._changed.wait_for(lambda: len(self._here) == learners or self.ended or self.lives < learners)
            return len(self._here) == learners

    def end(self, learner: int) -> None:
        """The others find their connections closed."""
        with self._changed:
            self.ended.add(learner)
            self._changed.notify_all()


class AllReduceAgain(AllReduce):
    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.meeting: Meeting = setup.peers.replayed
        self.group: ProcessGroupGloo | None = None

    def __enter__(self) -> AllReduce:
        if self.meeting.come(self.rank, self.learners):
            # The same library with the same algorithm adds up in the same order.
            self.group = ProcessGroupGloo(self.meeting.store, self.rank, self.learners, _PATIENCE)
        return self

    def __exit__(self, *error: object) -> None:
        self.meeting.end(self.rank)
        self.group = None

    def _sum(self, tensor: Tensor) -> None:
        self.meeting.before[self.rank]()
        if self.group is None:
            raise RecordEnds(_ALONE)
        try:
            self.group.allreduce([tensor]).wait()  # type: ignore[attr-defined]
        except RuntimeError:
            if not self.meeting.ended:
                raise
            raise RecordEnds(_ALONE) from None
