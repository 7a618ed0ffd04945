"""The two ends of a connection between gossiping runs, without a wire: the newest message wins."""

from __future__ import annotations

import numpy as np
import pytest

from coterie.exchange.mailboxes import Mailboxes, Relay
from coterie.wire.codec import Refused
from tests.exchange.gossip_harness import linked, step
from tests.remote.gossip_runs import LAYOUT


class Pair:
    """A run with two learners and a run with one, and a connection between them."""

    def __init__(self) -> None:
        self.memory, [self.x, self.y] = linked(2, np.eye(2, 4))
        self.far_memory, [self.z] = linked(1, np.eye(3, 4)[2:])
        self.near, self.far = Mailboxes(self.memory, 2), Mailboxes(self.far_memory, 1)
        self.ends = Relay(self.near, range(2), [2]), Relay(self.far, range(1), [1, 2])

    def carry(self, count: int = 1) -> list[int]:
        """Frames in both directions; the ids of the learners whose weights went from the first run to the second."""
        went = []
        for _ in range(count):
            frame = self.ends[0].send()
            went.append(int(frame["learner"][0]))
            self.ends[1].receive(LAYOUT.unpack(LAYOUT.pack(frame)))
            self.ends[0].receive(LAYOUT.unpack(LAYOUT.pack(self.ends[1].send())))
        return went


def test_only_the_newest_weights_of_each_learner_are_sent_in_turn():
    pair = Pair()
    assert pair.carry() == [-1]
    for k in range(1, 6):
        pair.x.params.data[3] = float(k)
        step(pair.x)
    assert pair.carry(2) == [0, -1]
    assert pair.far.read(1).weights[3] == 5.0
    for one in (pair.x, pair.y):
        step(one)
    step(pair.x)
    assert pair.carry(3) == [1, 0, -1]


def test_a_message_is_averaged_once_and_no_learner_waits_for_it():
    pair = Pair()
    step(pair.x)
    pair.carry()
    step(pair.z)
    assert pair.z.params.data[:3].tolist() == [0.5, 0, 0.5]
    step(pair.z)  # the same message again is no news
    assert pair.z.params.data[:3].tolist() == [0.5, 0, 0.5]
    assert pair.z.gauges()["gossip/remote_messages"] == 1
    for _ in range(50):
        step(pair.z)  # nothing comes: its time-out of 0 s would be the first wait
    assert pair.z.updates == 52


def test_moments_and_weights_of_several_runs_are_averaged_alike():
    pair = Pair()
    pair.x.params.data[:4], pair.y.params.data[:4] = pair.x.params.data.new_tensor([[3.0, 0, 0, 0], [0, 3, 0, 0]])
    pair.x.mixed[:] = pair.y.mixed[:] = 0
    for one in (pair.x, pair.y):
        one.mailboxes.write(one.rank, one.params.data.numpy(), np.zeros(1))
    pair.carry(2)
    pair.z.params.data[:4] = pair.z.params.data.new_tensor([0.0, 0, 3, 0])
    step(pair.z)
    np.testing.assert_allclose(pair.z.params.data[:4], [1, 1, 1, 0], rtol=1e-6)


def test_a_message_that_is_being_written_is_not_sent_and_a_killed_writer_does_not_block_the_next():
    pair = Pair()
    step(pair.x)
    pair.near.clear(0)  # it was killed half-way
    assert pair.carry() == [-1]
    step(pair.x)
    assert pair.carry() == [0]


@pytest.mark.parametrize(
    ("name", "at", "value", "reason"),
    [
        ("weights", (0, 0), np.nan, "its weights are not finite"),
        ("weights", (0, 0), -1e20, "its weights are not finite"),
        ("moments", (0, 0), np.inf, "its moments are not finite"),
        ("present", 2, True, "it sends more than its 2 learners"),
        ("learner", 0, 2, "it sends more than its 2 learners"),
        ("learner", 0, -1, "it sends more than its 2 learners"),
    ],
)
def test_a_frame_that_cannot_be_is_refused_and_changes_nothing(name, at, value, reason):
    pair = Pair()
    step(pair.x)
    frame = pair.ends[0].send()
    bad = {k: v.copy() for k, v in frame.items()}
    bad[name][at] = value
    before = {k: v.copy() for k, v in pair.far_memory.arrays.items()}
    with pytest.raises(Refused, match=reason):
        pair.ends[1].receive(bad)
    for key, array in before.items():
        np.testing.assert_array_equal(pair.far_memory.arrays[key], array, key)
    pair.ends[1].receive(frame)
    assert pair.far.has_message(1)


def test_a_restarted_learner_takes_the_newest_weights_of_a_remote_one_where_it_is_alone():
    pair = Pair()
    step(pair.x)
    pair.carry()
    pair.z.__exit__(None, None, None)
    pair.z.rejoin = True
    with pair.z as back:
        assert back.params.data[:3].tolist() == [1, 0, 0]
        assert pair.far.present[0] == 1
