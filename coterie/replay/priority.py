"""Proportional priorities (prioritized replay, https://arxiv.org/abs/1511.05952): P(i) = p_i^alpha / sum_j p_j^alpha.

A sum tree in numpy with 64 children to a node: a million leaves are three levels deep, and each level is one gather for
the whole batch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np

from coterie.errors import CoterieError
from coterie.types import Array

LEAST = 1e-6  # lowest priority: rows without error may still be sampled
_WIDTH = 64


def rng_state(rng: np.random.Generator) -> Array:
    """A generator's state, as bytes."""
    return np.frombuffer(json.dumps(rng.bit_generator.state).encode(), np.uint8).copy()


def set_rng_state(rng: np.random.Generator, state: Array) -> None:
    """Set what `rng_state` returned."""
    rng.bit_generator.state = json.loads(state.tobytes())


class SumTree:
    """`size` leaves, float64, not negative; every inner node is the sum of its children."""

    def __init__(self, size: int) -> None:
        self.size, self.levels = size, list[Array]()
        while True:
            blocks = -(-size // _WIDTH)
            self.levels.append(np.zeros((blocks, _WIDTH)))
            if blocks == 1:
                break
            size = blocks
        self.leaves = self.levels[0].reshape(-1)[: self.size]
        self.filled = 0  # leaves that are not 0

    @property
    def total(self) -> float:
        return float(self.levels[-1].sum())

    def set(self, index: Array, value: Array | float) -> None:
        """Write leaves `index` `[k]`, each at most once, and the sums above them. Raises `CoterieError`."""
        if not np.isfinite(value).all() or np.min(value, initial=0.0) < 0:
            raise CoterieError("a priority is negative, infinite or NaN")
        self.filled -= int(np.count_nonzero(self.leaves[index]))
        self.leaves[index] = value
        self.filled += int(np.count_nonzero(self.leaves[index]))
        for below, above in zip(self.levels, self.levels[1:], strict=False):
            index = index // _WIDTH
            if len(index) > _WIDTH:  # to sum the same children again costs less than to sort few
                index = np.unique(index)
            above.reshape(-1)[index] = below[index].sum(1)

    def find(self, mass: Array) -> Array:
        """The leaf `[k]` where the running sum of all leaves passes each `mass` `[k]`, in [0, total). Never an empty
        leaf, even after rounding.
        """
        at, left = np.zeros(len(mass), np.int64), mass
        for level in reversed(self.levels):
            children = level[at]
            sums = children.cumsum(1)
            left = np.minimum(left, np.nextafter(sums[:, -1], 0.0))
            child = (sums <= left[:, None]).sum(1)
            each = np.arange(len(at))
            left = left - (sums[each, child] - children[each, child])
            left = np.maximum(left, 0.0)
            at = at * _WIDTH + child
        return at


@dataclass
class Picks:
    """Drawn samples `[n]`: their places, which insertion each was, and importance weights."""

    index: Array
    stamp: Array
    weight: Array


class Priorities:
    """How likely each of `size` places is sampled; `alpha` 0: all visible ones are equally likely."""

    def __init__(self, size: int, alpha: float, seed: int) -> None:
        self.tree, self.alpha = SumTree(size), alpha
        self.rng = np.random.default_rng(seed)
        self.highest = 1.0  # priority so far; new rows get it and are sampled soon
        self.stamp = np.full(size, -1, np.int64)  # which insertion each place has; the replay writes it

    def set(self, index: Array, priority: Array) -> None:
        """Set priorities `[k]`, before the exponent; 0 hides a place."""
        if len(index):
            self.highest = max(self.highest, float(priority.max(initial=0.0)))
            self.tree.set(index, np.where(priority > 0, priority**self.alpha, 0.0) if self.alpha != 1 else priority)

    def hide(self, index: Array) -> None:
        """Exclude these places from sampling until they are set again."""
        self.tree.set(index, 0.0)

    def draw(self, count: int, beta: float = 0.0, rng: np.random.Generator | None = None) -> Picks:
        """Stratified: one place from each of `count` equal shares of the total priority, with importance weights
        (N P(i))^-beta divided by the largest, float32. `rng`: a separate generator, so that a second reader does not
        change what the owner samples.
        """
        total = self.tree.total
        index = self.tree.find((np.arange(count) + (rng or self.rng).random(count)) * (total / count))
        probability = self.tree.leaves[index] / total
        weight = (self.tree.filled * probability) ** -beta
        return Picks(index, self.stamp[index], (weight / weight.max()).astype(np.float32))

    def update(self, picks: Picks, priority: Array) -> None:
        """New priorities `[k]` of samples, except those that were overwritten or hidden since. A NaN leaves the
        old one.
        """
        at, first = np.unique(picks.index, return_index=True)
        fresh = priority[first]
        keep = (self.stamp[at] == picks.stamp[first]) & (self.tree.leaves[at] > 0) & np.isfinite(fresh)
        self.set(at[keep], np.maximum(fresh[keep], LEAST))

    def state_dict(self) -> dict[str, Array]:
        return {"leaves": self.tree.leaves, "highest": np.array([self.highest]), "rng": rng_state(self.rng)}

    def load_state_dict(self, state: dict[str, Array]) -> None:
        self.tree.set(np.arange(self.tree.size), state["leaves"])
        self.highest = float(state["highest"][0])
        set_rng_state(self.rng, state["rng"])
