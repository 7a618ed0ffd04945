"""Learners in memories of their own, mirrored, gossip like learners in one."""

from __future__ import annotations

import time

import numpy as np
import pytest

from coterie.exchange.gossip import Gossip, next_number
from coterie.exchange.topology import matrices
from coterie.parallel.shm import SharedArrays
from coterie.remote.gossip_mirror import Mirror, news_layout
from coterie.wire.codec import Refused
from tests.exchange.gossip_harness import SIZE, crowd, distance, machine, weights
from tests.exchange.harness import together


class Link:
    """Two ends, and what travels between them, through the frame's layout."""

    def __init__(self, one: Mirror, other: Mirror, seats: int) -> None:
        self.ends, self.layout = ((one, other), (other, one)), news_layout(seats, SIZE, 1)

    def carry(self, most: int = 100) -> int:
        """Everything there is to tell; returns how many frames went."""
        went = 0
        for _ in range(most):
            found = [(to, news) for mouth, to in self.ends if (news := mouth.news()) is not None]
            for to, news in found:
                to.take(self.layout.unpack(self.layout.pack(news)))
            went += len(found)
            if not found:
                return went
        raise AssertionError("it never ends")


def linked(one: SharedArrays, left: list[int], other: SharedArrays, right: list[int], start: int = 0, shift: int = 0):
    seats = len(one.arrays["told"])
    return Link(Mirror(one, left, right, start + shift), Mirror(other, right, left, start, shift), seats)


@pytest.mark.parametrize("topology", ["ring", "exponential", "complete"])
def test_two_machines_do_what_one_does(topology):
    start = np.random.default_rng(0).standard_normal((4, 4))
    one = crowd(start, matrices(topology, 4))
    memory, learners = machine(4, [0, 1], start, topology)
    other, more = machine(4, [2, 3], start, topology)
    link = linked(memory, [0, 1], other, [2, 3])
    for _ in range(12):
        one.round()
        for x in [*learners, *more]:
            assert x._tell(x.params)
        link.carry()
        for x in [*learners, *more]:
            assert x._hear(x.params)
        link.carry()
        np.testing.assert_array_equal(weights([*learners, *more]), one.weights())


def test_who_listens_passes_on_what_each_says():
    start = np.eye(3, 4)
    memory, [hub] = machine(3, [0], start)
    (left, [x]), (right, [y]) = machine(3, [1], start), machine(3, [2], start)
    links = [
        Link(Mirror(memory, [0, 2], [1], 0), Mirror(left, [1], [0, 2], 0), 3),
        Link(Mirror(memory, [0, 1], [2], 0), Mirror(right, [2], [0, 1], 0), 3),
    ]

    def carry() -> None:
        while sum(link.carry() for link in links):
            pass

    carry()
    for learner in (hub, x, y):
        assert learner._tell(learner.params)
    carry()
    for learner in (hub, x, y):
        assert learner._hear(learner.params)
    np.testing.assert_allclose(weights([hub, x, y])[:, :3], 1 / 3, atol=1e-6)


def test_nobody_waits_for_a_link_and_what_was_overtaken_is_not_sent():
    memory, [x] = machine(2, [0], np.eye(2, 4))
    other, [y] = machine(2, [1], np.eye(2, 4))
    link = linked(memory, [0], other, [1])
    link.carry()
    for _ in range(5):
        x.step(x.params, 1.0)
    assert (x.skipped_messages, x.mixed[0]) == (4, 0)  # told once, and trained on
    assert link.carry() == 1  # one message
    y.step(y.params, 1.0)
    link.carry()
    assert y.params.data[:2].tolist() == [0.5, 0.5]
    x.step(x.params, 1.0)
    assert x.params.data[:2].tolist() == [0.5, 0.5]


def test_without_the_link_each_side_goes_on_and_comes_together_again():
    """Also where the numbers of both sides have gone apart meanwhile, either way."""
    rng = np.random.default_rng(1)
    memory, [x] = machine(2, [0], np.eye(2, 4), "exponential")
    other, [y] = machine(2, [1], np.eye(2, 4), "exponential")
    link = linked(memory, [0], other, [1])

    def train(count: int, *learners: Gossip) -> None:
        for _ in range(count):
            link.carry()
            for one in learners:
                one.step(one.params, 1.0)
        link.carry()

    train(10, x, y)
    assert distance(weights([x, y])) < 0.01
    for stays in (y, x):
        for mirror in (link.ends[0][0], link.ends[1][0]):
            mirror.part()
        before = int(stays.mixed[stays.seat])
        for _ in range(30):
            stays.step(stays.params, 1.0)  # alone: nobody is waited for
        assert stays.mixed[stays.seat] == before + 30
        for one in (x, y):
            one.params.data[:4] += one.params.data.new_tensor(rng.standard_normal(4))
        first, mine = next_number(memory.arrays, [1]), int(max(y.told[1], y.mixed[1]))
        link = linked(memory, [0], other, [1], mine + 3, first - mine)
        apart = distance(weights([x, y]))
        train(30, x, y)
        assert distance(weights([x, y])) < 0.01 * apart
        assert weights([x, y]).max() < 5  # averages, whatever was in the memory


def test_one_who_is_not_there_yet_hears_one_message_of_each():
    memory, [x] = machine(2, [0], np.eye(2, 4))
    other, _ = machine(2, [1], np.eye(2, 4))
    for _ in range(7):
        x.step(x.params, 1.0)  # alone
    other.arrays["here"][1] = 0
    link = linked(memory, [0], other, [1], next_number(memory.arrays, [1]))
    sent = 0
    for _ in range(7):
        x.step(x.params, 1.0)
        news = link.ends[0][0].news()
        sent += 0 if news is None else int(news["speaks"][0])
        if news is not None:
            link.ends[0][1].take(news)
    assert sent == 1
    assert other.arrays["message"][0, :2].tolist() == [1, 0]


def test_a_message_that_is_being_written_waits():
    memory, [x] = machine(2, [0], np.eye(2, 4))
    mirror = Mirror(memory, [0], [1], 0)
    memory.arrays["here"][1] = 1
    x.step(x.params, 1.0)
    memory.arrays["begun"][0] += 1
    news = mirror.news()
    assert news is not None
    assert not news["speaks"][0]
    assert news["state"][0].tolist() == [1, 0, 0, 0]
    memory.arrays["begun"][0] -= 1
    news = mirror.news()
    assert news is not None
    assert (news["speaks"][0], news["seat"][0], news["state"][0, 1]) == (True, 0, 1)
    assert mirror.news() is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda n: n["message"].__setitem__((0, 0), np.nan), "its message are not finite"),
        (lambda n: n["message"].__setitem__((0, 0), -1e20), "its message are not finite"),
        (lambda n: n["moments"].__setitem__((0, 0), np.inf), "its moments are not finite"),
        (lambda n: n["seat"].__setitem__(0, 0), "it speaks for learners that are not its own"),
        (lambda n: n["seat"].__setitem__(0, 9), "it speaks for learners that are not its own"),
        (lambda n: n["seat"].__setitem__(0, -1), "it speaks for learners that are not its own"),
        (lambda n: n["state"].__setitem__((0, 0), 1), "it speaks for learners that are not its own"),
        (lambda n: n["state"].__setitem__((1, 0), 2), "its numbers of messages cannot be"),
        (lambda n: n["state"].__setitem__((1, 1), -1), "its numbers of messages cannot be"),
        (lambda n: n["state"].__setitem__((1, 2), 1 << 40), "its numbers of messages cannot be"),
        (lambda n: n["state"].__setitem__((1, 1), 0), "its numbers of messages go back"),
        (lambda n: n["speaks"].__setitem__(0, False), "it tells of a message that has not come"),
        (lambda n: n["state"].__setitem__((1, 1), 1), "its message has come before"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(change, reason):
    memory, [x] = machine(2, [1], np.eye(2, 4))
    other, _ = machine(2, [0], np.eye(2, 4))
    mouth, ear = Mirror(memory, [1], [0], 0), Mirror(other, [0], [1], 0)
    memory.arrays["here"][0] = 1
    x._tell(x.params)
    ear.take(mouth.news())
    memory.arrays["mixed"][0] = 1
    x._tell(x.params)
    news = mouth.news()
    assert news is not None
    before = {k: v.copy() for k, v in other.arrays.items()}
    bad = {k: v.copy() for k, v in news.items()}
    change(bad)
    with pytest.raises(Refused, match=reason):
        ear.take(bad)
    for name, x0 in before.items():
        np.testing.assert_array_equal(other.arrays[name], x0, name)
    ear.take(news)
    assert other.arrays["told"][1] == 2


def test_several_learners_come_back_to_one_that_has_begun_anew():
    """Its numbers are far below theirs; one of them is dead, one is writing."""
    memory, [hub] = machine(4, [0], np.eye(4))
    other, mine = machine(4, [1, 2, 3], np.eye(4))
    for seat in (1, 2, 3):
        for name in ("told", "mixed", "joined"):
            other.arrays[name][seat] = 500
    for _ in range(90):  # without a link
        for x in mine[:2]:
            x.step(x.params, 1.0)
    other.arrays["here"][3] = 0
    other.arrays["begun"][1] += 1
    first, top = next_number(memory.arrays, [1, 2, 3]), int(max(other.arrays[k][1:].max() for k in ("told", "mixed")))
    assert first - top < -400
    link = linked(memory, [0], other, [1, 2, 3], top + 3, first - top)
    link.carry()
    other.arrays["begun"][1] -= 1
    for _ in range(30):
        link.carry()
        for x in (hub, *mine[:2]):
            x.step(x.params, 1.0)
    link.carry()
    assert distance(weights([hub, *mine[:2]])) < 1e-3
    assert (memory.arrays["told"] >= 0).all()


def test_numbers_that_are_passed_on_do_not_go_back():
    """One who comes to the seat of another may be behind it."""
    memory, _ = machine(3, [0], np.eye(3, 4))
    to = Mirror(memory, [0, 1], [2], 0)
    memory.arrays["told"][1], memory.arrays["mixed"][1], memory.arrays["joined"][1] = 50, 49, 3
    memory.arrays["begun"][1] = 50
    memory.arrays["here"][1:] = 1
    first = to.news()
    assert first is not None
    for name in ("told", "mixed"):
        memory.arrays[name][1] = 9
    memory.arrays["joined"][1] = 60
    again = to.news()
    assert again is not None
    assert (again["state"][:, 1:] >= first["state"][:, 1:]).all()
    assert not again["speaks"][0]


def test_who_is_far_ahead_does_not_lead_newcomers_astray():
    memory, _ = machine(3, [0], np.eye(3, 4))
    memory.arrays["mixed"][1] = 1 << 20  # and has left
    assert next_number(memory.arrays, [2]) == 3
    assert next_number(memory.arrays, [1]) == 3
    memory.arrays["mixed"][1] = 1000
    assert next_number(memory.arrays, [1]) == 1003
    memory.arrays["here"][1] = 1
    assert next_number(memory.arrays, [2]) == 1003


def test_who_says_nothing_is_not_waited_for_until_it_moves():
    memory, [x] = machine(2, [0], np.eye(2, 4), tau=0, timeout=5.0)
    other, [y] = machine(2, [1], np.eye(2, 4))
    near, far = Mirror(memory, [0], [1], 0, silence=0.2), Mirror(other, [1], [0], 0)
    link = Link(near, far, 2)
    link.carry()

    def carry() -> None:
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            near.look()
            time.sleep(0.01)

    assert memory.arrays["here"][1] == 1
    together([carry, lambda: x.step(x.params, 1.0)])  # it waits, and then does not
    assert (memory.arrays["here"][1], x.mixed[0]) == (0, 1)
    for _ in range(200):
        x.step(x.params, 1.0)
    link.carry()
    y.step(y.params, 1.0)  # far behind by now: it goes on where the others are, and nobody waits until it has caught up
    assert y.mixed[1] > x.mixed[0]
    link.carry()
    assert memory.arrays["here"][1] == 1


def test_a_hub_that_was_not_waited_for_goes_on_where_the_others_are():
    """It evaluates for long, say. Its guests have gone on meanwhile, and it must not be held at what they last said."""
    start = np.eye(3, 4)
    memory, [hub] = machine(3, [0], start)
    (left, [x]), (right, [y]) = machine(3, [1], start), machine(3, [2], start)
    ends = [Mirror(memory, [0, 2], [1], 0), Mirror(memory, [0, 1], [2], 0)]
    far = [Mirror(left, [1], [0, 2], 0, silence=0.0), Mirror(right, [2], [0, 1], 0, silence=0.0)]
    links = [Link(*pair, 3) for pair in zip(ends, far, strict=True)]

    def train(count: int, *learners: Gossip) -> None:
        for _ in range(count):
            for one in learners:
                one.params.data[0] += 1.0
                one.step(one.params, 1.0)
            while sum(link.carry() for link in links):
                pass

    train(10, hub, x, y)
    for one in far:
        one.look()
    assert (left.arrays["here"][0], right.arrays["here"][0]) == (0, 0)
    train(500, x, y)
    assert min(x.mixed[1], y.mixed[2]) > 200
    before, mixed = float(hub.params.data[0]), int(hub.mixed[0])
    train(20, hub, x, y)
    assert hub.params.data[0] > before + 100  # an average with what the others say now
    assert hub.mixed[0] > mixed + 200
    assert (left.arrays["here"][0], right.arrays["here"][0]) == (1, 1)
    assert distance(weights([hub, x, y])[:, :1]) < 5


def test_who_is_in_the_midst_of_a_message_does_not_silence_others():
    memory, [x, y] = machine(4, [0, 1], np.eye(4))
    other, _ = machine(4, [2, 3], np.eye(4))
    link = linked(memory, [0, 1], other, [2, 3])
    link.carry()
    for one in (x, y):
        assert one._tell(one.params)
    memory.arrays["begun"][0] += 1  # and was killed there
    link.carry()
    assert other.arrays["told"].tolist() == [0, 1, 0, 0]
    assert other.arrays["message"][1, :4].tolist() == [0, 1, 0, 0]
