"""Proportional priorities: the tree against plain sums, frequencies, importance weights."""

from __future__ import annotations

import numpy as np
import pytest

from coterie.replay.priority import Priorities, SumTree
from coterie.types import CoterieError


@pytest.mark.parametrize("size", [1, 5, 64, 65, 5000, 300_000])
def test_the_tree_finds_what_a_running_sum_finds(size):
    rng = np.random.default_rng(size)
    tree, plain = SumTree(size), np.zeros(size)
    for _ in range(6):
        index = rng.choice(size, min(size, 1000), replace=False)
        value = np.where(rng.random(len(index)) < 0.3, 0.0, rng.exponential(size=len(index)))
        tree.set(index, value)
        plain[index] = value
        if not plain.any():
            continue
        assert tree.total == pytest.approx(plain.sum())
        assert tree.filled == np.count_nonzero(plain)
        mass = rng.random(500) * tree.total
        found, sums = tree.find(mass), plain.cumsum()
        assert (plain[found] > 0).all()
        assert (sums[found] > mass - 1e-9 * sums[-1]).all()
        assert (sums[found] - plain[found] <= mass + 1e-9 * sums[-1]).all()


def test_no_empty_leaf_is_found_at_the_very_ends():
    tree = SumTree(4096)
    tree.set(np.array([7, 70, 700]), np.array([1e-9, 1e9, 1e-9]))
    mass = np.array([0.0, tree.total, np.nextafter(tree.total, 0), tree.total * 2])
    assert set(tree.find(mass).tolist()) <= {7, 70, 700}


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_draws_are_in_proportion_to_priorities_and_weights_make_up_for_it(alpha):
    priorities = Priorities(100, alpha, seed=0)
    value = np.linspace(1, 10, 50)
    priorities.set(np.arange(50) * 2, value)
    drawn = np.bincount(np.concatenate([priorities.draw(100).index for _ in range(4000)]), minlength=100)
    assert not drawn[1::2].any()
    expected = value**alpha / (value**alpha).sum() * drawn.sum()
    np.testing.assert_allclose(drawn[::2], expected, rtol=0.1)
    picks = priorities.draw(64, 0.6)
    index, weight = picks.index, picks.weight
    probability = value[index // 2] ** alpha / (value**alpha).sum()
    expected = (50 * probability) ** -0.6
    np.testing.assert_allclose(weight, expected / expected.max(), rtol=1e-5)


def test_what_is_hidden_is_not_drawn_and_the_highest_stays():
    priorities = Priorities(10, 1.0, seed=0)
    priorities.set(np.arange(10), np.arange(1.0, 11.0))
    assert priorities.highest == 10
    priorities.hide(np.arange(5, 10))
    assert set(priorities.draw(200).index.tolist()) == set(range(5))
    assert priorities.highest == 10
    again = Priorities(10, 1.0, seed=0)
    again.load_state_dict(priorities.state_dict())
    assert again.tree.total == priorities.tree.total
    assert again.highest == 10


def test_a_priority_that_is_not_finite_changes_nothing_or_is_refused():
    priorities = Priorities(4, 1.0, seed=0)
    priorities.set(np.arange(4), np.ones(4))
    priorities.update(priorities.draw(8), np.full(8, np.nan))
    assert priorities.tree.leaves[:4].tolist() == [1.0] * 4
    with pytest.raises(CoterieError, match="a priority is negative, infinite or NaN"):
        priorities.set(np.array([0]), np.array([np.nan]))
