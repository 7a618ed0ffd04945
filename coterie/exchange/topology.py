"""Mixing matrices of gossip: which learner averages with which (GALA, Assran et al. 2019, sections 3 and 4).

Row i of a matrix says how learner i weighs its own weights and those of its in-peers. Rows sum to one, columns may not.
"""

from __future__ import annotations

import math

import numpy as np

from coterie.errors import ConfigError
from coterie.types import Array


def matrices(topology: str, n: int, peers: int = 1) -> list[Array]:
    """The sequence of `[n, n]` matrices to cycle through; `topology` is one of config.Gossip's, auto is ring.

    ring: the `peers` learners before one. exponential: one peer at distance 1, 2, 4, ... in turns (`peers` of them at a
    time). static-exponential: all of these at once. bipartite: even and odd learners in changing pairs. complete: all.
    """
    if n == 1:
        return [np.ones((1, 1))]
    distances = [2**k for k in range(max(1, math.ceil(math.log2(n))))]
    if topology == "exponential":
        k = len(distances)
        return [_circulant(n, [distances[(t + j) % k] for j in range(min(peers, k))]) for t in range(k)]
    if topology == "static-exponential":
        return [_circulant(n, distances)]
    if topology == "complete":
        return [np.full((n, n), 1 / n)]
    if topology == "bipartite":
        if n % 2:
            raise ConfigError(f"gossip.topology: bipartite needs an even number of learners, not {n}")
        return [_pairs(n, t) for t in range(n // 2)]
    return [_circulant(n, list(range(1, min(peers, n - 1) + 1)))]


def _circulant(n: int, distances: list[int]) -> Array:
    """Each learner and those `distances` before it, weighted equally."""
    matrix = np.zeros((n, n))
    for i in range(n):
        in_peers = {i, *((i - d) % n for d in distances)}
        matrix[i, list(in_peers)] = 1 / len(in_peers)
    return matrix


def _pairs(n: int, t: int) -> Array:
    matrix = np.eye(n) / 2
    for even in range(0, n, 2):
        odd = (even + 2 * t + 1) % n
        matrix[even, odd] = matrix[odd, even] = 0.5
    return matrix


def contraction(sequence: list[Array]) -> float:
    """beta of GALA's Proposition 1: the most that one mix leaves of the distance to the mean (1: nothing is gained).

    The norm of Q P Q^T, with the rows of Q an orthonormal basis of what sums to zero; the largest of the sequence. For
    a ring that halves it is cos(pi / n), for the complete graph 0.
    """
    n = len(sequence[0])
    if n == 1:
        return 0.0
    basis = np.linalg.svd(np.ones((1, n)))[2][1:]
    return max(float(np.linalg.norm(basis @ p @ basis.T, 2)) for p in sequence)
