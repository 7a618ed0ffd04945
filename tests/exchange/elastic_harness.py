"""Machines that come, go, hang and return, as threads: each has its own `MachineGroup`."""

from __future__ import annotations

import threading
import time

import torch
from torch.distributed import TCPStore

from coterie.exchange.elastic import MachineGroup
from coterie.exchange.rendezvous import Machine as Settings
from coterie.exchange.rendezvous import Timing
from coterie.exchange.signed_store import SignedStore
from tests.support.waiting import wait_until

PATIENCE_S = 30.0
TOKEN = "a token for these tests"
TIMING = Timing(heartbeat=0.2, silent=3.0, poll=0.2, form=4.0)


class Machine:
    """Weights that go up by the sum of all machines' numbers: each step is a sum, then the end of a rollout."""

    def __init__(
        self, port: int, number: int, machines: int = 0, kind: str = "it", patience: float = PATIENCE_S, name: str = "",
        claim: int = 0, token: str = TOKEN,
    ) -> None:  # fmt: skip
        self.over = threading.Event()
        settings = Settings(("127.0.0.1", port), machines, kind, number, patience, TIMING, token)
        self.group = MachineGroup(settings, self.over.is_set)
        self.group.name = name or str(number)
        self.group.sums = self.group.number = claim
        self.lines = list[str]()
        self.group.report = self.lines.append
        self.number, self.weights = number, torch.full((3,), float(number))
        self.error: BaseException | None = None
        self.pause = threading.Event()
        self.paused = threading.Event()
        self.made = self.lost = 0
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def _work(self) -> None:
        try:
            self.group.join([self.weights])
            while not self.over.is_set():
                self._step()
        except BaseException as error:
            self.error = error
        finally:
            self.group.close(over=self.error is None)

    def _step(self) -> None:
        time.sleep(2e-3)  # leaves the cores to other tests
        if self.pause.is_set():
            self.paused.set()
            while self.pause.is_set():
                time.sleep(0.01)
            self.paused.clear()
        message = torch.tensor([float(self.number), 1.0, float(self.group.requested())])
        if self.group.sum(message):
            self.weights += message[0]
            self.made += 1
        else:
            self.lost += 1
        if self.group.broken or message[2] > 0:
            self.group.join([self.weights])

    def end(self) -> None:
        self.pause.clear()
        self.over.set()
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()


def store_of(machine: Machine, token: str = TOKEN) -> SignedStore:
    """A connection to the store at a machine that listens."""
    return SignedStore(TCPStore(*machine.group.machine.address, None, False, wait_for_workers=False), token)


def train(machines: list[Machine], size: int) -> None:
    """All go on, as one group of this size."""
    wait_until(
        lambda: all(m.group.size == size and not m.group.broken for m in machines), PATIENCE_S, f"a group of {size}"
    )
    before = [m.made for m in machines]
    wait_until(lambda: all(m.made > b + 3 for m, b in zip(machines, before, strict=True)), what="sums")
    assert not any(m.error for m in machines)


def rest(machines: list[Machine]) -> None:
    """All stop at the same sum, with the same weights."""
    machines[0].pause.set()
    assert machines[0].paused.wait(PATIENCE_S)
    wait_until(lambda: len({m.group.sums for m in machines}) == 1, 10, "the others wait in the next sum")
    wait_until(
        lambda: all(torch.equal(m.weights, machines[0].weights) for m in machines), 10, "all have the same weights"
    )
    machines[0].pause.clear()
