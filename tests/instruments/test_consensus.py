"""Metrics of the learners' agreement: distance and bounds, and the similarity of gradients."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch

from coterie.exchange.gossip import RECENT
from coterie.exchange.solo import Solo
from coterie.exchange.topology import contraction, matrices
from coterie.instruments.consensus import Consensus, Cosines, GradientSamples, cosine_memory
from tests.exchange.gossip_harness import Crowd, crowd, distance, step
from tests.exchange.harness import flat, make_setup, together

# --- distance to consensus ---


def train(c: Crowd, rounds: int, seed: int) -> None:
    """Noisy gradients of one quadratic for each learner, in lockstep."""
    rng = np.random.default_rng(seed)
    noise = torch.as_tensor(rng.standard_normal((rounds, len(c.learners), c.size)), dtype=torch.float32)

    def run(i: int) -> None:
        x = c.learners[i]
        for k in range(rounds):
            x.params.grad[: c.size] = x.params.data[: c.size] - i + noise[k, i]
            x.step(x.params, 0.1)

    together([partial(run, i) for i in range(len(c.learners))])


def test_the_bound_is_proposition_1s():
    sequence = matrices("ring", 3)
    c = crowd(np.zeros((3, 1)), sequence, tau=0)
    reader, bound = Consensus(c.shared, sequence, 0), 0.0
    for lengths in ((3.0, 0.0, 4.0), (0.0, 0.0, 2.0), (1.0, 1.0, 1.0)):
        for x, length in zip(c.learners, lengths, strict=True):
            x.params.grad[0] = length
        together([partial(x.step, x.params, 1.0) for x in c.learners])
        bound = contraction(sequence) * (bound + math.sqrt(sum(n * n for n in lengths)))
        assert reader.read()["consensus/bound"] == pytest.approx(bound, rel=1e-5)


def test_no_bound_where_lengths_were_overwritten_before_they_were_read():
    sequence = matrices("ring", 2)
    c = crowd(np.zeros((2, 1)), sequence, tau=0)
    reader = Consensus(c.shared, sequence, 0)
    for name in ("begun", "published", "mixed"):
        c.shared.arrays[name][:] = RECENT + 10
    train(c, 3, 0)
    assert set(reader.read()) == {"consensus/distance"}


def test_a_radius_at_a_finite_tau_and_only_the_distance_without():
    sequence = matrices("ring", 3)
    start = np.array([[0.0], [1.0], [5.0]])
    for tau in (2, -1):
        c = crowd(start, sequence, tau=tau)
        for x in c.learners:
            x.params.grad[0] = 1.0
            step(x)
        found = Consensus(c.shared, sequence, tau).read()
        said = c.shared.arrays["message"][:, :1].astype(float)
        assert found["consensus/distance"] == pytest.approx(distance(said))
        assert ("consensus/radius" in found) == (tau > 0)
        if tau > 0:
            assert math.isfinite(found["consensus/radius"])
            assert found["consensus/radius"] > 0


def test_no_distance_is_reported_while_a_message_is_being_written():
    sequence = matrices("ring", 2)
    c = crowd(np.zeros((2, 4)), sequence, tau=0)
    train(c, 2, 0)
    c.shared.arrays["begun"][1] += 1
    assert Consensus(c.shared, sequence, 0).read() == {}


# --- gradients ---


def test_cosines_of_pairs_of_peers_and_of_others():
    shared = cosine_memory(3, 2)
    reader = Cosines(shared, matrices("ring", 3)[0] * [[1, 1, 0], [1, 1, 0], [0, 0, 1]])  # 0 and 1 are peers
    a = shared.arrays
    assert reader.read() == {}
    a["grad"][:] = [[2, 0], [0, -3], [-1, 0]]
    a["begun"][:] = a["stamp"][:] = [1, 1, 0]
    assert reader.read() == {}  # one has none yet
    a["begun"][2] = a["stamp"][2] = 1
    found = reader.read()
    assert found == pytest.approx(
        {"cosine/0-1": 0, "cosine/0-2": -1, "cosine/1-2": 0, "cosine/peers": 0, "cosine/others": -0.5}
    )
    assert reader.read() == {}  # the same gradients again
    a["begun"][0] = 2
    a["stamp"][1] = a["begun"][1] = 2
    assert reader.read() == {}  # learner 0 is writing
    a["grad"][0] = [0, -1]
    a["stamp"][0] = 2
    assert reader.read()["cosine/peers"] == pytest.approx(1)
    shared.close()


def test_gradients_are_sampled_every_n_steps_before_the_exchange():
    params, shared = flat(4), cosine_memory(2, 16)
    inner = Solo(make_setup(params, clip=0.5))
    observer = GradientSamples(params, shared, 1, every=10)
    taken = []
    for k in range(6):
        params.grad[:4] = 8.0 + k
        observer.gradient(4 * k, None, None)  # 0, 4, 8, 12, ...: the first, and the first past 10 and past 20
        inner.step(params, 1.0)
        taken.append(int(shared.arrays["stamp"][1]))
        if k in (3, 4):
            assert shared.arrays["grad"][1, :4].tolist() == [11.0] * 4  # and not clipped
    assert taken == [1, 1, 1, 2, 2, 3]
    assert shared.arrays["stamp"][0] == 0
    shared.close()
