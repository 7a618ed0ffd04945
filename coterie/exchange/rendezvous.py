"""The rendezvous of machines that all-reduce together: which machines form the next group (elastic.py).

Its messages are keys of a TCP store at the listening machine. Torch's rendezvous (`torch.distributed.elastic`) is not
used: it unpickles what peers write, and it is slow to notice a lost member. Three processes on loopback, 24 Nov 2026:

one is killed    torch: the others go on after 21.4 s; here they notice after 0.05 s, the new group is there at 10.2 s
one is stopped   torch: blocked for at least 19 s, and no public call reports it; here 11 s, and 0.4 s for the new group

tickets          how many requests were made            ticket/N    a machine that wants to be in the next group
call/N           the answer                            beat/UID    changes while a machine lives; LEFT: it has left
broken/GROUP     a machine of that group is lost       over        the run of the listening machine has ended
host             there once the listening machine forms groups

All values are signed (signed_store.py). An answer repeats a number of its request, so that an old one is not taken.
"""

from __future__ import annotations

import json
import math
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from coterie.errors import first_line
from coterie.exchange.lineage import Request, source_of
from coterie.exchange.signed_store import SignedStore

LEFT = "gone"
_MOST = 1000  # requests that are read at once: anyone can move their number


@dataclass(frozen=True)
class Timing:
    """Seconds."""

    heartbeat: float = 1.0  # between two heartbeats
    silent: float = 10.0  # without a heartbeat, after which a machine is lost
    store: float = 5.0  # for the store to answer
    poll: float = 1.0  # between two checks, in the middle of a sum, whether a machine is lost
    form: float = 20.0  # for a group's connections to be made
    settle: float = 0.3  # for simultaneous requests
    read_interval: float = 0.02  # between two reads of the store
    back: float = 20.0  # for the members of a group to return where the store was lost


@dataclass(frozen=True)
class Machine:
    """A machine's part of the configuration."""

    address: tuple[str, int]  # where the first machine listens
    machines: int  # that the listening one waits for; 0 on the others
    kind: str  # what is trained, the same for all
    seed: int  # different for each
    patience: float  # seconds
    timing: Timing = Timing()
    token: str = ""


@dataclass(frozen=True)
class GroupMembership:
    """The number of the group, a rank in it, and the rank of the source of the state that all take."""

    group: int
    rank: int
    size: int
    source: int


class RendezvousHost:
    """Forms groups, in a thread of the listening machine. `name`: of its client."""

    def __init__(self, store: SignedStore, machine: Machine, name: str, report: Callable[[str], None]) -> None:
        self.name = name
        self.store, self.machine, self.timing, self.report = store.clone(), machine, machine.timing, report
        self.waiting: dict[str, tuple[int, Request]] = {}  # by uid: (ticket number, request)
        self.members: dict[str, Request] = {}  # of the present group, by uid
        self.beats: dict[str, tuple[str, float]] = {}  # the last heartbeat of each, and when it was seen
        self.unread: list[tuple[int, float]] = []  # requests that are still being written
        self.group = self.read = 0
        self.checked = 0.0  # when heartbeats were checked last: a few calls of the store for each
        self.begin = self.newest = time.monotonic()
        self.warn_at = self.begin + 10.0
        self.store.set("host", "1")
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="coterie-rendezvous-host", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            while not self._closed.wait(self.timing.read_interval):
                self._poll(time.monotonic())
        except Exception as error:  # waiting machines run into their time-out, and report it
            self.report(f"allreduce: the rendezvous failed, so no new group can form: {error!r}")

    def _poll(self, now: float) -> None:
        self._read(now)
        if now - self.checked > self.timing.heartbeat / 4:
            self.checked = now
            self._drop_lost(now)
        if self.waiting and self.members.keys() <= self.waiting.keys() and now - self.newest > self.timing.settle:
            self._form(now)

    def _drop_lost(self, now: float) -> None:
        """Drop machines that have left or have no heartbeat."""
        for uid in {*self.members, *self.waiting}:
            if self._lives(uid, now):
                continue
            if (one := self.members.pop(uid, None)) is not None and uid not in self.waiting:
                self.report(f"allreduce: {one.name} {'has left' if self.beats[uid][0] == LEFT else 'is lost'}")
                self.store.set(f"broken/{self.group}", "1")
            if uid in self.waiting:  # it asks again if it was only out of reach
                number, request = self.waiting.pop(uid)
                self._answer(number, {"again": True}, request.nonce)

    def _read(self, now: float) -> None:
        last = min(self.store.add("tickets", 0), self.read + _MOST)
        self.unread += [(number, now) for number in range(self.read + 1, last + 1)]
        self.read = max(self.read, last)
        self.unread = [(number, since) for number, since in self.unread if not self._admit(number, now, now - since)]

    def _admit(self, number: int, now: float, age: float) -> bool:
        """Read a request and put it into `waiting`, or refuse it; False if it has to be read again."""
        if not self.store.check([f"ticket/{number}"]):
            if age > self.timing.store:
                self._answer(number, {"again": True}, "")
            return age > self.timing.store
        try:
            request = Request(**json.loads(self.store.get(f"ticket/{number}")))
            request = replace(request, first=request.uid.partition(" ")[2] == self.name)
        except (TypeError, ValueError, AttributeError):
            self._answer(number, {"refused": "the listening run has another version of Coterie"}, "")
            return True
        others = (*self.members.values(), *(other for _, other in self.waiting.values()))
        twin = any(other.seed == request.seed and other.uid != request.uid for other in others)
        if twin and age < 1.5 * self.timing.silent:  # perhaps it is lost
            return False
        kind, reason = self.machine.kind, ""
        if request.kind != kind:
            reason = f"the listening run trains {kind}, this run {request.kind}: give both the same settings"
        elif twin:
            reason = f"another machine has --seed {request.seed} and the same episodes: give this run another seed"
        if reason:
            self._answer(number, {"refused": reason}, request.nonce)
        else:
            self.waiting[request.uid], self.newest = (number, request), now
            self.beats[request.uid] = "", now
        self.store.delete_key(f"ticket/{number}")
        return True

    def _answer(self, number: int, content: dict[str, Any], nonce: str) -> None:
        self.store.set(f"call/{number}", json.dumps({**content, "nonce": nonce}))

    def _lives(self, uid: str, now: float) -> bool:
        before, since = self.beats[uid]
        beat = self.store.get(f"beat/{uid}").decode() if self.store.check([f"beat/{uid}"]) else before
        if beat != before:
            self.beats[uid] = beat, (since := now)
        return beat != LEFT and now - since < self.timing.silent

    def _form(self, now: float) -> None:
        chosen = sorted(self.waiting.values(), key=lambda x: x[0])
        requests = [request for _, request in chosen]
        if not any(request.first for request in requests):  # it was stopped and is back: only it can call the others
            return
        before = max(request.group for request in requests)
        if not self.group and len(chosen) < self.machine.machines:  # some may be on their way
            if now > self.warn_at:
                self.warn_at = math.inf
                self.report(f"allreduce: {len(chosen)} of {self.machine.machines} machines are here")
            if now - self.begin < (self.timing.back if before else self.machine.patience):
                return
        self.group = max(self.group, before) + 1
        source = source_of(requests)
        for rank, (number, request) in enumerate(chosen):
            self._answer(number, asdict(GroupMembership(self.group, rank, len(chosen), source)), request.nonce)
        self.members = {request.uid: request for request in requests}
        self.waiting = {}

    def close(self, over: bool) -> None:
        """`over`: the run has ended. The others get the time to read that: the store ends with this process."""
        self._closed.set()
        self._thread.join(self.timing.store)
        if not over:
            return
        end = time.monotonic() + self.timing.silent
        there = [*self.members.values(), *(request for _, request in self.waiting.values())]
        others = {one.uid for one in there if not one.first and self.beats[one.uid][0] != LEFT}
        with suppress(RuntimeError):
            self.store.set("over", "1")
            while time.monotonic() < end and any(self._lives(uid, time.monotonic()) for uid in others):
                time.sleep(self.timing.read_interval)


class RendezvousClient:
    """A machine's connection to the store, in a thread, since its calls may block for seconds: heartbeats,
    requests, and what the host answers.
    """

    def __init__(self, machine: Machine, name: str) -> None:
        self.address, self.name, self.timing, self.token = machine.address, name, machine.timing, machine.token
        self.own = self.uid = ""  # this machine's address on the way to the store, and the key of its run
        self.store: SignedStore | None = None  # for the group's connections to be made
        self.error = ""
        self.over = False  # the run of the listening machine has ended
        self.group, self.broken = 0, False  # the group that it is in, and whether a member reports it broken
        self.answer: dict[str, Any] | None = None  # to the last request
        self._request: Request | None = None
        self._number = 0
        self._answered = time.monotonic()
        self._to_break = 0
        self._wake, self._closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="coterie-rendezvous", daemon=True)
        self._thread.start()

    @property
    def silent(self) -> str:
        """Why the store will not answer any more; empty while it does."""
        if not self.error and time.monotonic() - self._answered > self.timing.silent:
            return "the listening machine does not answer"
        return self.error

    def ask(self, request: Request) -> None:
        self._nonce = secrets.token_hex(16)
        self.answer, self._number, self._request = None, 0, replace(request, nonce=self._nonce)
        self._wake.set()

    def enter(self, group: int) -> None:
        self.group, self.broken = group, False

    def report_broken(self) -> None:
        """Report to the other members that the group is broken."""
        self.broken, self._to_break = True, self.group
        self._wake.set()

    def _work(self) -> None:
        timing = self.timing
        try:
            with socket.create_connection(self.address, timeout=timing.store) as way:
                self.own = way.getsockname()[0]
            self.uid = f"{self.own} {self.name}"
            timeout = timedelta(seconds=timing.store)
            connection = TCPStore(*self.address, None, False, timeout=timeout, wait_for_workers=False)
            store = SignedStore(connection, self.token)
            store.get("host")  # waits for it, and fails where it has another token
            beat, last = 0, -timing.heartbeat
            store.set(f"beat/{self.uid}", "0")
            self.store = store.clone()
            while not self._closed.is_set():
                if time.monotonic() - last >= timing.heartbeat:
                    store.set(f"beat/{self.uid}", str(beat := beat + 1))
                    self.over = store.check(["over"])
                    if store.check([f"broken/{(group := self.group)}"]) and group == self.group:
                        self.broken = True
                    last = time.monotonic()
                if self.over:
                    break
                self.exchange(store)
                self._answered = time.monotonic()
                waits = self._number and self.answer is None
                self._wake.wait(timing.read_interval if waits else timing.heartbeat / 2)
                self._wake.clear()
            store.set(f"beat/{self.uid}", LEFT)
        except Exception as error:
            self.error = first_line(error)

    def exchange(self, store: SignedStore) -> None:
        """Send what is pending, and read the answer."""
        if self._to_break:
            store.set(f"broken/{self._to_break}", "1")
            self._to_break = 0
        if (request := self._request) is not None:
            self._request = None
            self._number = ticket = store.add("tickets", 1)
            store.set(f"ticket/{ticket}", json.dumps(asdict(request)))
        number = self._number  # which `ask` may reset meanwhile
        if number and self.answer is None and store.check([f"call/{number}"]):
            answer = json.loads(store.get(f"call/{number}"))
            if answer.pop("nonce") in (self._nonce, ""):
                self.answer = answer

    def close(self) -> None:
        """Leave, and report it."""
        self._closed.set()
        self._wake.set()
        self._thread.join(2 * self.timing.heartbeat)
