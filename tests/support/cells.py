"""The cells of the matrix, and a few of them that together hold every pair of choices."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import pytest

from coterie.algorithms.table import ALGORITHMS

ON_POLICY = [name for name, kind in ALGORITHMS.items() if kind.on_policy]


def covering(cells: Sequence[tuple[Any, ...]], together: Sequence[tuple[int, ...]]) -> list[tuple[Any, ...]]:
    """The fewest cells, chosen greedily and in a fixed order, that hold every pair of values that any cell holds, and
    all values of the axes `together`.
    """
    axes = [*combinations(range(len(cells[0])), 2), *together]

    def parts(cell: tuple[Any, ...]) -> set[tuple[Any, ...]]:
        return {(some, *(cell[i] for i in some)) for some in axes}

    missing = set().union(*map(parts, cells))
    chosen = []
    while missing:
        best = max(cells, key=lambda cell: len(parts(cell) & missing))
        chosen.append(best)
        missing -= parts(best)
    return chosen


def fast_and_slow(cells: Sequence[tuple[Any, ...]], *together: tuple[int, ...]) -> list[Any]:
    """All cells as test parameters. Those outside of the covering ones are slow."""
    fast = set(covering(cells, together))
    return [cell if cell in fast else pytest.param(*cell, marks=pytest.mark.slow) for cell in cells]
