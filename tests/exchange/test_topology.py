"""Mixing matrices: what is row-stochastic, what contracts how much."""

from __future__ import annotations

import math
from typing import get_args, get_type_hints

import numpy as np
import pytest

from coterie.config import Gossip
from coterie.errors import ConfigError
from coterie.exchange.topology import contraction, matrices

NAMES = get_args(get_type_hints(Gossip)["topology"])


def connected(sequence):
    """Whether the union of the graphs is strongly connected."""
    reached = np.sum(sequence, 0) > 0
    for _ in range(len(reached).bit_length()):
        reached = reached @ reached  # paths twice as long; every learner is its own in-peer
    return bool(reached.all())


@pytest.mark.parametrize("peers", [1, 2, 3])
@pytest.mark.parametrize(
    ("name", "n"), [(name, n) for name in NAMES for n in range(1, 10) if name != "bipartite" or n % 2 == 0 or n == 1]
)
def test_named_matrices_are_row_stochastic_weigh_oneself_and_connect(name, n, peers):
    sequence = matrices(name, n, peers)
    assert sequence
    for p in sequence:
        assert p.shape == (n, n)
        assert (p >= 0).all()
        assert (np.diagonal(p) > 0).all()
        np.testing.assert_allclose(p.sum(1), 1, atol=1e-12)
        np.testing.assert_allclose(p.sum(0), 1, atol=1e-12)  # the named ones are doubly stochastic
    assert connected(sequence)


@pytest.mark.parametrize(("n", "peers"), [*((n, 1) for n in range(2, 17)), (5, 2), (5, 3), (3, 7)])
def test_in_a_ring_each_receives_from_those_before_it_and_one_peer_contracts_by_the_cosine(n, peers):
    (p,) = matrices("ring", n, peers)
    for i in range(n):
        assert set(np.flatnonzero(p[i])) == {(i - d) % n for d in range(min(peers, n - 1) + 1)}
        assert p[i, i] == pytest.approx(1 / (min(peers, n - 1) + 1))
    if peers == 1:
        assert contraction([p]) == pytest.approx(math.cos(math.pi / n), abs=1e-12)


def test_contraction_is_the_norm_on_what_sums_to_zero():
    """Of a matrix that is not symmetric, nor doubly stochastic: reached by some difference, passed by none."""
    rng = np.random.default_rng(0)
    p = rng.random((5, 5)) + np.eye(5)
    p /= p.sum(1, keepdims=True)
    beta = contraction([p])
    x = rng.standard_normal((5, 20_000))
    x -= x.mean(0)
    y = p @ x
    ratio = np.linalg.norm(y - y.mean(0), axis=0) / np.linalg.norm(x, axis=0)
    assert ratio.max() <= beta + 1e-9
    assert ratio.max() > 0.98 * beta


@pytest.mark.parametrize("n", range(2, 17))
def test_exponential_goes_through_the_powers_of_two(n):
    sequence = matrices("exponential", n)
    assert len(sequence) == math.ceil(math.log2(n))
    for t, p in enumerate(sequence):
        for i in range(n):
            assert set(np.flatnonzero(p[i])) == {i, (i - 2**t) % n}
    assert connected(sequence)
    if n > 2 and n % 2 == 0:
        assert not connected(sequence[1:])  # without the first, even learners receive nothing from odd ones
    if n & (n - 1) == 0:  # one round of a power of two is an exact average
        product = np.linalg.multi_dot([np.eye(n), *reversed(sequence)])
        np.testing.assert_allclose(product, 1 / n, atol=1e-12)
    (static,) = matrices("static-exponential", n)
    assert ((static > 0) == (sum(sequence) > 0)).all()
    two = [{int(j) for j in np.flatnonzero(p[0])} for p in matrices("exponential", 8, 2)]
    assert two == [{0, 7, 6}, {0, 6, 4}, {0, 4, 7}]


def test_bipartite_pairs_even_with_odd_and_refuses_odd_numbers():
    for n in (2, 4, 6, 8):
        sequence = matrices("bipartite", n)
        met = set()
        for p in sequence:
            np.testing.assert_array_equal(p, p.T)
            assert ((p > 0).sum(1) == 2).all()
            met |= {(int(i), int(j)) for i, j in np.argwhere(p > 0) if i != j}
        assert met == {(i, j) for i in range(n) for j in range(n) if (i + j) % 2}
    for n in (3, 5, 7, 9):
        with pytest.raises(ConfigError, match=rf"^gossip\.topology: bipartite needs an even .* not {n}$"):
            matrices("bipartite", n)
