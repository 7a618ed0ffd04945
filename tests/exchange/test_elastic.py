"""Machines that come, go, hang and come back, as threads: each has a ring of its own."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict

import pytest
import torch

from coterie.exchange import elastic, rendezvous, rendezvous_client
from coterie.exchange.elastic import Ring
from coterie.types import CoterieError
from tests.launch.harness import until
from tests.support.net import free_port

PATIENCE_S = 30.0


class Machine:
    """A ring, and weights that go up by what all say together (its own number): each step is a sum, then a boundary."""

    def __init__(
        self, port: int, number: int, machines: int = 0, kind: str = "it", patience: float = PATIENCE_S, who: str = ""
    ) -> None:
        self.over = threading.Event()
        self.ring = Ring(("127.0.0.1", port), machines, kind, number, patience, self.over.is_set)
        self.ring.who = who or str(number)
        self.lines = list[str]()
        self.ring.say = self.lines.append
        self.number, self.weights = number, torch.full((3,), float(number))
        self.error: BaseException | None = None
        self.pause = threading.Event()
        self.paused = threading.Event()
        self.made = self.lost = 0
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def _work(self) -> None:
        try:
            self.ring.meet([self.weights])
            while not self.over.is_set():
                self._step()
        except BaseException as error:
            self.error = error
        finally:
            self.ring.close(over=self.error is None)

    def _step(self) -> None:
        if self.pause.is_set():
            self.paused.set()
            while self.pause.is_set():
                time.sleep(0.01)
            self.paused.clear()
        message = torch.tensor([float(self.number), 1.0, float(self.ring.called())])
        if self.ring.sum(message):
            self.weights += message[0]
            self.made += 1
        else:
            self.lost += 1
        if self.ring.broken or message[2] > 0:
            self.ring.meet([self.weights])

    def end(self) -> None:
        self.pause.clear()
        self.over.set()
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Machine]]:
    monkeypatch.setattr(rendezvous, "SILENT_S", 4.0)
    monkeypatch.setattr(rendezvous_client, "SILENT_S", 4.0)
    monkeypatch.setattr(rendezvous_client, "BEAT_S", 0.2)
    monkeypatch.setattr(elastic, "SILENT_S", 4.0)
    monkeypatch.setattr(elastic, "_POLL_S", 0.2)
    port, made = free_port(), list[Machine]()

    def make(number: int, **options: object) -> Machine:
        made.append(Machine(port, number, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in reversed(made):
        one.end()


def train(machines: list[Machine], size: int) -> None:
    """All go on, as one ring of so many."""
    until(lambda: all(m.ring.size == size and not m.ring.broken for m in machines), f"a ring of {size}")
    before = [m.made for m in machines]
    until(lambda: all(m.made > b + 3 for m, b in zip(machines, before, strict=True)), "sums")
    assert not any(m.error for m in machines)


def rest(machines: list[Machine]) -> None:
    """All stop at the same sum, with the same weights."""
    machines[0].pause.set()
    assert machines[0].paused.wait(PATIENCE_S)
    until(lambda: len({m.ring.sums for m in machines}) == 1, "the others wait in the next sum", 10)
    until(lambda: all(torch.equal(m.weights, machines[0].weights) for m in machines), "all have the same weights", 10)
    machines[0].pause.clear()


def test_all_begin_with_the_first_ones_state_and_stay_equal(machine):
    machines = [machine(1, machines=3), machine(2), machine(4)]
    train(machines, 3)
    rest(machines)
    first = machines[0]
    assert torch.equal(first.weights, torch.full((3,), 1.0 + 7.0 * first.made))  # 1 + 2 + 4 for each sum


def test_nobody_begins_before_all_are_there(machine):
    machines = [machine(1, machines=3), machine(2)]
    time.sleep(1.0)
    assert not any(m.made for m in machines)
    train([*machines, machine(3)], 3)


def test_one_that_comes_later_takes_what_the_others_have(machine):
    machines = [machine(1, machines=2), machine(2)]
    train(machines, 2)
    machines.append(machine(3))
    train(machines, 3)
    rest(machines)
    assert sum(m.lost for m in machines) == 0, "nothing is lost when somebody comes"


def test_one_that_leaves_is_told_of_and_the_others_go_on(machine):
    machines = [machine(1, machines=3), machine(2), machine(3)]
    train(machines, 3)
    machines.pop().end()
    train(machines, 2)
    rest(machines)
    assert any("has left" in line for line in machines[0].lines)


def test_one_that_hangs_is_given_up_and_comes_back(machine, monkeypatch):
    machines = [machine(1, machines=3), machine(2), machine(3)]
    train(machines, 3)
    hangs = machines[1]
    hangs.pause.set()
    assert hangs.paused.wait(PATIENCE_S)
    monkeypatch.setattr(hangs.ring.contact, "_talk", lambda store: time.sleep(6.0))  # no signs of life
    others = [machines[0], machines[2]]
    train(others, 2)
    rest(others)
    assert any("is lost" in line for line in machines[0].lines)
    monkeypatch.undo()
    hangs.pause.clear()
    train(machines, 3)
    rest(machines)


def test_the_first_one_may_be_lost_and_takes_the_others_state_when_it_is_back(machine):
    machines = [machine(1, machines=3), machine(2), machine(3)]
    train(machines, 3)
    first = machines[0]
    made = first.ring.sums
    first.error = RuntimeError("it is killed")
    first.end()
    del first
    machines[0] = machine(1, machines=3)
    train(machines, 3)
    assert machines[0].ring.sums > made
    rest(machines)


def test_when_the_first_one_has_ended_the_others_go_on_alone(machine):
    machines = [machine(1, machines=3), machine(2), machine(3)]
    train(machines, 3)
    machines[0].end()
    train(machines[1:], 1)
    assert all(m.ring.alone for m in machines[1:])


def test_who_trains_something_else_is_not_let_in(machine):
    machines = [machine(1, machines=2), machine(2)]
    train(machines, 2)
    stranger = machine(3, kind="other")
    until(lambda: stranger.error is not None, "it is refused")
    assert isinstance(stranger.error, CoterieError)
    assert "allreduce.connect: the run there trains it, this one other" in str(stranger.error)
    train(machines, 2)


def test_two_with_the_same_seed_would_see_the_same_episodes(machine):
    machines = [machine(1, machines=2), machine(2)]
    train(machines, 2)
    twin = machine(2, who="another")
    until(lambda: twin.error is not None, "it is refused")
    assert "a run with --seed 2 is there" in str(twin.error)
    train(machines, 2)


def test_nobody_there_is_an_error_after_a_while(machine):
    lonely = machine(2, patience=1.5)
    until(lambda: lonely.error is not None, "it gives up")
    assert "allreduce: no ring with the machine at 127.0.0.1:" in str(lonely.error)
    assert isinstance(lonely.error, CoterieError)


def test_who_was_silent_while_it_waited_asks_again(machine, monkeypatch):
    machines = [machine(1, machines=3), machine(2)]
    until(lambda: len(machines[0].ring.convener.waiting) == 2 if machines[0].ring.convener else False, "both wait")
    quiet, talk = machines[1].ring.contact, machines[1].ring.contact._talk
    monkeypatch.setattr(quiet, "_talk", lambda store: time.sleep(6.0))
    until(lambda: not machines[0].ring.convener.waiting.keys() & {quiet.uid}, "it is forgotten")
    monkeypatch.setattr(quiet, "_talk", talk)
    train([*machines, machine(3)], 3)
    rest(machines)


def test_a_machine_that_is_lost_while_a_ring_forms_leaves_the_others_with_the_same_weights(machine, monkeypatch):
    """Both had been told of the ring that never was: that does not mean that they have the same."""
    monkeypatch.setattr(elastic, "_FORM_S", 2.0)
    first = machine(1, machines=3)
    until(lambda: first.ring.contact is not None and first.ring.contact.store is not None, "it listens")
    store = rendezvous_client.TCPStore(*first.ring.address, None, False, wait_for_workers=False)
    store.set("beat/lost", "0")
    lost = rendezvous.Ticket("lost", "lost", "it", 9, 0, 0, False, False)
    store.set(f"ticket/{store.add('tickets', 1)}", json.dumps(asdict(lost)))
    machines = [first, machine(2)]
    train(machines, 2)
    rest(machines)
    assert any("lost is lost" in line or "no ring" in line for line in first.lines)


def test_a_ticket_that_nobody_can_read_is_refused(machine):
    machines = [machine(1, machines=2), machine(2)]
    train(machines, 2)
    store = rendezvous_client.TCPStore(*machines[0].ring.address, None, False, wait_for_workers=False)
    for text in ("{", "[]", '{"uid": "x"}', '{"uid": "x", "more": 1}'):
        number = store.add("tickets", 1)
        store.set(f"ticket/{number}", text)
        until(lambda number=number: store.check([f"call/{number}"]), "an answer", 20)
        assert b"another version" in store.get(f"call/{number}")
    machines.append(machine(3))
    train(machines, 3)


def test_one_comes_late_to_a_sum_that_was_given_up(machine):
    machines = [machine(1, machines=2), machine(2)]
    train(machines, 2)
    late = machines[1]
    late.pause.set()
    assert late.paused.wait(PATIENCE_S)
    until(lambda: machines[0].ring.group is not None, "it waits for the other")
    machines[0].ring.contact.broken = True
    until(lambda: machines[0].ring.broken, "it gives up")
    late.pause.clear()
    train(machines, 2)
    rest(machines)
