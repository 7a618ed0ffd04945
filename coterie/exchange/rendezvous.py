"""Who is in the next ring (ring.py): decided where its store is, by what the machines write into that.

tickets          how many there have been              ticket/N   somebody who wants to be in the next ring
call/N           the answer: ring, place, size         beat/UID   changes while somebody lives; GONE: has left
broken/RING      one of that ring is lost              over       the run of this machine is over
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

BEAT_S = 1.0  # between two signs of life
SILENT_S = 10.0  # without one, a machine is taken for lost
STORE_S = 5.0  # for the store to answer
LOOK_S = 0.02  # between two looks at it
GONE = "gone"
_SETTLE_S = 0.3  # for others that come at the same time
_RETURN_S = 20.0  # for those who were in a ring to come back, where the store was lost
_WARN_S = 10.0


@dataclass(frozen=True)
class Ticket:
    """Somebody who wants to be in the next ring."""

    uid: str
    name: str  # for people
    kind: str  # what it trains
    seed: int  # of its envs
    sums: int  # that it has had part in
    ring: int  # the one that it was in; 0: none
    whole: bool  # which was not broken: all who were in it have the same
    first: bool  # it is this machine


@dataclass(frozen=True)
class Call:
    """The number of the ring, a place in it, and at which place is the state that all are to take."""

    ring: int
    place: int
    size: int
    source: int
    equal: bool  # all have the same already


class Convener:
    """Calls rings together, in a thread. `machines`: so many are awaited for the first one."""

    def __init__(self, store: TCPStore, machines: int, kind: str, patience: float, say: Callable[[str], None]) -> None:
        self.store, self.machines, self.kind, self.patience, self.say = store, machines, kind, patience, say
        self.waiting: dict[str, tuple[int, Ticket]] = {}  # by uid: the number of the ticket, and it
        self.at_work: dict[str, Ticket] = {}  # those in the ring, by uid
        self.beats: dict[str, tuple[str, float]] = {}
        self.unread: list[tuple[int, float]] = []  # tickets that are still being written
        self.ring = self.read = 0
        self.warned = False
        self.heard = 0.0  # when it was last looked who lives: a few calls of the store for each
        self.begin = self.came = time.monotonic()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="coterie-convener", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            while not self._closed.wait(LOOK_S):
                self._look(time.monotonic())
        except Exception as error:  # those who wait run into their time-out, and say so
            self.say(f"allreduce: no more rings: {error!r}")

    def _look(self, now: float) -> None:
        self._read(now)
        if now - self.heard > BEAT_S / 4:
            self.heard = now
            self._miss(now)
        if self.waiting and self.at_work.keys() <= self.waiting.keys() and now - self.came > _SETTLE_S:
            self._call(now)

    def _miss(self, now: float) -> None:
        """Who has left, or gives no sign of life, is not counted on."""
        for uid in {*self.at_work, *self.waiting}:
            if self._lives(uid, now):
                continue
            if (one := self.at_work.pop(uid, None)) is not None and uid not in self.waiting:
                self.say(f"allreduce: {one.name} {'has left' if self.beats[uid][0] == GONE else 'is lost'}")
                self.store.set(f"broken/{self.ring}", "1")
            if uid in self.waiting:  # where it only was out of reach, it is to ask again
                self._answer(self.waiting.pop(uid)[0], {"again": True})

    def _read(self, now: float) -> None:
        last = self.store.add("tickets", 0)
        self.unread += [(number, now) for number in range(self.read + 1, last + 1)]
        self.read = last
        for number, since in list(self.unread):
            if self.store.check([f"ticket/{number}"]):
                try:
                    ticket = Ticket(**json.loads(self.store.get(f"ticket/{number}")))
                except (TypeError, ValueError):
                    self._answer(number, {"refused": "the run there is of another version of Coterie"})
                    self.unread.remove((number, since))
                    continue
                if self._twin(ticket) and now - since < 1.5 * SILENT_S:  # who is not known to be lost yet
                    continue
                self._take(number, ticket, now)
                self.store.delete_key(f"ticket/{number}")
            elif now - since < STORE_S:
                continue
            else:
                self._answer(number, {"again": True})
            self.unread.remove((number, since))

    def _answer(self, number: int, content: dict[str, Any]) -> None:
        self.store.set(f"call/{number}", json.dumps(content))

    def _twin(self, ticket: Ticket) -> bool:
        others = (*self.at_work.values(), *(other for _, other in self.waiting.values()))
        return any(other.seed == ticket.seed and other.uid != ticket.uid for other in others)

    def _take(self, number: int, ticket: Ticket, now: float) -> None:
        reason = ""
        if ticket.kind != self.kind:
            reason = f"the run there trains {self.kind}, this one {ticket.kind}: give both the same env and model"
        elif self._twin(ticket):
            reason = f"a run with --seed {ticket.seed} is there, and would see the same episodes: give this one another"
        if reason:
            self._answer(number, {"refused": reason})
            return
        self.waiting[ticket.uid], self.came = (number, ticket), now
        self.beats[ticket.uid] = "", now

    def _lives(self, uid: str, now: float) -> bool:
        before, since = self.beats[uid]
        said = self.store.get(f"beat/{uid}").decode() if self.store.check([f"beat/{uid}"]) else before
        if said != before:
            self.beats[uid] = said, (since := now)
        return said != GONE and now - since < SILENT_S

    def _call(self, now: float) -> None:
        chosen = sorted(self.waiting.values(), key=lambda x: x[0])
        tickets = [ticket for _, ticket in chosen]
        before = max(ticket.ring for ticket in tickets)
        if not self.ring and len(chosen) < self.machines:  # of these, some may be on their way
            if not self.warned and now - self.begin > _WARN_S:
                self.warned = True
                self.say(f"allreduce: {len(chosen)} of {self.machines} machines are here")
            if now - self.begin < (_RETURN_S if before else self.patience):
                return
        self.ring = max(self.ring, before) + 1
        source = max(range(len(chosen)), key=lambda i: (tickets[i].sums, tickets[i].first))
        equal = len({(ticket.ring, ticket.sums) for ticket in tickets}) == 1 and all(t.whole for t in tickets)
        for place, (number, _) in enumerate(chosen):
            call = Call(self.ring, place, len(chosen), source, equal)
            self._answer(number, asdict(call))
        self.at_work = {ticket.uid: ticket for ticket in tickets}
        self.waiting = {}

    def close(self, over: bool) -> None:
        """`over`: the run here is; the others get the time to hear of it: the store ends with this process."""
        self._closed.set()
        self._thread.join(STORE_S)
        if not over:
            return
        end = time.monotonic() + SILENT_S
        there = [*self.at_work.values(), *(ticket for _, ticket in self.waiting.values())]
        others = {ticket.uid for ticket in there if not ticket.first and self.beats[ticket.uid][0] != GONE}
        with suppress(RuntimeError):
            self.store.set("over", "1")
            while time.monotonic() < end and any(self._lives(uid, time.monotonic()) for uid in others):
                time.sleep(LOOK_S)
