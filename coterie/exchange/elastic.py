"""All-reduce between machines, in a group of one learner of each that forms again when a machine is lost or joins.

    sum(x):    x <- the group's sum,  or the group is broken and x is unchanged
    join(s):   after a rollout, when the group is broken or a machine joins or leaves: form a new group of the machines
               that are connected; all take the state s of the listening one (lineage.py)

No machine trains without the others, and no update uses a part of the gradients: the rest of a rollout is lost when
its group breaks. torch.distributed (Gloo) carries the numbers; its groups cannot change, so each rendezvous makes
another. The listening machine decides which machines are in it (rendezvous.py). A machine must know the token to take
part, but there is no TLS, and Gloo's own connections are not authenticated, so the network must be private.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from coterie.errors import CoterieError, first_line
from coterie.exchange.lineage import Request
from coterie.exchange.rendezvous import GroupMembership, Machine, RendezvousClient, RendezvousHost
from coterie.exchange.signed_store import SignedStore
from coterie.exchange.silent_connections import SilentConnections
from coterie.parallel.clock import awake
from coterie.parallel.processes import location

T = TypeVar("T")
# Groups with a sum that was given up: deleting one blocks until the sum's time-out.
_given_up: list[tuple[Any, Any, Tensor]] = []


class MachineGroup:
    """A machine's place in the group. `ended` is called during each wait for other machines, and ends it if true.
    `report` receives lines for the log.
    """

    def __init__(self, machine: Machine, ended: Callable[[], bool]) -> None:
        self.machine, self.ended, self.timing = machine, ended, machine.timing
        self.report: Callable[[str], None] = lambda line: None
        self.sums = 0  # that all machines took part in
        self.broken, self.alone = True, False  # alone: the run of the listening machine has ended
        self.number, self.size = 0, 1
        self.name = f"{location()} {os.getppid()}"  # unchanged when a learner is restarted
        self.group: Any = None
        self.client: RendezvousClient | None = None
        self.store: TCPStore | None = None
        self.host: RendezvousHost | None = None
        self.closer: SilentConnections | None = None

    def requested(self) -> bool:
        """Whether a machine waits for the next group. Only the listening machine can tell."""
        return self.host is not None and bool(self.host.waiting)

    def sum(self, tensor: Tensor) -> bool:
        """Whether `tensor` is the sum now; else it is unchanged, and the group is broken until the next `join`."""
        if self.alone:
            return True
        if not self.broken:
            options = dist.AllreduceOptions()
            options.timeout = timedelta(seconds=self.machine.patience)
            self._carry_out(tensor, lambda x: self.group.allreduce([x], options))
        self.sums += not self.broken
        return not self.broken

    def _carry_out(self, tensor: Tensor, begin: Callable[[Tensor], Any]) -> None:
        """Do `begin` on a copy of `tensor`: abandoned work may still write to it."""
        work, copy = None, tensor.clone()
        try:
            work = begin(copy)
            reason = self._wait(work)
        except RuntimeError as error:
            reason = first_line(error)
        if not reason:
            tensor.copy_(copy)
            return
        self.report(f"allreduce: the group of {self.size} machines is broken: {reason}")
        self.broken = True
        if work is not None and not work.is_completed():
            _given_up.append((self.group, work, copy))
        self.group = None  # closes its connections, which the others notice
        if self.client is not None:
            self.client.report_broken()

    def _wait(self, work: Any) -> str:
        """Wait for the work; returns the reason to give it up, empty once it is done."""
        begin, client = awake(), self.client
        assert client is not None
        while True:
            if client.broken or (self.size == 1 and client.silent):  # alone in a group, it waits for no other machine
                return client.silent or "another machine has given it up, or has no heartbeat"
            try:
                work.wait(timedelta(seconds=self.timing.poll))
                return ""
            except RuntimeError:
                if work.is_completed():  # it failed, or was done a moment later
                    work.wait()
                    return ""
            if client.silent:
                return client.silent
            if self.ended() and awake() - begin > self.timing.silent:
                return "this run ends, and the others are slow"

    def join(self, state: list[Tensor]) -> None:
        """Form a group with the connected machines; `state` becomes the one that all take."""
        self.closer = self.closer or SilentConnections(self.timing.silent)
        _given_up[:] = [one for one in _given_up if not one[1].is_completed()]
        begin, reported = awake(), ""
        at = ":".join(map(str, self.machine.address))
        self.broken, self.group = True, None
        while not self.ended() and not self.alone:
            try:
                return self._join(state)
            except RuntimeError as error:
                reason = first_line(error)
                self.broken, self.group = True, None
                if self.client is not None:
                    self.client.close()
                    self.client = None
            if awake() - begin > (patience := self.machine.patience):
                raise CoterieError(f"allreduce: no group with the machine at {at} for {patience:g} s: {reason}")
            if reason != reported:
                self.report(f"allreduce: no group with the machine at {at} yet: {reason}")
            reported = reason
            time.sleep(self.timing.poll)

    def _join(self, state: list[Tensor]) -> None:
        if self.machine.machines and self.store is None:
            self._listen()
        client = self.client = self.client or RendezvousClient(self.machine, self.name)
        main = self._wait_for(client, lambda: client.store)
        if main is None or (member := self._membership(client)) is None:
            return
        self.number, self.size = member.group, member.size
        client.enter(member.group)
        store = PrefixStore(f"group/{member.group}", main)
        os.environ["GLOO_SOCKET_IFNAME"] = interface(client.own)  # or Gloo takes the address of the host's name
        self.group = dist.ProcessGroupGloo(store, member.rank, member.size, timedelta(seconds=self.timing.form))
        self.broken = False
        taken = [torch.tensor([self.sums]), *(tensor.clone() for tensor in state)]
        how = dist.BroadcastOptions()
        how.rootRank, how.timeout = member.source, timedelta(seconds=self.machine.patience)
        for tensor in taken:
            self._carry_out(tensor, lambda x: self.group.broadcast([x], how))
            if self.broken:
                raise RuntimeError("a machine was lost while the group formed")
        self.sums = int(taken[0])  # all of it, or nothing
        for tensor, new in zip(state, taken[1:], strict=True):
            tensor.copy_(new)
        if member.rank == 0:
            self.report(f"allreduce: a group of {member.size} machines")

    def _membership(self, client: RendezvousClient) -> GroupMembership | None:
        """Request a place and wait for it; None once this run ends or trains alone."""
        m = self.machine
        client.ask(Request(client.uid, client.own, m.kind, m.seed, self.sums, self.number))
        answer = self._wait_for(client, lambda: client.answer)
        if answer is None:
            return None
        if "again" in answer:
            raise RuntimeError("this machine was out of reach")
        if "refused" in answer:
            raise CoterieError(f"allreduce.connect: {answer['refused']}")
        return GroupMembership(**answer)

    def _wait_for(self, client: RendezvousClient, find: Callable[[], T | None]) -> T | None:
        """What `find` returns once it is not None; None once this run ends or trains alone."""
        end = awake() + self.machine.patience + 2 * self.timing.silent
        while (found := find()) is None:
            if client.over:
                self.alone, self.broken, self.size = True, False, 1
                self.report("allreduce: the run of the listening machine is over: this run continues alone")
            if self.alone or self.ended():
                return None
            if client.silent:
                raise RuntimeError(client.silent)
            if awake() > end:
                raise RuntimeError("the other machines do not join")
            time.sleep(self.timing.read_interval)
        return found

    def _listen(self) -> None:
        host, port = self.machine.address
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            listener = socket.create_server(found[4][:2], family=found[0])  # by itself it would listen everywhere
        except OSError as error:
            raise CoterieError(f"allreduce.bind: cannot listen at {host}:{port}: {error.strerror}") from None
        timeout = timedelta(seconds=self.timing.store)
        store = TCPStore(
            host, port, None, True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        signed = SignedStore(store, self.machine.token)
        self.host = RendezvousHost(signed, self.machine, self.name, lambda line: self.report(line))
        self.store = store  # now that nothing can fail any more: else the next attempt listens again

    def close(self, over: bool) -> None:
        """Leave, and report it to the others. `over`: for good."""
        self.group = None  # closes its connections
        if self.host is not None:
            self.host.close(over)
        if self.client is not None:
            self.client.close()
        if self.closer is not None:
            self.closer.close()
        self.client = self.store = self.closer = None


def interface(address: str) -> str:
    """The network interface with this address; the loopback interface if no interface has it."""
    found = psutil.net_if_addrs()
    names = [name for name, addresses in found.items() if any(a.address.split("%")[0] == address for a in addresses)]
    return next(iter(names), next((name for name in found if name.startswith("lo")), "lo"))
