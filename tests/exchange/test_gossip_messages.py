"""Gossip: when a learner waits, how old a message may be, and what is never published."""

from __future__ import annotations

import math
import time
from functools import partial

import numpy as np
import pytest
import torch

from coterie.exchange.base import NonFinite
from coterie.exchange.topology import matrices
from coterie.types import CoterieError
from tests.exchange.gossip_harness import crowd, step
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


def test_lockstep_waits_at_once():
    c = crowd(np.eye(3), matrices("ring", 3), tau=0, timeout=0.05)
    with pytest.raises(CoterieError, match="no message from an in-peer"):
        step(c.learners[0])
    with pytest.raises(CoterieError, match="an out-peer has not read"):
        step(c.learners[0])


@pytest.mark.parametrize("tau", [0, 3])
def test_a_waiting_learner_stops_when_the_run_stops(tau):
    c = crowd(np.eye(2), matrices("ring", 2), tau=tau)

    def run() -> None:
        for _ in range(tau + 1):
            step(c.learners[0])

    def stop() -> None:
        wait_until(lambda: c.learners[0].updates == tau + 1)
        c.board.stop()

    together([run, stop])


def test_a_message_is_written_and_read_between_fences(monkeypatch):
    """Or a processor that reorders writes shows a peer a number before its message."""
    c = crowd(np.eye(2), matrices("ring", 2), tau=-1)
    x, y = c.learners
    arrays, seen = c.shared.arrays, []

    def fence() -> None:
        seen.append((*(int(arrays[name][0]) for name in ("begun", "published")), float(arrays["message"][0, 0])))
        seen.append((int(arrays["mixed"][1]), float(y.params.data[0])))

    monkeypatch.setattr("coterie.exchange.gossip.fence", fence)
    assert x.publish(x.params)
    assert seen[::2] == [(1, 0, 0.0), (1, 0, 1.0)]  # after `begun`, and before `published`
    seen.clear()
    assert y.receive(y.params)
    assert seen[1::2] == [(0, 0.0), (0, 0.5)]  # before the message is read, and before it is marked as read


# --- what never leaves a learner ---


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("tau", [0, -1])
def test_weights_that_are_not_finite_are_never_published(tau, bad):
    c = crowd(np.eye(2), matrices("ring", 2), tau=tau, timeout=1.0)
    together([partial(step, x) for x in c.learners])
    if tau:
        together([partial(step, x) for x in c.learners])
    sick, well = c.learners
    told, message = c.shared.arrays["published"].copy(), c.shared.arrays["message"].copy()
    while c.shared.arrays["mixed"][1] < told[0]:  # so that there is room for a message
        step(well)
        told[1] = c.shared.arrays["published"][1]
        message[1] = c.shared.arrays["message"][1]
    sick.params.data[1] = bad
    with pytest.raises(NonFinite, match=r"^the weights of w0 are not finite$"):
        step(sick)
    assert c.shared.arrays["published"].tolist() == told.tolist()
    assert np.array_equal(c.shared.arrays["message"], message)
    assert c.shared.arrays["begun"].tolist() == told.tolist()
    assert np.isfinite(c.weights()[1]).all()


def test_a_gradient_that_is_not_finite_stops_where_asked_and_publishes_nothing():
    c = crowd(np.eye(2), matrices("ring", 2), tau=0, timeout=0.0)
    x = c.learners[0]
    x.params.grad[0] = math.nan
    with pytest.raises(NonFinite, match="the gradient of w0 is not finite"):
        x.step(x.params, 0.1)
    assert x.params.data[:2].tolist() == [1, 0]
    assert c.shared.arrays["published"].tolist() == [0, 0]
