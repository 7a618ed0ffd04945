"""All-reduce among machines: a ring of one learner of each, formed anew when one of them is lost or another comes.

    sum(x):    x <- the ring's sum,  or the ring is broken and x is rubbish
    meet(s):   at the end of a rollout, when the ring is broken, or somebody is to come or leave: whoever is there
               forms a new ring, and all take the state s of the one that has had part in most sums

Nobody goes on without the others, and no update is made of a part of the gradients: what was left to learn of a rollout
when its ring broke is lost. torch.distributed (Gloo) carries the numbers; its groups cannot change, so each meeting
makes another. Who is in it is decided at the machine that listens (convener.py), by a store that the others connect to.
Nothing of that is encrypted or asks for a token: it is for a network that one trusts.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from coterie.exchange.convener import BEAT_S, GONE, LOOK_S, SILENT_S, STORE_S, Call, Convener, Ticket
from coterie.types import CoterieError

_FORM_S = 20.0  # for a ring's connections to be made
_POLL_S = 1.0  # between two looks, in the middle of a sum, whether somebody is lost

_given_up: list[Any] = []  # rings with a sum that nobody waits for: to delete one takes until that one's time-out


class Ring:
    """A machine's place. `address`: where the first machine listens; `machines`: how many it awaits, 0 on the others.

    `kind`: what is trained, the same for all; `seed`: another one for each. `ended`: asked while others are waited for;
    once it is true, nobody is.
    """

    def __init__(
        self, address: tuple[str, int], machines: int, kind: str, seed: int, patience: float, ended: Callable[[], bool]
    ) -> None:
        self.address, self.machines, self.patience, self.ended = address, machines, patience, ended
        self.kind, self.seed = kind, seed
        self.lines = deque[str](maxlen=100)
        self.sums = 0  # that all machines have had part in
        self.broken, self.alone = True, False  # alone: the run of the machine that listens is over
        self.number, self.size = 0, 1
        self.own = self.uid = ""  # this machine's address, as the others see it, and this run at it
        self.who = f"{socket.gethostname()} {os.getppid()}"  # the same for a learner that is started in another's place
        self.group: Any = None
        self.store: TCPStore | None = None
        self.convener: Convener | None = None
        self._closed = threading.Event()

    def called(self) -> bool:
        """On the machine that listens: whether somebody waits for the next ring."""
        return self.convener is not None and bool(self.convener.waiting)

    # The sum

    def sum(self, tensor: Tensor) -> bool:
        """Whether `tensor` is the sum now. If not, it is rubbish, and the ring is broken until the next meeting."""
        if self.alone:
            return True
        if not self.broken:
            options = dist.AllreduceOptions()
            options.timeout = timedelta(seconds=self.patience)
            self._carry_out(lambda: self.group.allreduce([tensor], options))
        self.sums += not self.broken
        return not self.broken

    def _carry_out(self, begin: Callable[[], Any]) -> None:
        work, reason = None, ""
        try:
            work = begin()
            reason = self._wait(work)
        except RuntimeError as error:
            reason = _line(error)
        if reason:
            self.lines.append(f"allreduce: the ring of {self.size} machines is broken: {reason}")
            self.broken = True
            if work is not None and not work.is_completed():
                _given_up.append(self.group)
            self.group = None  # closes its connections, so that the others know
            with suppress(RuntimeError):
                assert self.store is not None
                self.store.set(f"broken/{self.number}", "1")

    def _wait(self, work: Any) -> str:
        """Until the work is done, or there is a reason not to wait for it."""
        begin = time.monotonic()
        while True:
            try:
                work.wait(timedelta(seconds=_POLL_S))
                return ""
            except RuntimeError:
                if work.is_completed():
                    raise
            assert self.store is not None
            if self.store.check([f"broken/{self.number}"]):  # raises where the store is gone
                return "another machine has given it up, or gives no sign of life"
            if self.ended() and time.monotonic() - begin > SILENT_S:
                return "this run ends, and the others are slow"

    # The meeting

    def meet(self, state: list[Tensor]) -> None:
        """Form a ring with whoever is there; `state` becomes the one's that all take."""
        begin = time.monotonic()
        self.broken, self.group = True, None
        while not self.ended() and not self.alone:
            try:
                return self._meet(state)
            except (RuntimeError, OSError) as error:
                reason = _line(error)
                self.broken, self.group = True, None
                if self.convener is None:
                    self.store = None
            if time.monotonic() - begin > self.patience:
                at = ":".join(map(str, self.address))
                raise CoterieError(f"allreduce: no ring with the machine at {at} for {self.patience:g} s: {reason}")
            time.sleep(_POLL_S)

    def _meet(self, state: list[Tensor]) -> None:
        store = self.store = self.store or self._open()
        if (call := self._call(store)) is None:
            return
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=_FORM_S)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self.own)]
        self.number, self.size = call.ring, call.size
        self.group = dist.ProcessGroupGloo(PrefixStore(f"ring/{call.ring}", store), call.place, call.size, options)
        self.broken = False
        sums = torch.tensor([self.sums])
        how = dist.BroadcastOptions()
        how.rootRank, how.timeout = call.source, timedelta(seconds=self.patience)
        for tensor in (sums, *state) if not call.equal else ():
            self._carry_out(lambda tensor=tensor: self.group.broadcast([tensor], how))  # type: ignore[misc]
            if self.broken:
                raise RuntimeError("a machine was lost while the ring formed")
        self.sums = int(sums)
        if call.place == 0:
            self.lines.append(f"allreduce: a ring of {call.size} machines")

    def _call(self, store: TCPStore) -> Call | None:
        """Ask for a place and wait for it; None where nobody is to be waited for any more."""
        mine = Ticket(self.uid, self.own, self.kind, self.seed, self.sums, self.number, bool(self.machines))
        number = store.add("tickets", 1)
        store.set(f"ticket/{number}", json.dumps(asdict(mine)))
        end = time.monotonic() + self.patience
        while not store.check([f"call/{number}"]):
            if time.monotonic() > end:
                raise RuntimeError("the others are at work and do not come")
            if store.check(["over"]):
                store.set(f"beat/{self.uid}", GONE)
                self.alone, self.broken, self.size = True, False, 1
                self.lines.append("allreduce: the run of the machine that listens is over: this one goes on by itself")
            if self.alone or self.ended():
                return None
            time.sleep(LOOK_S)
        answer = json.loads(store.get(f"call/{number}"))
        if "refused" in answer:
            raise CoterieError(f"allreduce.connect: {answer['refused']}")
        return Call(**answer)

    def _open(self) -> TCPStore:
        """The store, served here or there, and signs of life in it."""
        host, port = self.address
        how: dict[str, Any] = {"wait_for_workers": False, "timeout": timedelta(seconds=STORE_S)}
        if self.machines:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            try:
                listener = socket.create_server((host, port), family=family)  # by itself it would listen everywhere
            except OSError as error:
                raise CoterieError(f"allreduce.bind: cannot listen at {host}:{port}: {error.strerror}") from None
            self.own = host
            store = TCPStore(host, port, None, True, master_listen_fd=listener.detach(), **how)
        else:
            with socket.create_connection((host, port), timeout=STORE_S) as way:
                self.own = way.getsockname()[0]
            store = TCPStore(host, port, None, False, **how)
        self.uid = f"{self.own} {self.who}"
        store.set(f"beat/{self.uid}", "0")
        if self.machines:
            self.convener = Convener(_again(store), self.machines, self.kind, self.patience, self.lines.append)
        threading.Thread(target=self._beat, args=(_again(store),), name="coterie-beat", daemon=True).start()
        return store

    def _beat(self, store: TCPStore) -> None:
        count = 0
        with suppress(RuntimeError):  # where the store is gone, as whoever uses it notices
            while not self._closed.wait(BEAT_S):
                store.set(f"beat/{self.uid}", str(count := count + 1))

    def close(self, over: bool) -> None:
        """Leave: those who are still there are told. `over`: for good."""
        self._closed.set()
        self.group = None  # closes its connections
        if self.store is not None:
            with suppress(RuntimeError):
                self.store.set(f"beat/{self.uid}", GONE)
        if self.convener is not None:
            self.convener.close(over)
        self.store = None


def _again(store: TCPStore) -> TCPStore:
    """A connection of its own: one that is used by two threads makes each wait for the other."""
    return store.clone()  # type: ignore[attr-defined,no-any-return]


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [repr(error)])[0][:200]
