"""Learners of other machines, in the memory where a run's own leave their messages (exchange/gossip.py).

Every run has a place in it for every learner. A `Mirror` at each end of a link tells the other end what has changed in
the places that it answers for, and writes down what it is told: to the exchange everybody is here. Nobody waits for a
link: what was overtaken by newer messages is not sent.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from coterie.exchange.gossip import LEAD
from coterie.parallel.shm import SharedArrays, fence
from coterie.types import Array
from coterie.wire.codec import Layout, Refused, Tensor

_STATE = ("here", "told", "mixed", "joined")
_MOST = 1e15  # of a weight: its square is still a float32


def news_layout(seats: int, weights: int, moments: int) -> Layout:
    """How far each learner is, and at most one message."""
    return Layout(
        [
            Tensor("state", "int64", (seats, len(_STATE))),
            Tensor("speaks", "bool", (1,)),
            Tensor("seat", "int64", (1,)),
            Tensor("message", "float32", (0, weights), "speaks"),
            Tensor("moments", "float64", (0, moments), "speaks"),
        ]
    )


class Mirror:
    """One end of a link. It answers for the seats `own`, the other end for `theirs`. The other end's numbers are
    `shift` above the memory's, and the first that concern both ends is `start` (in the memory's numbers). Who is there
    and has not moved for `silence` seconds is not waited for until it does.
    """

    def __init__(
        self, memory: SharedArrays, own: Sequence[int], theirs: Sequence[int], start: int, shift: int = 0,
        silence: float = float("inf"),
    ) -> None:  # fmt: skip
        self.a, self.own, self.theirs, self.start, self.shift = memory.arrays, list(own), list(theirs), start, shift
        self.silence = silence
        self.sent: Array | None = None  # the last state that went
        self.spoken = dict.fromkeys(self.own, 0)  # number of messages of which the last has been sent
        self.seen: Array | None = None  # the last state that came
        self.moved = dict.fromkeys(self.theirs, time.monotonic())

    def news(self) -> dict[str, Array] | None:
        """What the other end does not know yet; None: nothing."""
        a = self.a
        state = np.zeros((len(a["told"]), len(_STATE)), np.int64)
        for k, name in enumerate(_STATE):
            state[self.own, k] = a[name][self.own]
        fence()
        said = self._new(state)
        message, moments = a["message"][:0], a["moments"][:0]
        if said >= 0:
            number = int(a["begun"][said])
            message, moments = a["message"][said : said + 1].copy(), a["moments"][said : said + 1].copy()
            fence()
            if number != a["told"][said] or number != a["begun"][said]:  # it is being overwritten: next time
                said, message, moments = -1, message[:0], moments[:0]
            else:
                self.spoken[said] = number
        for j in self.own:  # nobody may be told of a message that has not come
            state[j, 1] = max(self.spoken[j], state[j, 3])
        state[self.own, 3] = np.maximum(state[self.own, 3], self.start)
        state[self.own, 1:] = np.maximum(state[self.own, 1:] + self.shift, 0)
        if self.sent is not None:
            state[:, 1:] = np.maximum(state[:, 1:], self.sent[:, 1:])  # of one who came to the seat of another
            if said < 0 and (state == self.sent).all():
                return None
        self.sent = state
        seat = np.array([said])
        return {"state": state, "speaks": seat >= 0, "seat": seat, "message": message, "moments": moments}

    def _new(self, state: Array) -> int:
        """Who has said what the other end should hear; -1: nobody."""
        wanted = self.a["here"][self.theirs].any()  # who is not there yet needs one message of each, to begin with
        for j in self.own:
            number, first = int(state[j, 1]), int(state[j, 3])
            before = 0 if self.sent is None else int(self.sent[j, 1])
            new = number > max(first, self.spoken[j]) and number + self.shift > before
            whole = int(self.a["begun"][j]) == number  # else it is being written: others are not to wait for that
            if new and whole and (wanted or not self.spoken[j]):
                return j
        return -1

    def look(self) -> None:
        """Nobody waits any longer for those who have not moved for so long."""
        late = time.monotonic() - self.silence
        for j in self.theirs:
            if self.moved[j] < late:
                self.a["here"][j] = 0

    def take(self, arrays: dict[str, Array]) -> None:
        """Write down what the other end says. Raises `Refused` where that cannot be."""
        a, state = self.a, arrays["state"]
        said = int(arrays["seat"][0]) if arrays["speaks"][0] else -1
        self._check(state, said, arrays)
        for j in self.theirs:
            if moves := self.seen is None or bool((state[j] != self.seen[j]).any()):
                self.moved[j] = time.monotonic()
            here, told, mixed, joined = (int(x) for x in state[j])
            number = max(told - self.shift, 0)
            if j == said or a["begun"][j]:  # who has never said anything has begun nothing
                a["begun"][j] = number
            if j == said:
                fence()
                a["message"][j], a["moments"][j] = arrays["message"][0], arrays["moments"][0]
                fence()
            a["joined"][j] = max(joined - self.shift, self.start)
            a["told"][j] = number
            a["mixed"][j] = max(mixed - self.shift, 0)
            fence()
            if moves:
                a["here"][j] = here
        self.seen = state.copy()

    def _check(self, state: Array, said: int, arrays: dict[str, Array]) -> None:
        others = np.ones(len(state), bool)
        others[self.theirs] = False
        if state[others].any() or (arrays["speaks"][0] and said not in self.theirs):
            raise Refused("it speaks for learners that are not its own")
        for name in ("message", "moments"):
            if not (np.abs(arrays[name]) < _MOST).all():  # nor a NaN
                raise Refused(f"its {name} are not finite")
        before = np.zeros_like(state) if self.seen is None else self.seen
        most = max(self.start, *(int(self.a[k][self.own].max()) for k in ("told", "mixed"))) + self.shift + LEAD
        for j in self.theirs:
            here, told, mixed, joined = (int(x) for x in state[j])
            if here not in (0, 1) or not all(0 <= x <= most for x in (told, mixed, joined)):
                raise Refused("its numbers of messages cannot be")
            if (state[j, 1:] < before[j, 1:]).any():
                raise Refused("its numbers of messages go back")
            if told > max(before[j, 1], joined) and j != said:
                raise Refused("it tells of a message that has not come")
            if j == said and told == before[j, 1]:
                raise Refused("its message has come before")

    def part(self) -> None:
        """The link is gone, and so are those at its other end; what they said stays."""
        self.a["here"][self.theirs] = 0
