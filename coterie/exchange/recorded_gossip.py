"""Gossip along flight records: the learners of a run, in threads of one process, average the messages that they did."""

from __future__ import annotations

import math
import threading
from collections import Counter, deque
from collections.abc import Sequence
from typing import cast

from torch import Tensor

from coterie.exchange.base import Setup
from coterie.exchange.gossip import Gossip
from coterie.flight.life import RecordedLife, RecordEnds
from coterie.parallel.params import FlatParams

_WAIT_S = 1.0  # between checks whether another thread has ended


class Messages:
    """Messages by sender and number, kept until all that averaged them have done so again."""

    def __init__(self, lives: Sequence[RecordedLife]) -> None:
        self.uses, self.sent = Counter[tuple[int, float]](), set[tuple[int, int]]()
        for life in lives:
            numbers = [number for sent, _ in life.of("mix") for number in sent]
            numbers += [number for (number,) in life.of("joined")]  # killed in its first mix, it has no record of that
            self.sent.update((life.header["learner"], number) for number in numbers)
            self.uses.update((j, taken[0]) for _, taken in life.of("mix") if taken for j in taken[1])
            self.uses.update((j, number) for j, number in life.of("took"))
        self.kept: dict[tuple[int, float], tuple[Tensor, Tensor]] = {}
        self.changed = threading.Condition()
        self.over: dict[int, float] = {}  # by sender: earlier messages than this one will not come any more

    def put(self, sender: int, number: float, weights: Tensor, moments: Tensor) -> None:
        if self.uses[sender, number]:
            with self.changed:
                self.kept[sender, number] = weights.cpu().clone(), moments
                self.changed.notify_all()

    def take(self, sender: int, number: int) -> tuple[Tensor, Tensor]:
        """Wait for a message. Raises `RecordEnds` where its sender's replay has ended, or went on, without it."""
        with self.changed:
            while (sender, number) not in self.kept:
                if self.over.get(sender, 0) > number:
                    raise RecordEnds(f"no further: the replay of learner {sender} ended before its message {number}")
                self.changed.wait(_WAIT_S)
            self.uses[sender, number] -= 1
            return self.kept[sender, number] if self.uses[sender, number] else self.kept.pop((sender, number))

    def end(self, learner: int, number: float = math.inf) -> None:
        """A learner's life has ended before this message, which will not come then, or its replay for good."""
        with self.changed:
            later = (k for j, k in self.sent if j == learner and k > number)
            self.over[learner] = max(self.over.get(learner, 0), min(later, default=math.inf))
            self.changed.notify_all()


class RecordedGossip(Gossip):
    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        life = cast(RecordedLife, setup.peers.recorded_life)
        self.messages: Messages = setup.peers.shared_in_replay
        self.mixes, self.took = deque(life.of("mix")), life.of("took")
        self.totals, self.begun = [event[1] for event in life.of("rollout")], 0
        self.recorded = [number + 1 for sent, _ in self.mixes for number in sent]
        began = [number for (number,) in life.of("joined")] or ([-math.inf] if self.took else [0])
        self.number: float = began[0]  # of the next message

    @property
    def env_steps(self) -> int:
        """The run's, as this learner saw them."""
        total: int = self.totals[min(self.begun, len(self.totals) - 1)]
        return total

    def count(self, rows: int) -> None:
        super().count(rows)
        self.begun += 1

    def __enter__(self) -> Gossip:
        for sender, number in self.took:
            weights, moments = self.messages.take(sender, number)
            self.params.data.copy_(weights)
            self.moments.write(moments)
        return self

    def __exit__(self, *error: object) -> None:
        self.messages.end(self.rank, max([self.number, *self.recorded]))

    def mix(self, params: FlatParams) -> None:
        """What the learner did; past the end of its record, publish: it may have been killed just after that."""
        sent, taken = self.mixes.popleft() if self.mixes else ([self.number], None)
        for self.number in sent:
            self.messages.put(self.rank, self.number, params.data, self.moments.read())
            self.number += 1
        if taken:
            number, peers = taken
            self._mix_in(number, peers, lambda j: self.messages.take(j, number))
