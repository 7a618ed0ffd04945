"""Gossip along flight records: the learners of a run, in threads of one process, average the messages that they did."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Sequence
from typing import cast

from torch import Tensor

from coterie.exchange.base import Setup
from coterie.exchange.gossip import Gossip
from coterie.flight.life import Life
from coterie.parallel.params import FlatParams
from coterie.types import CoterieError

_WAIT_S = 1.0  # between two looks at whether another thread has ended


class Messages:
    """Messages by sender and number, kept until all that averaged them have done so again."""

    def __init__(self, lives: Sequence[Life]) -> None:
        self.uses = Counter[tuple[int, int]]()
        for life in lives:
            self.uses.update((j, taken[0]) for _, taken in life.of("mix") if taken for j in taken[1])
            self.uses.update((j, number) for j, number in life.of("took"))
        self.kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.changed = threading.Condition()
        self.left = len({life.header["learner"] for life in lives})  # learners that still act

    def put(self, sender: int, number: int, weights: Tensor, moments: Tensor) -> None:
        if self.uses[sender, number]:
            with self.changed:
                self.kept[sender, number] = weights.cpu().clone(), moments
                self.changed.notify_all()

    def take(self, sender: int, number: int) -> tuple[Tensor, Tensor]:
        """Wait for a message."""
        with self.changed:
            while (sender, number) not in self.kept:
                if self.left == 1:
                    raise CoterieError(f"message {number} of learner {sender} is missing: all other replays have ended")
                self.changed.wait(_WAIT_S)
            self.uses[sender, number] -= 1
            return self.kept[sender, number] if self.uses[sender, number] else self.kept.pop((sender, number))

    def end(self) -> None:
        """A learner's replay has ended."""
        with self.changed:
            self.left -= 1
            self.changed.notify_all()


class GossipAgain(Gossip):
    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        life = cast(Life, setup.peers.life)
        self.messages: Messages = setup.peers.replayed
        self.mixes, self.took = deque(life.of("mix")), life.of("took")
        self.totals, self.begun = [event[1] for event in life.of("rollout")], 0
        self.number = 0  # of the next message

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

    def mix(self, params: FlatParams) -> None:
        """What the learner did; past the end of its record, publish: it may have been killed just after that."""
        sent, taken = self.mixes.popleft() if self.mixes else ([self.number], None)
        for self.number in sent:
            self.messages.put(self.rank, self.number, params.data, self.moments.read())
            self.number += 1
        if taken:
            number, peers = taken
            self._mix_in(number, peers, lambda j: self.messages.take(j, number))
