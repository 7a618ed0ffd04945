"""All-reduce among machines: a ring of one learner of each, formed anew when one of them is lost or another comes.

    sum(x):    x <- the ring's sum,  or the ring is broken and x is as it was
    meet(s):   at the end of a rollout, when the ring is broken, or somebody is to come or leave: whoever is there
               forms a new ring, and all take the state s of the one that has had part in most sums

Nobody goes on without the others, and no update is made of a part of the gradients: what was left to learn of a rollout
when its ring broke is lost. torch.distributed (Gloo) carries the numbers; its groups cannot change, so each meeting
makes another. Who is in it is decided at the machine that listens (convener.py), by a store that the others connect to.
Nothing of that is encrypted or asks for a token: it is for a network that one trusts.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from coterie.exchange.rendezvous import LOOK_S, SILENT_S, STORE_S, Call, Convener, Ticket
from coterie.exchange.rendezvous_client import Address, Contact, again
from coterie.parallel.processes import location
from coterie.types import CoterieError, first_line

_FORM_S = 20.0  # for a ring's connections to be made
_POLL_S = 1.0  # between two looks, in the middle of a sum, whether somebody is lost

# Rings with a sum that nobody waits for: to delete one takes until that one's time-out.
_given_up: list[tuple[Any, Any, Tensor]] = []


class Ring:
    """A machine's place. `address`: where the first machine listens; `machines`: how many it awaits, 0 on the others.

    `kind`: what is trained, the same for all; `seed`: another one for each. `ended`: asked while others are waited for;
    once it is true, nobody is. `say`: what people should know.
    """

    def __init__(
        self, address: Address, machines: int, kind: str, seed: int, patience: float, ended: Callable[[], bool]
    ) -> None:
        self.address, self.machines, self.patience, self.ended = address, machines, patience, ended
        self.kind, self.seed = kind, seed
        self.say: Callable[[str], None] = lambda line: None
        self.sums = 0  # that all machines have had part in
        self.broken, self.alone = True, False  # alone: the run of the machine that listens is over
        self.number, self.size = 0, 1
        # The same for a learner that is started in another's place.
        self.who = f"{location()} {os.getppid()}"
        self.group: Any = None
        self.contact: Contact | None = None
        self.master: TCPStore | None = None
        self.convener: Convener | None = None

    def called(self) -> bool:
        """On the machine that listens: whether somebody waits for the next ring."""
        return self.convener is not None and bool(self.convener.waiting)

    # The sum

    def sum(self, tensor: Tensor) -> bool:
        """Whether `tensor` is the sum now; else it is as it was, and the ring is broken until the next meeting."""
        if self.alone:
            return True
        if not self.broken:
            options = dist.AllreduceOptions()
            options.timeout = timedelta(seconds=self.patience)
            self._carry_out(tensor, lambda x: self.group.allreduce([x], options))
        self.sums += not self.broken
        return not self.broken

    def _carry_out(self, tensor: Tensor, begin: Callable[[Tensor], Any]) -> None:
        """What is given up goes on by itself, perhaps: it has numbers of its own to work on."""
        work, own = None, tensor.clone()
        try:
            work = begin(own)
            reason = self._wait(work)
        except RuntimeError as error:
            reason = first_line(error)
        if not reason:
            tensor.copy_(own)
            return
        self.say(f"allreduce: the ring of {self.size} machines is broken: {reason}")
        self.broken = True
        if work is not None and not work.is_completed():
            _given_up.append((self.group, work, own))
        self.group = None  # closes its connections, so that the others know
        if self.contact is not None:
            self.contact.break_it()

    def _wait(self, work: Any) -> str:
        """Until the work is done, or there is a reason not to wait for it."""
        begin = time.monotonic()
        assert self.contact is not None
        while True:
            try:
                work.wait(timedelta(seconds=_POLL_S))
                return ""
            except RuntimeError:
                if work.is_completed():  # it failed, or was done a moment later
                    work.wait()
                    return ""
            if self.contact.broken:
                return "another machine has given it up, or gives no sign of life"
            if self.contact.silent:
                return self.contact.silent
            if self.ended() and time.monotonic() - begin > SILENT_S:
                return "this run ends, and the others are slow"

    # The meeting

    def meet(self, state: list[Tensor]) -> None:
        """Form a ring with whoever is there; `state` becomes the one's that all take."""
        _given_up[:] = [one for one in _given_up if not one[1].is_completed()]
        begin, whole = time.monotonic(), not self.broken
        at = ":".join(map(str, self.address))
        self.broken, self.group = True, None
        while not self.ended() and not self.alone:
            try:
                return self._meet(state, whole)
            except RuntimeError as error:
                reason, whole = first_line(error), False
                self.broken, self.group = True, None
                if self.contact is not None:
                    self.contact.close()
                    self.contact = None
            if time.monotonic() - begin > self.patience:
                raise CoterieError(f"allreduce: no ring with the machine at {at} for {self.patience:g} s: {reason}")
            self.say(f"allreduce: no ring with the machine at {at} yet: {reason}")
            time.sleep(_POLL_S)

    def _meet(self, state: list[Tensor], whole: bool) -> None:
        contact = self._open()
        if contact is None or contact.store is None or (call := self._call(contact, whole)) is None:
            return
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=_FORM_S)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=contact.own)]
        self.number, self.size = call.ring, call.size
        contact.enter(call.ring)
        place = PrefixStore(f"ring/{call.ring}", contact.store)
        self.group = dist.ProcessGroupGloo(place, call.place, call.size, options)
        self.broken = False
        taken = [torch.tensor([self.sums]), *(tensor.clone() for tensor in state)]
        how = dist.BroadcastOptions()
        how.rootRank, how.timeout = call.source, timedelta(seconds=self.patience)
        for tensor in taken if not call.equal else ():
            self._carry_out(tensor, lambda x: self.group.broadcast([x], how))
            if self.broken:
                raise RuntimeError("a machine was lost while the ring formed")
        self.sums = int(taken[0])  # all of it, or nothing
        for tensor, new in zip(state, taken[1:], strict=True):
            tensor.copy_(new)
        if call.place == 0:
            self.say(f"allreduce: a ring of {call.size} machines")

    def _call(self, contact: Contact, whole: bool) -> Call | None:
        """Ask for a place and wait for it; None where nobody is to be waited for any more."""
        mine = Ticket(contact.uid, contact.own, self.kind, self.seed, self.sums, self.number, whole, self.machines > 0)
        contact.ask(mine)
        end = time.monotonic() + self.patience + 2 * SILENT_S
        while (answer := contact.answer) is None:
            if contact.over:
                self.alone, self.broken, self.size = True, False, 1
                self.say("allreduce: the run of the machine that listens is over: this one goes on by itself")
            if self.alone or self.ended():
                return None
            if contact.silent:
                raise RuntimeError(contact.silent)
            if time.monotonic() > end:
                raise RuntimeError("the others are at work and do not come")
            time.sleep(LOOK_S)
        if "again" in answer:
            raise RuntimeError("this machine was out of reach")
        if "refused" in answer:
            raise CoterieError(f"allreduce.connect: {answer['refused']}")
        return Call(**answer)

    def _open(self) -> Contact | None:
        """The way to the store, which is here on the machine that listens; None where nobody is to be waited for."""
        if self.machines and self.master is None:
            self._listen()
        contact = self.contact = self.contact or Contact(self.address, self.who)
        while contact.store is None:
            if contact.silent:
                raise RuntimeError(contact.silent)
            if self.ended():
                return None
            time.sleep(LOOK_S)
        return contact

    def _listen(self) -> None:
        host, port = self.address
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            listener = socket.create_server(found[4][:2], family=found[0])  # by itself it would listen everywhere
        except OSError as error:
            raise CoterieError(f"allreduce.bind: cannot listen at {host}:{port}: {error.strerror}") from None
        timeout = timedelta(seconds=STORE_S)
        self.master = TCPStore(
            host, port, None, True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        self.convener = Convener(again(self.master), self.machines, self.kind, self.patience, lambda x: self.say(x))

    def close(self, over: bool) -> None:
        """Leave: those who are still there are told. `over`: for good."""
        self.group = None  # closes its connections
        if self.convener is not None:
            self.convener.close(over)
        if self.contact is not None:
            self.contact.close()
        self.contact = self.master = None
