"""Aggregates over runs and envs as Agarwal et al. (2021, arXiv 2108.13264) recommend: the interquartile mean, and
intervals from a bootstrap that is stratified by env.

Their package rliable finds the same, but needs seaborn and arch below 8, which does not load beside pandas 3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from coterie.types import Array

_ENDS = [0.025, 0.975]  # of 95% intervals
_RESAMPLES, _OF_CURVES = 50_000, 2000  # few seeds have few different means, so that 2,000 may miss the ends' steps


def interquartile_mean(scores: Array, axis: Literal[-1] | None = None) -> Any:
    """Mean of the middle half of `scores`, of all or along the last axis, without a quarter of them, rounded down, at
    each end.
    """
    x = np.sort(scores, axis)
    cut = x.shape[-1] // 4
    return x[..., cut : x.shape[-1] - cut].mean(-1)


def interval(
    strata: Sequence[Array], statistic: Callable[..., Array] = interquartile_mean, seed: int = 0
) -> tuple[float, float]:
    """95% percentile bootstrap interval of `statistic`, which takes an axis, over all scores, resampled within each
    stratum (an env: one score a run). The interval is NaN unless a stratum has two scores.
    """
    if all(len(scores) < 2 for scores in strata):
        return float("nan"), float("nan")
    rng = np.random.default_rng(seed)
    drawn = [scores[rng.integers(len(scores), size=(_RESAMPLES, len(scores)))] for scores in strata]
    low, high = np.quantile(statistic(np.concatenate(drawn, axis=1), axis=-1), _ENDS)
    return float(low), float(high)


def on_grid(series: Sequence[tuple[Array, Array]], points: int = 200) -> tuple[Array, Array]:
    """Curves `(x, y)` on one grid of x that all of them cover, by linear interpolation: `[P]` and `[curves, P]`. One
    that has no two points yet is left out.
    """
    series = [(x, y) for x, y in series if len(x) > 1]
    if not series:
        return np.empty(0), np.empty((0, 0))
    low, high = max(x[0] for x, _ in series), min(x[-1] for x, _ in series)
    if high < low:  # one ends before another begins
        return np.empty(0), np.empty((0, 0))
    grid = np.linspace(low, high, points if high > low else 1)
    return grid, np.stack([np.interp(grid, x, y) for x, y in series])


def band(curves: Array) -> tuple[Array, Array, Array]:
    """Mean over runs of `[runs, P]` and its 95% bootstrap interval point by point, each `[P]`; NaN for a single run."""
    middle = curves.mean(0)
    if len(curves) < 2:
        return middle, np.full_like(middle, np.nan), np.full_like(middle, np.nan)
    rng = np.random.default_rng(0)
    drawn = curves[rng.integers(len(curves), size=(_OF_CURVES, len(curves)))].mean(1)
    low, high = np.quantile(drawn, _ENDS, axis=0)
    return middle, low, high
