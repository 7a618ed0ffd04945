"""Mixing matrices of gossip: which learner averages with which (GALA, Assran et al. 2019, sections 3 and 4).

Row i of a matrix says how learner i weighs its own weights and those of its in-peers. Rows sum to one, columns may not.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from coterie.types import Array, ConfigError

NAMES = ("ring", "exponential", "static-exponential", "bipartite", "complete")


def matrices(topology: str, n: int, peers: int = 1) -> list[Array]:
    """The sequence of `[n, n]` matrices to cycle through; `topology` is a name or a file.

    ring: the `peers` learners before one. exponential: one peer at distance 1, 2, 4, ... in turns (`peers` of them at a
    time). static-exponential: all of these at once. bipartite: even and odd learners in changing pairs. complete: all.
    """
    if n == 1:
        return [np.ones((1, 1))]
    distances = [2**k for k in range(max(1, math.ceil(math.log2(n))))]
    if topology == "ring":
        return [_circulant(n, list(range(1, min(peers, n - 1) + 1)))]
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
    return _from_file(topology, n)


def _circulant(n: int, distances: list[int]) -> Array:
    """Each learner and those `distances` before it, all weighed alike."""
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


def _from_file(path: str, n: int) -> list[Array]:
    """A JSON file with one matrix or a list of matrices."""
    try:
        data: Any = np.asarray(json.loads(Path(path).read_text()), float)
    except (OSError, ValueError, TypeError) as error:
        text = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise ConfigError(
            f"gossip.topology: {path!r} is none of {', '.join(NAMES)}, nor a JSON file of matrices ({text})"
        ) from None
    if data.ndim == 2:
        data = data[None]
    if data.ndim != 3 or data.shape[1:] != (n, n):
        raise ConfigError(f"gossip.topology: {path} holds {list(data.shape)}; {n} learners need [{n}, {n}] matrices")
    if not np.isfinite(data).all() or (data < 0).any() or not np.allclose(data.sum(2), 1, atol=1e-6):
        raise ConfigError(f"gossip.topology: {path} is not row-stochastic (entries >= 0, rows that sum to 1)")
    if (np.diagonal(data, axis1=1, axis2=2) <= 0).any():
        raise ConfigError(f"gossip.topology: {path}: a learner must weigh itself with more than 0")
    if not connected(list(data)):
        raise ConfigError(f"gossip.topology: {path} never connects all learners: some learners never influence others")
    return [m / m.sum(1, keepdims=True) for m in data]


def connected(sequence: list[Array]) -> bool:
    """Whether the union of the graphs is strongly connected."""
    reached = np.sum(sequence, 0) > 0
    for _ in range(len(reached).bit_length()):
        reached = reached @ reached  # paths twice as long; every learner is its own in-peer
    return bool(reached.all())


def delayed(matrix: Array, tau: int) -> float:
    """What one mix leaves of the distance to consensus, in the long run, when every message is `tau` mixes late.

    The second largest modulus of an eigenvalue of the matrix on the weights and their last `tau` versions
    (Hadjicostis and Charalambous 2014).
    """
    n = len(matrix)
    own = np.diag(np.diag(matrix))
    whole = np.zeros((n * (tau + 1), n * (tau + 1)))
    whole[:n, :n] += own
    whole[:n, n * tau :] += matrix - own
    whole[n:, : n * tau] = np.eye(n * tau)
    return float(np.sort(np.abs(np.linalg.eigvals(whole)))[-2])


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
