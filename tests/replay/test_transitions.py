"""Priorities, and replay of transitions against a list of everything that happened: what is drawn and read."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from coterie.errors import ConfigError, CoterieError
from coterie.replay.priority import Picks, Priorities, SumTree
from coterie.replay.storage import Capacity
from coterie.replay.transitions import TransitionReplay
from tests.replay.lives import COLOR, DICT, GAMMA, IMAGE, PLACES, STACK, Life, is_at, join, put, tell


def drawable(ring: TransitionReplay, lives: dict[int, Life], n: int) -> dict[int, tuple[Life, int]]:
    """What should be drawn, by its place."""
    spare = STACK - 1 if ring.room.frames else 0
    expected = {}
    for env_id, life in lives.items():
        count, env = len(life.seen) - 1, ring.rings.of[env_id]
        assert ring.count[env] == count
        for row in range(max(0, count - ring.ring + 1 + spare), count - n + 1):
            if life.rows[row][4]:
                expected[env * ring.ring + row % ring.ring] = (life, row)
    return expected


def check(ring: TransitionReplay, lives: dict[int, Life], n: int) -> int:
    at, expected = np.flatnonzero(ring.priorities.tree.leaves > 0), drawable(ring, lives, n)
    assert set(at.tolist()) == expected.keys()
    assert ring.size == len(at)
    if not len(at):
        return 0
    found = ring.gather(Picks(at, ring.stamp[at], np.ones(len(at), np.float32)))
    for i, place in enumerate(at.tolist()):
        life, row = expected[place]
        total, discount, then = life.transition(row, n)
        assert ring.stamp[place] == row
        assert int(found.action[i]) == life.rows[row][0]
        assert float(found.n_step[i]) == pytest.approx(total, abs=1e-5)
        assert float(found.discount[i]) == pytest.approx(discount, abs=1e-6)
        for got, want in ((found.obs, life.seen[row]), (found.next_obs, life.seen[then])):
            for key, x in want.items():
                assert np.array_equal((got if key == "" else got[key])[i].cpu().numpy(), x)
    return len(at)


@pytest.mark.parametrize("spec", [IMAGE, COLOR, DICT], ids=["frames", "color", "dict"])
@pytest.mark.parametrize("n", [1, 3, 5])
@pytest.mark.parametrize("place", PLACES)
def test_what_may_be_drawn_and_what_is_read(tmp_path, spec, n, place):
    rng = np.random.default_rng(n)
    lives = {env_id: Life(rng, spec) for env_id in (3, 17, 1 << 20)}
    frames = 0 if spec is DICT else STACK  # of a stack of frames in color nothing is left out
    room = Capacity(spec, 3, 3 * 31, frames)
    ring = TransitionReplay(put(room, place, tmp_path), GAMMA, n, alpha=0.6)
    assert is_at(place, ring)
    checked = 0
    for turn in range(40):
        steps = int(rng.integers(1, 9))
        ids = [int(rng.choice(list(lives))) for _ in range(3)] if turn else list(lives)  # an env may be there twice
        whole = tell(lives, ids, steps, rng)
        ring.add(whole, whole.reward.numpy())
        checked += check(ring, lives, n)
    assert checked > 1000
    for other in (room, replace(room, device=torch.device("cpu"))):  # a checkpoint may go on elsewhere
        again = TransitionReplay(other, GAMMA, n, alpha=0.6)
        again.load_state_dict({k: x.clone() for k, x in ring.state_dict().items()})
        assert check(again, lives, n)
    assert any(len(x.whole) for x in ring.obs.values()) == (spec is IMAGE)


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_priorities_are_kept_over_wraps_and_late_updates(alpha):
    rng = np.random.default_rng(0)
    lives = {env_id: Life(rng, DICT) for env_id in (3, 17)}
    ring, highest, late = TransitionReplay(Capacity(DICT, 2, 2 * 61), GAMMA, 3, alpha=alpha), 1.0, 0
    known: dict[tuple[int, int], float] = {}  # by place and row, of all that may be drawn
    for turn in range(80):
        picks = ring.priorities.draw(32) if turn else None
        whole = tell(lives, list(lives), int(rng.integers(4, 9)), rng)
        ring.add(whole, whole.reward.numpy())
        rows = [(place, row) for place, (_, row) in drawable(ring, lives, 3).items()]
        known = {x: known.get(x, highest) for x in rows}
        if picks is None:
            continue
        fresh = rng.uniform(0.5, 4.0 if turn < 40 else 2.0, 32)
        ring.priorities.update(picks, fresh)
        written = dict(zip(zip(picks.index[::-1], picks.stamp[::-1], strict=True), fresh[::-1], strict=True))
        late += len(written.keys() - known.keys())
        known |= {x: priority for x, priority in written.items() if x in known}
        highest = max(highest, *known.values())
    assert late > 0
    assert ring.count.min() > 5 * ring.ring
    leaves = np.zeros(122)
    leaves[[place for place, _ in known]] = np.array([*known.values()]) ** alpha
    np.testing.assert_allclose(ring.priorities.tree.leaves, leaves, rtol=1e-12)


def test_a_new_env_takes_the_ring_of_the_least_recently_used_one():
    rng = np.random.default_rng(0)
    ring, lives = TransitionReplay(Capacity(DICT, 2, 40), GAMMA, 2), {i: Life(rng, DICT) for i in range(4)}
    for env_id in (0, 1, 0, 2):
        whole = join([lives[env_id].live(5, False)], [env_id])
        ring.add(whole, whole.reward.numpy())
    assert ring.rings.of == {0: 0, 2: 1}
    # Nothing of env 1 leads into env 2.
    assert ring.after[ring.ring + 4] != 0
    assert ring.count.tolist() == [10, 11]


def test_first_priorities_are_the_errors_of_the_values_that_acted():
    rng = np.random.default_rng(0)
    life = Life(rng, DICT)
    ring = TransitionReplay(Capacity(DICT, 1, 200), GAMMA, 3, alpha=1.0, from_values=True)
    values = rng.normal(size=101).astype(np.float32)
    for i in range(10):
        whole = join([life.live(10, False)], [0])
        whole.behavior_value = torch.from_numpy(values[10 * i : 10 * i + 11, None])
        ring.add(whole, whole.reward.numpy())
    for row in range(98):
        total, discount, then = life.transition(row, 3)
        expected = abs(total + discount * values[then] - values[row]) if life.rows[row][4] else 0
        assert ring.priorities.tree.leaves[row] == pytest.approx(expected, abs=1e-4)


def test_a_ring_shorter_than_a_rollout_is_refused():
    whole = Life(np.random.default_rng(0), DICT).live(9, False)
    with pytest.raises(ConfigError, match=r"^replay\.capacity: 10 rows for each env are too few for rollouts of 9"):
        TransitionReplay(Capacity(DICT, 1, 10), GAMMA, 2).add(whole, whole.reward.numpy())


def test_the_bytes_of_a_replay_are_known_before_it_is_made():
    room = Capacity(IMAGE, 4, 1000, STACK)
    ring = TransitionReplay(room, GAMMA, 1)
    kept = [ring.action, ring.reward, ring.value, ring.after, ring.valid, ring.stamp, ring.priorities.tree.leaves]
    kept += [x for s in ring.obs.values() for x in (s.rows, s.depth)]
    assert TransitionReplay.bytes_for(room) == sum(x.nbytes for x in kept)


# --- priorities ---


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
