"""Aggregates beside hand-computed values and the properties of a bootstrap."""

from __future__ import annotations

import numpy as np
import pytest

from coterie.tools.report.stats import band, interquartile_mean, interval, on_grid


def test_the_interquartile_mean_is_of_the_middle_half():
    assert interquartile_mean(np.array([9.0, -100, 2, 4, 1e6, 3, 5, 8])) == pytest.approx((3 + 4 + 5 + 8) / 4)
    assert interquartile_mean(np.array([1.0, 2.0, 6.0])) == pytest.approx(3.0)  # a quarter of three is none
    assert interquartile_mean(np.arange(10.0).reshape(2, 5)) == pytest.approx(np.arange(2, 8).mean())


def test_an_interval_covers_the_mean_at_its_level():
    rng = np.random.default_rng(3)
    hits = 0
    for k in range(200):
        low, high = interval([rng.normal(5, 2, 20), rng.normal(1, 2, 20)], np.mean, seed=k)
        hits += low < 3 < high
    assert 0.88 <= hits / 200 <= 0.99


def test_the_bootstrap_is_stratified():
    low, high = interval([np.full(5, 0.0), np.full(5, 10.0)], np.mean)
    assert low == high == 5.0  # mixed together, a draw could be all of one game


def test_one_run_has_no_interval():
    assert np.isnan(interval([np.array([3.0]), np.array([4.0])])).all()
    middle, low, high = band(np.array([[1.0, 2.0]]))
    assert middle.tolist() == [1.0, 2.0]
    assert np.isnan([low, high]).all()


def test_a_band_contains_the_mean_and_shrinks_where_curves_agree():
    middle, low, high = band(np.array([[1.0, 4.0], [3.0, 4.0], [5.0, 4.0]]))
    assert middle.tolist() == [3.0, 4.0]
    assert low[0] < 3 < high[0]
    assert low[1] == high[1] == 4.0


def test_curves_are_interpolated_on_their_common_range():
    grid, curves = on_grid([(np.array([0.0, 10]), np.array([0.0, 10])), (np.array([4.0, 8]), np.array([1.0, 3]))], 5)
    assert grid.tolist() == [4, 5, 6, 7, 8]
    assert curves.tolist() == [[4, 5, 6, 7, 8], [1, 1.5, 2, 2.5, 3]]
    assert on_grid([(np.array([0.0, 1]), np.zeros(2)), (np.array([2.0, 3]), np.zeros(2))])[0].size == 0
    assert on_grid([(np.empty(0), np.empty(0))])[0].size == 0
