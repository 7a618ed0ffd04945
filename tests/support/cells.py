"""The cells of the matrix, and a few of them that together hold every pair of choices."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import pytest

from coterie.algorithms.table import ALGORITHMS

ON_POLICY = [name for name, kind in ALGORITHMS.items() if kind.on_policy]


def _pairs(cell: Sequence[Any]) -> set[tuple[int, Any, int, Any]]:
    return {(i, cell[i], j, cell[j]) for i, j in combinations(range(len(cell)), 2)}


def covering(cells: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """The fewest cells, chosen greedily and in a fixed order, that hold every pair of values that any cell holds."""
    missing = set().union(*(_pairs(cell) for cell in cells))
    chosen = []
    while missing:
        best = max(cells, key=lambda cell: len(_pairs(cell) & missing))
        chosen.append(best)
        missing -= _pairs(best)
    return chosen


def fast_and_slow(cells: Sequence[tuple[Any, ...]]) -> list[Any]:
    """All cells as test parameters. Those outside of the covering ones are slow."""
    fast = set(covering(cells))
    return [cell if cell in fast else pytest.param(*cell, marks=pytest.mark.slow) for cell in cells]
