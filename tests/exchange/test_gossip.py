"""Gossip: what mixing does to the weights, and the bound of Proposition 1 on how far learners may be apart."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch

from coterie.exchange.gossip import Gossip
from coterie.exchange.topology import contraction, matrices
from coterie.models.heads import Moments, Normalizer
from coterie.ops.optim import RMSProp
from coterie.types import Array
from tests.exchange.gossip_harness import changes_of, crowd, distance, lockstep, step
from tests.exchange.harness import gradients, together

# --- what a mix does ---


@pytest.mark.parametrize("topology", ["ring", "exponential", "static-exponential", "bipartite", "complete"])
def test_in_lockstep_the_weights_are_the_product_of_the_sequence(topology):
    """Learner i begins with the i-th unit vector: the weights are the product of the matrices, step by step."""
    n, count = 6, 7
    sequence = matrices(topology, n)
    c = crowd(np.eye(n), sequence)
    history: list[list[Array]] = [[] for _ in range(n)]

    def run(i: int) -> None:
        for _ in range(count):
            step(c.learners[i])
            history[i].append(c.learners[i].params.data[:n].double().numpy())

    together([partial(run, i) for i in range(n)])
    product = np.eye(n)
    for k in range(count):
        product = sequence[k % len(sequence)] @ product
        np.testing.assert_allclose(np.stack([h[k] for h in history]), product, atol=1e-6)


@pytest.mark.parametrize("leaver", [None, 2])
@pytest.mark.parametrize("topology", ["ring", "exponential", "complete"])
def test_whatever_the_order_products_are_row_stochastic(topology, leaver):
    """No two in step, some much slower, one leaves: the weights of each stay a convex combination."""
    n, rng = 5, np.random.default_rng(3)
    c = crowd(np.eye(n), matrices(topology, n), tau=-1)
    chances = np.array([0.4, 0.3, 0.15, 0.1, 0.05])
    gone = set()
    for k in range(400):
        i = int(rng.choice(n, p=chances))
        if k == 150 and leaver is not None:
            c.learners[leaver].__exit__(None, None, None)
            gone.add(leaver)
        if i not in gone:
            step(c.learners[i])
            x = c.weights()
            assert (x >= 0).all()
            np.testing.assert_allclose(x.sum(1), 1, atol=1e-5)
    assert sum(x.skipped_messages for x in c.learners) > 0  # it was not in lockstep
    alive = [i for i in range(n) if i not in gone]
    assert (c.shared.arrays["mixed"][alive] > 5).all()
    assert distance(c.weights()[alive]) < 0.1  # 2 at first


def test_a_sequence_that_is_not_doubly_stochastic_converges_to_its_left_eigenvector():
    p = np.array([[0.7, 0.3, 0, 0], [0, 0.5, 0.5, 0], [0.1, 0, 0.6, 0.3], [0.5, 0, 0.2, 0.3]])
    values, vectors = np.linalg.eig(p.T)
    pi = np.real(vectors[:, np.argmax(np.real(values))])
    pi /= pi.sum()
    assert np.ptp(pi) > 0.1  # not the plain mean
    start = np.random.default_rng(4).standard_normal((4, 6))
    c = crowd(start, [p])
    for _ in range(60):
        c.round()
    np.testing.assert_allclose(c.weights(), np.outer(np.ones(4), pi @ start), atol=1e-5)


def test_gossip_updates_before_it_publishes():
    """Line 3 before line 5 of Algorithm 1: the message and the average include this step's gradient."""
    start = np.random.default_rng(6).standard_normal((2, 16))
    c = crowd(start, matrices("ring", 2))
    grads = [gradients(x.params, 1, seed=x.rank)[0] for x in c.learners]
    together([partial(step, x, g, 0.1) for x, g in zip(c.learners, grads, strict=True)])
    moved = start - 0.1 * np.stack([g[:16].numpy() for g in grads])
    np.testing.assert_allclose(c.weights(), np.tile(moved.mean(0), (2, 1)), atol=1e-6)
    np.testing.assert_allclose(c.shared.arrays["message"][:, :16], moved, atol=1e-6)


@pytest.mark.parametrize("mix_every", [0, 1, 3])
def test_a_learner_mixes_every_n_steps_or_once_a_rollout(mix_every):
    c = crowd(np.eye(2), matrices("complete", 2), mix_every=mix_every)

    def run(x: Gossip) -> None:
        for _ in range(3):  # rollouts of four steps
            for _ in range(4):
                step(x)
            x.after_rollout(x.params)

    together([partial(run, x) for x in c.learners])
    assert c.shared.arrays["mixed"].tolist() == [{0: 3, 1: 12, 3: 4}[mix_every]] * 2
    assert [x.updates for x in c.learners] == [12, 12]


def test_moments_are_mixed_with_the_same_weights():
    p = matrices("ring", 3)[0]
    norms = [[Normalizer((2,)), Normalizer(())] for _ in range(3)]
    rng = torch.Generator().manual_seed(0)
    for i, pair in enumerate(norms):
        for norm in pair:
            norm.update(torch.randn(10 + 5 * i, *norm.mean.shape, generator=rng) * (i + 1) + i)
    before = np.stack([Moments(pair).read().numpy() for pair in norms])
    c = crowd(np.eye(3), [p], norms)
    lockstep(c.learners)
    after = np.stack([Moments(pair).read().numpy() for pair in norms])
    np.testing.assert_allclose(after, p @ before, rtol=1e-9)
    assert [float(pair[0].count) for pair in norms] == [15.0, 12.5, 17.5]
    for _ in range(60):
        c.round()
    expected = before.mean(0)
    np.testing.assert_allclose(float(norms[0][0].count), expected[0], rtol=1e-6)
    np.testing.assert_allclose(norms[1][0].mean.numpy(), expected[1:3] / expected[0], rtol=1e-6)


# --- how far learners may be apart ---


UNEVEN = [np.array([[0.6, 0.4, 0, 0], [0.1, 0.5, 0.4, 0], [0, 0.2, 0.6, 0.2], [0.3, 0, 0.2, 0.5]])]


@pytest.mark.parametrize(
    ("sequence", "rule", "steps"),
    [(matrices("ring", 4), "sgd", 1), (UNEVEN, "rmsprop", 1), (matrices("exponential", 4), "sgd", 3)],
)
def test_proposition_1_bounds_the_distance_to_the_mean(sequence, rule, steps):
    """b_{k+1} = beta (b_k + ||U_k||_F), with the lengths that the learners wrote down; noisy gradients of a quadratic.

    `steps` updates between two mixes count as one.
    """
    n, size, count = 4, 30, 60
    rng = np.random.default_rng(10)
    goals, noise = rng.standard_normal((n, size)) * 3, rng.standard_normal((count, steps, n, size)) * 2
    c = crowd(np.tile(rng.standard_normal(size), (n, 1)), sequence, mix_every=0)  # all begin alike
    shared, changes = changes_of(c)
    history: list[list[Array]] = [[] for _ in range(n)]
    lengths: list[list[float]] = [[] for _ in range(n)]
    if rule == "rmsprop":
        for x in c.learners:
            x.rule = RMSProp(0.9, 1e-3)
            x.state = x.rule.state(x.params.data)

    def run(i: int) -> None:
        x = c.learners[i]
        for k in range(count):
            here = x.params.data[:size].clone()
            for noises in noise[k]:
                x.params.grad[:size] = x.params.data[:size] - torch.as_tensor(goals[i] + noises[i], dtype=torch.float32)
                x.step(x.params, 0.05)
            lengths[i].append(float((x.params.data[:size] - here).double().norm()))
            x.after_rollout(x.params)
            changes[i].rollout(None, 0.0)
            history[i].append(x.params.data[:size].double().numpy())

    together([partial(run, i) for i in range(n)])
    moved = shared.arrays["squares"][:, :count]
    np.testing.assert_allclose(np.sqrt(moved), lengths, rtol=1e-4)
    bound, largest = 0.0, 0.0
    for k in range(count):
        bound = contraction([sequence[k % len(sequence)]]) * (bound + math.sqrt(moved[:, k].sum()))
        apart = distance(np.stack([h[k] for h in history]))
        assert apart <= bound * (1 + 1e-5)
        largest = max(largest, apart / bound)
    assert largest > 0.1  # no bound that anything would keep
    alone = distance(goals) * (1 - 0.95 ** (count * steps))  # where they would be without mixing, but for the noise
    assert rule == "rmsprop" or alone > 3 * apart
