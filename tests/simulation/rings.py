"""Machines that all-reduce together: the real groups and the real rendezvous, over a store and sums that are made up.
Machines are killed, hang and are cut off; threads of theirs have turns of a scheduler.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule
from torch import Tensor

from coterie.exchange import elastic, rendezvous
from coterie.exchange.elastic import MachineGroup
from coterie.exchange.rendezvous import Machine as Settings
from coterie.exchange.rendezvous import RendezvousHost, Timing
from coterie.exchange.signed_store import SignedStore
from tests.simulation.scheduler import Scheduler, Simulation
from tests.simulation.threads import threads
from tests.simulation.wire import Peer

MACHINES = 3
TIMING = Timing(read_interval=0.2, poll=0.5)
PATIENCE_S = 400.0  # no machine hangs for as long
END_S = 300.0  # within which all train together that nothing disturbs any more


class Network:
    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.machines: list[Machine] = []
        self.server: dict[str, bytes] | None = None  # the store, while the listening machine lives
        self.servers = 0
        self.rings: dict[tuple[int, str], dict[int, Ring]] = {}  # by store and group: the members by rank
        self.fragile = True  # whether a sum fails for the others, too, where a machine is lost at its end
        self.states: dict[tuple[int, int, int], float] = {}  # weights, by store, group and number of sums

    @property
    def here(self) -> Machine:
        return next(m for m in self.machines if self.scheduler.running in m.processes)


class Store:
    """A machine's connection to the store."""

    def __init__(self, network: Network, machine: Machine) -> None:
        self.network, self.machine, self.server = network, machine, network.server

    def _data(self) -> dict[str, bytes]:
        self.network.scheduler.pause()
        if self.server is None or self.server is not self.network.server:
            raise RuntimeError("connection reset by peer")
        end = self.network.scheduler.now + TIMING.store
        while self.machine.cut_off or self.network.machines[0].main.frozen:
            if self.network.scheduler.now > end:
                raise RuntimeError("the store does not answer")
            self.network.scheduler.pause(0.2)
        return self._data() if self.server is not self.network.server else self.server

    def clone(self) -> Store:
        return self

    def set(self, key: str, value: bytes) -> None:
        self._data()[key] = value

    def get(self, key: str) -> bytes:
        if key not in (data := self._data()):
            raise RuntimeError(f"no key {key}")
        return data[key]

    def add(self, key: str, number: int) -> int:
        data = self._data()
        data[key] = str(int(data.get(key, b"0")) + number).encode()
        return int(data[key])

    def check(self, keys: list[str]) -> bool:
        data = self._data()
        return all(key in data for key in keys)

    def delete_key(self, key: str) -> None:
        self._data().pop(key, None)


class Ring:
    """Stands for a group of torch.distributed: a machine's part of it."""

    def __init__(self, store: tuple[str, Store], rank: int, size: int, timeout: timedelta) -> None:
        name, connection = store
        self.network, self.machine, self.rank, self.size = connection.network, connection.machine, rank, size
        self.given: list[Tensor] = []
        self.members = self.network.rings.setdefault((self.network.servers, name), {})
        self.members[rank] = self
        self.whole = self.entered = False
        end = self.network.scheduler.now + timeout.total_seconds()
        while len(self.members) < size:
            if self.network.scheduler.now > end:
                raise RuntimeError("a machine did not connect")
            self.network.scheduler.pause(0.2)
        self.whole = True

    @property
    def left(self) -> bool:
        """Whether its connections are closed."""
        return not self.machine.alive or (self.whole and self.entered and self.machine.group.group is not self)

    def allreduce(self, tensors: list[Tensor], how: Any) -> Work:
        return Work(self, tensors[0], lambda given: torch.stack(given).sum(0))

    def broadcast(self, tensors: list[Tensor], how: Any) -> Work:
        return Work(self, tensors[0], lambda given: given[how.rootRank])


class Work:
    def __init__(self, ring: Ring, tensor: Tensor, combine: Callable[[list[Tensor]], Tensor]) -> None:
        self.ring, self.tensor, self.combine = ring, tensor, combine
        ring.entered = True
        self.number = len(ring.given)
        ring.given.append(tensor.clone())
        self.completed = False
        ring.network.scheduler.pause()

    def _look(self) -> str | None:
        """Empty once it is done; the reason for which it failed; None while it goes on."""
        ring, members = self.ring, list(self.ring.members.values())
        given = [member.given[self.number] for member in members if len(member.given) > self.number]
        lost = any(member.left for member in members)
        if len(given) == ring.size and not (lost and ring.network.fragile):
            self.tensor.copy_(self.combine([ring.members[rank].given[self.number] for rank in range(ring.size)]))
            return ""
        return "connection closed by peer" if lost else None

    def wait(self, timeout: timedelta = timedelta(seconds=1)) -> None:
        end = self.ring.network.scheduler.now + timeout.total_seconds()
        while not self.completed and (reason := self._look()) is None:
            if self.ring.network.scheduler.now >= end:
                raise RuntimeError("timed out")
            self.ring.network.scheduler.pause(0.2)
        if not self.completed:
            self.completed, self.reason = True, reason
        if self.reason:
            raise RuntimeError(self.reason)

    def is_completed(self) -> bool:
        return self.completed


class Machine(Peer):
    """Adds the sum of all machines' numbers to its weights, again and again."""

    def __init__(self, network: Network, number: int) -> None:
        super().__init__(network.scheduler, str(number))
        self.network, self.number = network, number
        self.cut_off = False
        self.weights = torch.full((1,), float(number))
        self.made = 0
        network.machines[number : number + 1] = [self]
        self.main = self.start("main", self._work)

    def _work(self) -> None:
        kind = MACHINES if self.number == 0 else 0
        settings = Settings(("127.0.0.1", 1), kind, "it", self.number, PATIENCE_S, TIMING, "a token")
        self.group = group = MachineGroup(settings, lambda: False)
        group.name = self.name
        while True:
            before = group.sums
            group.join([self.weights])
            if self.network.servers == 1:  # the listening machine, whose weights all take, is at most one sum behind
                back = f"machine {self.number} goes back from {before} sums to {group.sums}"
                assert group.sums >= before - 1, back
            self.check()
            while not group.broken:
                self.network.scheduler.pause(0.5)
                message = torch.tensor([float(self.number + 1), 1.0, float(group.requested())])
                if group.sum(message):
                    assert message[1] == group.size, f"{message[1]:g} machines in a sum of {group.size}"
                    self.weights += message[0]
                    self.made += 1
                    self.check()
                    if message[2] > 0:
                        break

    def check(self) -> None:
        """Machines of one group that took part in as many sums have the same weights."""
        key = self.network.servers, self.group.number, self.group.sums
        value = float(self.weights)
        assert self.network.states.setdefault(key, value) == value, f"machine {self.number} has other weights at {key}"


class Rings(Simulation):
    def begin(self) -> None:
        self.network = network = Network(self.scheduler)
        scheduler, put = self.scheduler, self.patch.setattr

        @contextlib.contextmanager
        def connect(address: tuple[str, int], timeout: float) -> Iterator[Any]:
            scheduler.pause()
            if network.server is None or network.here.cut_off:
                raise OSError("connection refused")
            yield SimpleNamespace(getsockname=lambda: ("host", 1))

        def listen(group: MachineGroup) -> None:
            network.server, network.servers = {}, network.servers + 1
            group.store = Store(network, network.here)  # type: ignore[assignment]
            group.host = RendezvousHost(
                SignedStore(group.store, group.machine.token), group.machine, group.name, group.report
            )

        put(rendezvous, "threading", threads(scheduler, lambda name, work: network.here.start(name, work)))
        put(rendezvous, "socket", SimpleNamespace(create_connection=connect))
        put(rendezvous, "TCPStore", lambda *address, **how: Store(network, network.here))
        put(elastic, "PrefixStore", lambda prefix, store: (prefix, store.store))
        put(elastic, "interface", lambda address: "lo")
        put(elastic, "SilentConnections", lambda seconds: SimpleNamespace(close=lambda: None))
        put(elastic.dist, "ProcessGroupGloo", Ring)
        put(MachineGroup, "_listen", listen)
        for number in range(MACHINES):
            Machine(network, number)

    @rule(who=st.integers(0, MACHINES - 1))
    def kill(self, who: int) -> None:
        self.network.machines[who].kill()
        if who == 0:
            self.network.server = None

    @rule(who=st.integers(0, MACHINES - 1))
    def restart(self, who: int) -> None:
        if not self.network.machines[who].alive:
            Machine(self.network, who)

    @rule(who=st.integers(0, MACHINES - 1), hangs=st.booleans(), seconds=st.sampled_from([0.0, 4.0, 11.0]))
    def hang(self, who: int, hangs: bool, seconds: float) -> None:
        self.network.machines[who].freeze(hangs)
        self.scheduler.wait(seconds)

    @rule(who=st.integers(1, MACHINES - 1), off=st.booleans(), seconds=st.sampled_from([0.0, 4.0, 11.0]))
    def cut_off(self, who: int, off: bool, seconds: float) -> None:
        """From the listening machine."""
        self.network.machines[who].cut_off = off
        self.scheduler.wait(seconds)

    @rule(name=st.sampled_from(["over", "broken/", "call/", "ticket/", "beat/"]), which=st.integers(1, 9))
    def forge(self, name: str, which: int) -> None:
        """A process without the token writes what it has read elsewhere, and moves the number of requests."""
        if data := self.network.server:
            key = f"{name}{which}" if "/" in name else name
            value = list(data.values())[which % len(data)]
            data.setdefault(key, value if len(value) > 32 else b"1")
            data["tickets"] = str(int(data.get("tickets", b"0")) + which % 3).encode()

    @rule(fragile=st.booleans())
    def end_of_a_sum(self, fragile: bool) -> None:
        self.network.fragile = fragile

    @invariant()
    def nothing_fails(self) -> None:
        for process in self.scheduler.processes:
            if process.error is not None:
                raise AssertionError(f"{process.name}: {process.error}") from process.error

    def finish(self) -> None:
        """All train together in the end, with the same weights."""
        for who, machine in enumerate(self.network.machines):
            machine.cut_off = False
            machine.freeze(False)
            self.restart(who)
        begin = [(machine, machine.made) for machine in self.network.machines]

        def together() -> bool:
            self.nothing_fails()
            return all(m.made > made + 3 and m.group.size == MACHINES and not m.group.broken for m, made in begin)

        assert self.scheduler.wait(END_S, together), "they do not train together: " + "; ".join(
            f"{m.number}: group {m.group.number} of {m.group.size}, {m.group.sums} sums" for m, _ in begin
        )
