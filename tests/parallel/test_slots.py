"""Slots: each is filled once by one producer, the oldest first; its successor takes over the slot of a dead one."""

from __future__ import annotations

import time

import numpy as np

from coterie.parallel.slots import Slots
from coterie.types import Post
from tests.exchange.harness import start
from tests.support.waiting import PATIENCE, wait_until

LAYOUT = {"x": ((3, 6), "int64"), "env_id": ((6,), "int64")}


def make(batches: int = 2, width: int = 2) -> Slots:
    return Slots(LAYOUT, batches, 6, width)


def test_slots_are_columns_of_their_batch():
    slots = make()
    for s in range(3):
        mine = slots.columns(1, s)
        mine["x"][:], mine["env_id"][:] = s + 1, 10 * s
    assert slots.fields[1]["x"][0].tolist() == [1, 1, 2, 2, 3, 3]
    assert slots.fields[1]["env_id"].tolist() == [0, 0, 10, 10, 20, 20]
    assert not slots.fields[0]["x"].any()


def test_the_oldest_open_slot_is_taken_and_a_batch_is_full_when_all_are():
    slots = make()
    assert slots.take(0) is None
    slots.open(1, 0)
    slots.open(0, 7)
    taken = [slots.take(p) for p in range(3)]
    assert taken == [(1, 0), (1, 1), (1, 2)]
    assert slots.take(4) == (0, 0)
    assert slots.need[0, 0] == 7
    for at in reversed(taken):
        assert not slots.is_full(1)
        slots.fill(at)
    assert slots.is_full(1)
    assert not slots.is_full(0)
    slots.open(1, 0)
    assert not slots.is_full(1)
    assert [slots.take(5), slots.take(6), slots.take(7)] == [(0, 1), (0, 2), (1, 0)]


def hold(post: Post, slots: Slots) -> None:
    with slots.locks.held(0):
        slots.origin[0, 0] = 1
        time.sleep(PATIENCE)


def test_a_holder_of_the_lock_that_is_stopped_delays_no_other_producer():
    slots = make()
    slots.open(0, 0)
    child = start(hold, slots)
    wait_until(lambda: slots.origin[0, 0].all())
    begin = time.monotonic()
    assert slots.take(0) is None
    assert time.monotonic() - begin < PATIENCE / 2
    child.kill()
    wait_until(lambda: slots.take(0) == (0, 0))


def test_deliveries_of_a_producer_that_was_killed_before_it_counted_them_are_known():
    slots = Slots(LAYOUT, 2, 6, 2, producers=3)
    slots.open(0, 0)
    at = slots.take(2)
    assert slots.delivered(2) == 0
    slots.promise(2, at, 30)
    assert slots.delivered(2) == 0  # killed here, they are lost
    slots.fill(at)
    assert [slots.delivered(p) for p in range(3)] == [0, 0, 30]
    slots.open(0, 1)  # it has been learned from, and is open again
    assert slots.delivered(2) == 30
    slots.promise(2, slots.take(2), 40)
    assert slots.delivered(2) == 0


def test_the_successor_of_a_dead_producer_gets_its_slot_and_in_lockstep_each_slot_has_its_producer():
    slots = make()
    slots.open(0, 0, [1, 0, 1])
    assert slots.take(1) == slots.take(1) == (0, 0)  # not filled: it is still this producer's
    assert slots.take(0) == (0, 1)
    slots.fill((0, 1))
    assert slots.take(0) is None
    slots.fill((0, 0))
    assert slots.take(1) == (0, 2)


def produce(post: Post, slots: Slots, producer: int) -> None:
    """A child, until it is killed."""
    while True:
        if (at := slots.take(producer)) is not None:
            slots.columns(*at)["x"][:] = producer
            slots.columns(*at)["env_id"][:] += 1
            slots.fill(at)


def test_many_producers_fill_each_slot_once():
    slots, seen, rounds, end = make(3, 1), set(), 0, time.monotonic() + PATIENCE
    producers = [start(produce, slots, p) for p in range(3)]
    for j in range(3):
        slots.open(j, 0)
    try:
        while rounds < 50 or (len(seen) < 2 and time.monotonic() < end):
            j = rounds % 3
            wait_until(lambda j=j: slots.is_full(j), what="every slot is filled")
            fields = slots.fields[j]
            assert (fields["env_id"] == rounds // 3 + 1).all(), "every slot was filled once"
            x = fields["x"].numpy()
            assert (x == x[0]).all(), "by one producer"
            seen |= set(np.unique(x).tolist())
            slots.open(j, 0)
            rounds += 1
    finally:
        for producer in producers:
            producer.kill()
    assert len(seen) > 1
    slots.release()
