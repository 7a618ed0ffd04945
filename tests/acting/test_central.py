"""Central acting in this process: who is acted for together, what becomes of lives that end."""

from __future__ import annotations

import random
import threading
import time
from itertools import islice

import pytest

from coterie.types import Rollout
from tests.acting.central_harness import QUIET_S, UNROLL, WAIT_S, Client, check, still, valid
from tests.support.waiting import wait_until

# Who is acted for together.


def test_no_host_is_answered_before_there_are_weights(rig):
    one = rig()
    client = Client(one, 0)
    client.ask()
    time.sleep(QUIET_S)
    assert client.answered == 0
    one.central.publish(7)
    assert client.answer()[1] == 7


def test_a_batch_waits_for_batch_min_but_not_for_ever(rig):
    one = rig(batch_min=4, wait=WAIT_S)
    a, b = Client(one, 0), Client(one, 1)
    one.central.publish(0)
    a.ask()
    time.sleep(QUIET_S)
    assert a.answered == 0
    b.ask()
    a.answer(), b.answer()
    assert one.batches == [[(0, 0), (1, 0), (2, 0), (3, 0)]]
    short = rig(batch_min=4, wait=0.2)
    a, b = Client(short, 0), Client(short, 1)
    short.central.publish(0)
    begin = time.monotonic()
    a.turn()
    assert time.monotonic() - begin >= 0.2
    b.leave()
    begin = time.monotonic()
    wait_until(lambda: len(short.central.streams) == 1, what="the other is gone")
    a.turn()
    assert time.monotonic() - begin < 0.2 + WAIT_S / 2, "more than all there are is not waited for"


def test_a_batch_has_batch_max_envs_and_the_first_to_ask_come_first(rig):
    one = rig(envs=10, batch_size=10, batch_max=4)
    clients = [Client(one, n) for n in range(4)]
    wide = Client(one, 9, first_env=100, width=6)
    one.central.publish(0)
    one.gate.clear()
    clients[3].ask()
    assert one.busy.wait(WAIT_S)
    for k in (2, 0, 1):
        clients[k].ask()
    wide.ask()  # more than fit: alone
    one.gate.set()
    for client in (*clients, wide):
        client.answer()
    assert [[env for env, _ in batch] for batch in one.batches] == [[6, 7], [4, 5, 0, 1], [2, 3], [*range(100, 106)]]


def test_a_slow_host_keeps_no_other_waiting(rig):
    """Stopped, slowed, or gone without a word."""
    one = rig(batch_min=4, wait=0.002)
    slow, quick = Client(one, 0), Client(one, 1)
    slow.ask()
    source = one.rollouts()
    quick.go()
    seen = list(islice(source, 4))
    assert slow.answered == 1
    assert {env for r in seen for env in r.env_id.tolist()} == {2, 3}
    slow.go()  # again at work
    seen += islice(source, 20)
    assert {0, 1} <= {env for r in seen for env in r.env_id.tolist()}
    check(seen)


# Lives.


def test_a_superseded_stream_is_in_no_batch_with_its_successor(rig):
    """Its host is restarted twice before the batch that it is due for."""
    one = rig()
    other, first = Client(one, 1), Client(one, 0)
    one.central.publish(0)
    one.gate.clear()
    other.ask()
    assert one.busy.wait(WAIT_S)
    first.ask()
    second = first.again()
    second.ask()
    third = second.again()
    third.ask()
    one.gate.set()
    third.answer()
    assert one.batches == [[(2, 0), (3, 0)], [(0, 2), (1, 2)]]
    assert [first.answered, second.answered] == [0, 0]
    assert one.central.envs == 4
    first.ask()  # too late: it is not answered
    assert third.turn()
    for late in (first, second):  # their streams end only now
        late.stream.leave()
    assert one.central.envs == 4
    assert third.turn()
    assert [first.answered, second.answered] == [0, 0]


@pytest.mark.parametrize("seed", range(3))
def test_lives_that_end_anywhere_are_never_mixed_and_every_row_is_counted(rig, seed):
    """Hosts that leave, come back, and are replaced while others act and a learner learns."""
    one = rig(envs=8, batch_size=6, batch_max=[0, 2, 5][seed], batch_min=[0, 4, 0][seed])
    rng = random.Random(seed)
    clients = [Client(one, n).go() for n in range(4)]
    seen, source, over = list[Rollout](), one.rollouts(), threading.Event()

    def learn() -> None:
        while not over.is_set():
            seen.append(next(source))

    learner = threading.Thread(target=learn)
    learner.start()
    for _ in range(60):
        time.sleep(rng.uniform(0, 0.02))
        k = rng.randrange(4)
        if rng.random() < 0.5:
            clients[k].leave()
        for _ in range(rng.choice((1, 1, 2))):
            clients[k] = clients[k].again()
            if rng.random() < 0.8:
                clients[k].ask()
        clients[k].going = True
        if clients[k].shown == 0:
            clients[k].ask()
    over.set()
    learner.join(WAIT_S)
    assert not learner.is_alive()
    for client in clients:
        client.leave()
    central = one.central
    wait_until(lambda: not any(client.stream.counted for client in clients), what="all have left")
    still(lambda: central.produced + central.dropped + central.inbox.qsize())
    check(seen)
    assert len({int(x) for r in seen for x in r.obs[0, :, 1] // 1000}) > 5
    # All that is neither learned nor dropped is in whole rollouts: of those let the learner have all batches.
    left = central.columns
    for _ in range(left // 6):
        seen.append(next(source))
    assert central.columns == left % 6
    check(seen)
    in_flight = central.produced - central.dropped - valid(seen)
    assert 0 <= in_flight <= central.columns * UNROLL
    assert (in_flight == 0) == (central.columns == 0)
    central.close()
    assert central.counts()["in_flight"] == in_flight
    assert central.dropped > 0
    assert central.envs == 0


def test_rows_of_a_rollout_that_will_never_be_whole_are_dropped(rig):
    one = rig(unroll_length=20)
    one.central.publish(0)
    client = Client(one, 0)
    for _ in range(9):  # of which the first and the seventh begin an episode
        client.turn()
    assert one.central.counts() == {"produced": 14, "dropped": 0, "in_flight": 0}
    client.leave()
    wait_until(lambda: one.central.dropped == 14, what="dropped")
    assert one.central.produced == 14
    client.stream.leave()
    after = client.again()
    after.turn(), after.turn()
    assert one.central.counts() == {"produced": 16, "dropped": 14, "in_flight": 0}


def test_a_new_life_begins_anew_on_the_same_envs(rig):
    one = rig(envs=2, batch_size=2)
    client, source = Client(one, 0).go(), one.rollouts()
    seen = list(islice(source, 3))
    client = client.again().go()
    while True:
        seen.append(next(source))
        if seen[-1].obs[0, 0, 1] >= 1000:
            break
    check(seen)
    assert seen[-1].is_first[0].all()
    assert not seen[-1].core_state.any()
    assert not seen[-1].prev_action[0].any()
    assert seen[-2].core_state.any()
