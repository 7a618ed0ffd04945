"""Gossip: when a learner waits, what is never published, learners that leave and those that restart."""

from __future__ import annotations

import math
import time
from functools import partial

import numpy as np
import pytest
import torch

from coterie.errors import CoterieError
from coterie.exchange.base import NonFinite
from coterie.exchange.topology import matrices
from coterie.models.heads import Moments, Normalizer
from tests.exchange.gossip_harness import crowd, distance, lockstep, one, step, weights
from tests.exchange.harness import gradients, together
from tests.support.waiting import wait_until

# --- waiting ---


@pytest.mark.parametrize("topology", ["ring", "exponential", "complete"])
def test_without_a_bound_a_learner_never_waits(topology):
    """Time-out 0: the first wait would raise. The peers never read and never speak; the learner is plain SGD."""
    start = np.random.default_rng(7).standard_normal((4, 20))
    c = crowd(start, matrices(topology, 4), tau=-1, timeout=0.0)
    lone, expected = c.learners[1], c.learners[1].params.data.clone()
    for g in gradients(lone.params, 50):
        step(lone, g, 0.01)
        expected.sub_(g, alpha=0.01)
        assert torch.equal(lone.params.data, expected)
    assert lone.skipped_messages == 49  # the first was published, and not read
    assert c.shared.arrays["published"].tolist() == [0, 1, 0, 0]
    assert c.shared.arrays["mixed"].tolist() == [0, 0, 0, 0]


def test_a_message_is_read_once_and_is_the_last_one_written():
    """A slow peer receives the message that was written when it was free, and the next only after reading that."""
    c = crowd(np.zeros((2, 1)), matrices("ring", 2), tau=-1)
    fast, slow = c.learners
    slow.message[1].zero_()
    for k in range(1, 6):
        fast.params.data[0] = float(k)
        step(fast)
    assert float(c.shared.arrays["message"][0, 0]) == 1.0  # published at its first step, unread since
    slow.params.data[0] = 0.0
    step(slow)
    assert slow.params.data[0] == 0.5  # (0 + 1) / 2
    fast.params.data[0] = 9.0
    step(fast)  # now there is room again
    assert float(c.shared.arrays["message"][0, 0]) == 9.0
    assert c.shared.arrays["published"][0] == 2


@pytest.mark.parametrize("tau", [1, 2, 5])
def test_a_learner_that_waits_goes_on_when_its_peer_tells(tau):
    c = crowd(np.eye(2), matrices("ring", 2), tau=tau)
    fast, slow = c.learners
    done: list[int] = []

    def run() -> None:
        for k in range(tau + 1 + tau):
            step(fast)
            done.append(k)

    def tell_late() -> None:
        wait_until(lambda: fast.updates == tau + 1)
        time.sleep(0.03)
        assert len(done) == tau  # it is in the mix that it may not miss
        step(slow)
        wait_until(lambda: len(done) == 2 * tau + 1)  # and may miss as many again

    together([run, tell_late])
    np.testing.assert_allclose(slow.params.data[:2], [0.5, 0.5])
    np.testing.assert_allclose(fast.params.data[:2], [0.5, 0.5])
    assert c.shared.arrays["mixed"].tolist() == [1, 1]


def test_gossip_in_lockstep_waits_at_once():
    c = crowd(np.eye(3), matrices("ring", 3), tau=0, timeout=0.05)
    with pytest.raises(CoterieError, match="no message from an in-peer"):
        step(c.learners[0])
    with pytest.raises(CoterieError, match="an out-peer has not read"):
        step(c.learners[0])


@pytest.mark.parametrize("tau", [0, 1])
def test_a_learner_may_evaluate_for_longer_than_the_others_wait_for_one_that_hangs(monkeypatch, tau):
    """Learner 0's heartbeat shows that. Learner 1 waits for it, without a heartbeat, and learner 2 for learner 1."""
    c = crowd(np.eye(3), matrices("ring", 3), tau=tau, timeout=10.0)
    clock = iter(range(1, 200))

    def awake() -> int:
        if (now := next(clock)) < 100:
            c.board.heartbeat(0)
        elif now == 100:
            assert c.learners[1].publish(c.learners[1].params)
        return now

    monkeypatch.setattr("coterie.exchange.gossip.awake", awake)
    for _ in range(1 + tau):
        step(c.learners[2])
    assert c.shared.arrays["mixed"][2] == 1


@pytest.mark.parametrize("tau", [0, 3])
def test_a_waiting_learner_stops_when_the_run_stops(tau):
    c = crowd(np.eye(2), matrices("ring", 2), tau=tau)

    def stop() -> None:
        wait_until(lambda: c.learners[0].updates == tau + 1)
        c.board.stop()

    together([partial(lockstep, c.learners[:1], tau + 1), stop])


def test_a_message_is_written_and_read_between_fences(monkeypatch):
    """Or a processor that reorders writes shows a peer a number before its message."""
    c = crowd(np.eye(2), matrices("ring", 2), tau=-1)
    x, y = c.learners
    arrays, seen = c.shared.arrays, []

    def fence() -> None:
        seen.append((*(int(arrays[name][0]) for name in ("writes", "published")), float(arrays["message"][0, 0])))
        seen.append((int(arrays["mixed"][1]), float(y.params.data[0])))

    for module in ("exchange.gossip", "parallel.seqlock"):
        monkeypatch.setattr(f"coterie.{module}.fence", fence)
    assert x.publish(x.params)
    assert seen[::2] == [(1, 0, 0.0), (1, 0, 1.0), (1, 1, 1.0)]  # before the message, before and after `published`
    seen.clear()
    assert y.receive()
    assert seen[1::2] == [(0, 0.0), (0, 0.5)]  # before the message is read, and before it is marked as read


# --- what never leaves a learner ---


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_are_never_published(bad):
    c = crowd(np.eye(2), matrices("ring", 2), tau=0, timeout=1.0)
    lockstep(c.learners)
    before = {name: x.copy() for name, x in c.shared.arrays.items()}
    c.learners[0].params.data[1] = bad
    with pytest.raises(NonFinite, match=r"^the weights of w0 are not finite$"):
        step(c.learners[0])
    for name in ("writes", "published", "message"):
        assert np.array_equal(c.shared.arrays[name], before[name])


def test_a_gradient_that_is_not_finite_stops_where_asked_and_publishes_nothing():
    c = crowd(np.eye(2), matrices("ring", 2), tau=0, timeout=0.0)
    x = c.learners[0]
    x.params.grad[0] = math.nan
    with pytest.raises(NonFinite, match="the gradient of w0 is not finite"):
        x.step(x.params, 0.1)
    assert x.params.data[:2].tolist() == [1, 0]
    assert c.shared.arrays["published"].tolist() == [0, 0]


# --- learners that leave ---


@pytest.mark.parametrize("tau", [0, -1, 3])
def test_a_learner_that_left_is_out_of_the_average(tau):
    """Its share goes to the others in proportion, and no learner waits for it, or the time-out would raise."""
    start = np.random.default_rng(8).standard_normal((3, 5))
    c = crowd(start, [np.array([[0.5, 0.25, 0.25], [0.4, 0.2, 0.4], [0.3, 0.3, 0.4]])], tau=tau, timeout=5.0)
    c.present[2] = 0  # died before it said anything
    two = c.learners[:2]
    lockstep(two, 3 if tau else 1)
    if tau:  # in whatever order they came
        x = c.weights()[:2]
        hull = np.sort(start[:2], 0)
        assert ((x >= hull[0] - 1e-6) & (x <= hull[1] + 1e-6)).all()
        assert not np.allclose(x, start[:2])
    else:
        p = np.array([[2 / 3, 1 / 3], [2 / 3, 1 / 3]])
        np.testing.assert_allclose(c.weights()[:2], p @ start[:2], atol=1e-6)
    assert np.array_equal(c.weights()[2], start[2].astype(np.float32))


def test_the_last_message_of_a_learner_that_left_is_averaged_once():
    c = crowd(np.eye(3), matrices("complete", 3))
    x, y, left = c.learners
    for each in c.learners:
        assert each.publish(each.params)
    left.__exit__(None, None, None)
    assert c.present.tolist() == [1, 1, 0]
    for each in (x, y):
        assert each.receive()
    np.testing.assert_allclose(c.weights()[:2], np.full((2, 3), 1 / 3), atol=1e-6)
    x.params.data[:3] = torch.tensor([1.0, 0, 0])
    lockstep([x, y])
    np.testing.assert_allclose(c.weights()[:2], np.tile([2 / 3, 1 / 6, 1 / 6], (2, 1)), atol=1e-6)


def test_a_message_published_just_before_its_learner_left_counts():
    """It publishes between the check for a message and the check whether it is present."""
    c = crowd(np.eye(2), matrices("ring", 2))
    x, leaver = c.learners

    class Here:
        def __getitem__(self, j: int) -> int:
            if c.present[j]:
                assert leaver.publish(leaver.params)
                leaver.__exit__(None, None, None)
            return int(c.present[j])

    x.present = Here()
    assert x.receive()
    assert x.params.data[:2].tolist() == [0.5, 0.5]


@pytest.mark.parametrize(("topology", "tau"), [("ring", 3), ("exponential", 0), ("complete", 3)])
def test_learners_with_unequal_numbers_of_steps_all_end(tau, topology):
    """The original hangs here: a learner that is done publishes no more, and a slower one reaches its bound."""
    n, counts = 4, [5, 40, 12, 23]
    c = crowd(np.eye(n), matrices(topology, n), tau=tau, timeout=20.0)

    def run(i: int) -> None:
        with c.learners[i] as x:
            for _ in range(counts[i]):
                step(x)

    together([partial(run, i) for i in range(n)])
    assert [x.updates for x in c.learners] == counts
    assert c.present.tolist() == [0] * n
    np.testing.assert_allclose(c.weights().sum(1), 1, atol=1e-5)
    if tau == 0:
        assert c.shared.arrays["mixed"].tolist() == counts


# --- learners that restart ---


@pytest.mark.parametrize("topology", ["ring", "exponential", "complete"])
def test_a_restarted_learner_takes_a_peers_weights_trains_and_then_mixes(topology):
    rng = np.random.default_rng(9)
    norms = [[Normalizer((2,))] for _ in range(3)]
    for i, (norm,) in enumerate(norms):
        norm.update(torch.full((4 + i, 2), float(i)))
    c = crowd(rng.standard_normal((3, 5)), matrices(topology, 3), norms)
    lockstep(c.learners, 4)
    c.present[2] = 0
    lockstep(c.learners[:2], 6)
    assert c.shared.arrays["published"].tolist() == [10, 10, 4]
    c.shared.arrays["message"][2] = 1e6  # what it said long ago counts no more
    fresh = Normalizer((2,))
    back = one(c.shared, c.board, c.learners[0].sequence, 2, np.full(5, 100.0), norms=[fresh], rejoin=True)
    assert c.present[2] == 0  # not before it is entered
    back.__enter__()
    assert c.present[2] == 1
    messages, sums = c.shared.arrays["message"], c.shared.arrays["moments"]
    mine = Moments([fresh]).read().numpy()
    assert any(
        np.array_equal(back.params.data.numpy(), messages[j]) and np.allclose(mine, sums[j], rtol=1e-9) for j in (0, 1)
    )
    for name in ("published", "mixed", "joined"):
        assert c.shared.arrays[name][2] == 13  # a number that no other has reached
    lockstep(c.learners[:2], 3)  # numbers 10 to 12: the others neither wait for it nor receive from it
    x = c.weights()[:2]
    assert abs(x).max() < 10
    assert c.shared.arrays["published"].tolist() == [13, 13, 13]
    back.params.grad[:5] = -7.0  # it trains: weights that no other has
    expected = c.weights()
    expected[2] = back.params.data[:5].double().numpy() + 7.0
    learners = [*c.learners[:2], back]
    lockstep(learners, 1)
    p = c.learners[0].sequence[13 % len(c.learners[0].sequence)]
    after = weights(learners, 5)
    np.testing.assert_allclose(after, p @ expected, atol=1e-5)
    assert c.shared.arrays["published"].tolist() == c.shared.arrays["mixed"].tolist() == [14, 14, 14]
    lockstep(learners, 40)
    assert distance(weights(learners, 5)) < 1e-4


def test_a_restarted_learner_takes_the_newest_complete_message(monkeypatch):
    c = crowd(np.diag([1.0, 2, 3, 4]), matrices("ring", 4), tau=-1)
    arrays = c.shared.arrays
    for j, told in enumerate([5, 9, 7, 0]):
        arrays["published"][j], arrays["writes"][j] = told, 2 * told
        arrays["message"][j, :4] = 10 * (j + 1)
    c.present[3] = 0
    arrays["writes"][1] += 1  # the newest is half written, and the death of its writer was not noticed
    monkeypatch.setattr("coterie.exchange.gossip.time.sleep", lambda seconds: None)
    back = one(c.shared, c.board, matrices("ring", 4), 3, np.zeros(4), tau=-1, rejoin=True)
    back.__enter__()
    assert back.params.data[:4].tolist() == [30.0] * 4  # learner 2's
    assert arrays["joined"][3] == 12
