"""Synchronous learners along flight records: in threads of one process, with the sums that their processes computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta

from torch import Tensor
from torch._C._distributed_c10d import HashStore, ProcessGroupGloo  # torch.distributed has them under no other name

from coterie.exchange.allreduce import AllReduce
from coterie.exchange.base import Setup
from coterie.flight.life import Life, RecordEnds

_PATIENCE = timedelta(minutes=30)  # for a learner whose envs are slow


class Meeting:
    """Where the learners of a replay meet."""

    def __init__(self, lives: Sequence[Life]) -> None:
        self.store, self.learners = HashStore(), len(lives)
        self.before = dict[int, Callable[[], None]]()  # by learner: called before it sums, which fails without a peer

    def end(self, learner: int) -> None:
        """The others find their connections closed."""


class AllReduceAgain(AllReduce):
    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.meeting: Meeting = setup.peers.replayed
        self.group: ProcessGroupGloo | None = None

    def __enter__(self) -> AllReduce:
        if self.meeting.learners == self.learners:  # else another one was killed before its record began
            # The same library with the same algorithm adds up in the same order.
            self.group = ProcessGroupGloo(self.meeting.store, self.rank, self.learners, _PATIENCE)
        return self

    def __exit__(self, *error: object) -> None:
        self.group = None

    def _sum(self, tensor: Tensor) -> None:
        self.meeting.before[self.rank]()
        with suppress(RuntimeError):
            if self.group is not None:
                self.group.allreduce([tensor]).wait()  # type: ignore[attr-defined]
                return
        raise RecordEnds("the record of another learner breaks off there")
