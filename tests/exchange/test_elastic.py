"""All-reduce between machines that come, go, hang and return."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace

import pytest
import torch
from torch.distributed import TCPStore

from coterie.errors import CoterieError
from coterie.exchange.lineage import Request, source_of
from coterie.exchange.rendezvous import Machine as Settings
from coterie.exchange.rendezvous import RendezvousClient, RendezvousHost
from coterie.exchange.signed_store import SignedStore
from tests.exchange.elastic_harness import PATIENCE_S, TIMING, TOKEN, rest, store_of, train
from tests.support.net import free_port
from tests.support.waiting import wait_until


def test_all_begin_together_with_the_first_ones_state_and_stay_equal(machine):
    machines = [machine(1, machines=3), machine(2)]
    time.sleep(1.0)
    assert not any(m.made for m in machines), "none trains before all are there"
    machines.append(machine(4))
    train(machines, 3)
    rest(machines)
    first = machines[0]
    assert torch.equal(first.weights, torch.full((3,), 1.0 + 7.0 * first.made))  # 1 + 2 + 4 for each sum


def test_machines_that_join_take_the_others_weights_and_the_others_go_on_without_those_that_leave(machine):
    machines = [machine(1, machines=2), machine(2)]
    train(machines, 2)
    machines.append(machine(3))
    train(machines, 3)
    rest(machines)
    assert sum(m.lost for m in machines) == 0, "nothing is lost when a machine joins"
    machines.pop().end()
    train(machines, 2)
    rest(machines)
    assert any("has left" in line for line in machines[0].lines)
    machines[0].end()  # the listening machine
    train(machines[1:], 1)
    assert machines[1].group.alone


def test_a_machine_that_hangs_is_lost_and_rejoins(machine, monkeypatch):
    machines = [machine(1, machines=3), machine(2), machine(3)]
    train(machines, 3)
    hangs = machines[1]
    hangs.pause.set()
    assert hangs.paused.wait(PATIENCE_S)
    monkeypatch.setattr(hangs.group.client, "exchange", lambda store: time.sleep(4.5))  # no signs of life
    others = [machines[0], machines[2]]
    train(others, 2)
    rest(others)
    assert any("is lost" in line for line in machines[0].lines)
    monkeypatch.undo()
    hangs.pause.clear()
    train(machines, 3)
    rest(machines)


def test_a_newcomer_does_not_choose_the_weights(machine):
    machines = [machine(1, machines=2), machine(2)]
    train(machines, 2)
    machines.append(machine(4, claim=2**40))
    train(machines, 3)
    rest(machines)
    assert machines[0].group.sums < 2**40
    assert machines[0].weights[0] > 3.0 * machines[0].made, "it started from 1, and has all sums"


@pytest.mark.parametrize(
    ("claims", "source"),
    [
        ([(0, 0, True), (0, 0, False)], 0),
        ([(0, 0, False), (0, 0, True)], 1),
        ([(0, 0, True), (9, 2**62, False)], 1),  # the listening machine is new, and only one has trained
        ([(3, 50, True), (3, 51, False), (9, 2**62, False)], 0),
        ([(3, 2**62, False), (3, 50, True)], 1),
        ([(0, 0, True), (3, 50, False), (9, 2**62, False), (3, 51, False)], 3),
        ([(0, 0, True), (3, 2**62, False), (3, 50, False), (3, 51, False)], 3),
        ([(0, 0, True), (3, 0, False), (3, 50, False), (3, 51, False)], 2),
    ],
)
def test_the_state_of_a_group_is_not_what_one_machine_claims(claims, source):
    """(group, sums, first) of each."""
    requests = [Request(str(k), "", "it", k, sums, group, first) for k, (group, sums, first) in enumerate(claims)]
    assert source_of(requests) == source


def test_the_listening_machine_takes_the_others_weights_after_it_was_lost(machine):
    machines = [machine(1, machines=3), machine(2), machine(3)]
    train(machines, 3)
    first = machines[0]
    made = first.group.sums
    first.error = RuntimeError("it is killed")
    first.end()
    del first
    machines[0] = machine(1, machines=3)
    train(machines, 3)
    assert machines[0].group.sums > made
    rest(machines)


def test_a_machine_with_another_task_or_the_same_seed_is_refused(machine):
    machines = [machine(1, machines=2), machine(2)]
    train(machines, 2)
    for number, kind, reason in (
        (3, "other", "allreduce.connect: the listening run trains it, this run other"),
        (2, "it", "another machine has --seed 2 and the same episodes"),
    ):
        stranger = machine(number, kind=kind, name=f"stranger {number}")
        wait_until(lambda stranger=stranger: stranger.error is not None, what="it is refused")
        assert isinstance(stranger.error, CoterieError)
        assert reason in str(stranger.error)
    train(machines, 2)


def test_a_machine_without_a_listening_one_gives_up(machine):
    lonely = machine(2, patience=1.5)
    wait_until(lambda: lonely.error is not None, what="it gives up")
    assert "allreduce: no group with the machine at 127.0.0.1:" in str(lonely.error)
    assert isinstance(lonely.error, CoterieError)


def test_an_address_that_is_no_name_ends_the_wait_for_the_store():
    client = RendezvousClient(Settings(("a..b", 1), 0, "it", 1, PATIENCE_S, TIMING), "x")
    wait_until(lambda: "label" in client.silent, PATIENCE_S, "the error")


def test_a_machine_that_is_lost_while_a_group_forms_leaves_the_others_with_equal_weights(machine):
    """Both had a place in the group that never formed: that does not mean that they have the same weights."""
    first = machine(1, machines=3)
    wait_until(
        lambda: first.group.client is not None and first.group.client.store is not None, PATIENCE_S, "it listens"
    )
    store = store_of(first)
    store.set("beat/lost", "0")
    lost = Request("lost", "lost", "it", 9, 0, 0, False)
    store.set(f"ticket/{store.add('tickets', 1)}", json.dumps(asdict(lost)))
    machines = [first, machine(2)]
    train(machines, 2)
    rest(machines)
    assert any("lost is lost" in line or "no group" in line for line in first.lines)


def test_a_request_to_join_that_cannot_be_read_is_refused(machine):
    machines = [machine(1, machines=2), machine(2)]
    train(machines, 2)
    store = store_of(machines[0])
    for text in ("{", "[]", '{"uid": "x"}', '{"uid": "x", "more": 1}'):
        number = store.add("tickets", 1)
        store.set(f"ticket/{number}", text)
        wait_until(lambda number=number: store.check([f"call/{number}"]), 20, "an answer")
        assert b"another version" in store.get(f"call/{number}")
    machines.append(machine(3))
    train(machines, 3)


def test_a_machine_that_is_alone_in_its_group_notices_that_it_was_given_up(machine):
    only = machine(1, machines=1)
    train([only], 1)
    store = store_of(only)
    store.set(f"broken/{only.group.number}", "1")
    wait_until(lambda: only.group.number == 2, 10, "another group")
    train([only], 1)


def test_no_group_forms_without_the_listening_machine():
    """It was stopped for long, and is back: its thread sees the others' requests before its own. Another one claims to
    be the listening machine.
    """
    store = SignedStore(TCPStore("127.0.0.1", free_port(), None, True, wait_for_workers=False), TOKEN)
    settings = Settings(("127.0.0.1", 1), 1, "it", 1, PATIENCE_S, replace(TIMING, silent=PATIENCE_S))
    host = RendezvousHost(store, settings, "first", lambda line: None)
    try:
        for number, uid in enumerate(("here other", "here first"), 1):
            store.set(f"beat/{uid}", "1")
            request = Request(uid, uid, "it", number, 0, 0, True)
            store.set(f"ticket/{number}", json.dumps(asdict(request)))
            store.add("tickets", 1)
            if uid == "here other":
                time.sleep(4 * TIMING.settle)
                assert not store.check(["call/1"])
        wait_until(lambda: store.check(["call/1", "call/2"]), PATIENCE_S, "both have a place")
        place = json.loads(store.get("call/1"))
        assert (place["size"], place["source"]) == (2, 1)
    finally:
        host.close(over=False)
