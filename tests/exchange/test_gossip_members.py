"""Gossip: learners that leave are out of the average, and those that come back are in it again."""

from __future__ import annotations

import json
from functools import partial

import numpy as np
import pytest
import torch

from coterie.exchange.topology import matrices
from coterie.models.heads import Moments, Normalizer
from tests.exchange.gossip_harness import crowd, distance, lockstep, one, step
from tests.exchange.harness import together

# --- learners that leave ---


@pytest.mark.parametrize("tau", [0, -1, 3])
def test_a_learner_that_left_is_out_of_the_average(tau, tmp_path):
    """Its share goes to the others in proportion, and no learner waits for it, or the time-out would raise."""
    path = tmp_path / "p.json"
    path.write_text(json.dumps([[0.5, 0.25, 0.25], [0.4, 0.2, 0.4], [0.3, 0.3, 0.4]]))
    start = np.random.default_rng(8).standard_normal((3, 5))
    c = crowd(start, matrices(str(path), 3), tau=tau, timeout=5.0)
    c.present[2] = 0  # died before it said anything
    two = c.learners[:2]
    together([partial(step, x) for x in two])
    if tau:  # in whatever order they came
        together([partial(step, x) for x in two])
        together([partial(step, x) for x in two])
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
        assert each.receive(each.params)
    np.testing.assert_allclose(c.weights()[:2], np.full((2, 3), 1 / 3), atol=1e-6)
    x.params.data[:3] = torch.tensor([1.0, 0, 0])
    together([partial(step, x), partial(step, y)])
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
    assert x.receive(x.params)
    assert x.params.data[:2].tolist() == [0.5, 0.5]


@pytest.mark.parametrize(("topology", "tau"), [("ring", 3), ("exponential", 0), ("complete", 3)])
def test_unequal_numbers_of_steps_end(tau, topology):
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
    for name in (
        "begun",
        "published",
        "mixed",
        "joined",
    ):  # a number that no other has reached
        assert c.shared.arrays[name][2] == 13
    lockstep(c.learners[:2], 3)  # numbers 10 to 12: the others neither wait for it nor receive from it
    x = c.weights()[:2]
    assert abs(x).max() < 10
    assert c.shared.arrays["published"].tolist() == [13, 13, 13]
    back.params.grad[:5] = -7.0  # it trains: weights that no other has
    expected = c.weights()
    expected[2] = back.params.data[:5].double().numpy() + 7.0
    everybody = [*c.learners[:2], back]
    lockstep(everybody, 1)
    p = c.learners[0].sequence[13 % len(c.learners[0].sequence)]
    after = np.stack([x.params.data[:5].double().numpy() for x in everybody])
    np.testing.assert_allclose(after, p @ expected, atol=1e-5)
    assert c.shared.arrays["published"].tolist() == c.shared.arrays["mixed"].tolist() == [14, 14, 14]
    assert c.shared.arrays["moved"][2, 13] == pytest.approx(5 * 7.0**2, rel=1e-5)  # from the peer's weights
    lockstep(everybody, 40)
    after = np.stack([x.params.data[:5].double().numpy() for x in everybody])
    assert distance(after) < 1e-4


def test_the_newest_complete_message_is_taken(monkeypatch):
    c = crowd(np.diag([1.0, 2, 3, 4]), matrices("ring", 4), tau=-1)
    arrays = c.shared.arrays
    for j, told in enumerate([5, 9, 7, 0]):
        arrays["published"][j] = arrays["begun"][j] = told
        arrays["message"][j, :4] = 10 * (j + 1)
    c.present[3] = 0
    arrays["begun"][1] += 1  # the newest is half written, and the death of its writer was not noticed
    monkeypatch.setattr("coterie.exchange.gossip.time.sleep", lambda seconds: None)
    back = one(c.shared, c.board, matrices("ring", 4), 3, np.zeros(4), tau=-1, rejoin=True)
    back.__enter__()
    assert back.params.data[:4].tolist() == [30.0] * 4  # learner 2's
    assert arrays["joined"][3] == 12
