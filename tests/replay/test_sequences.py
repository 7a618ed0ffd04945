"""Replay of sequences against a list of all rollouts: what may be drawn, and what is read there."""

from __future__ import annotations

import numpy as np
import pytest

from coterie.replay.priority import Picks
from coterie.replay.sequences import Blocks, SequenceReplay
from coterie.replay.storage import Capacity
from tests.replay.lives import DICT, IMAGE, PLACES, STACK, Life, is_at, put, tell

UNROLL, BLOCKS, KEPT = 4, 3, 7  # rows of a rollout, rollouts of a sequence and of an env

Told = list[list[tuple[int, int]]]  # of each ring all rollouts so far: whose, and which row of that life was the first


def drawable(told: Told, stride: int) -> dict[int, tuple[int, int, int]]:
    """What should be drawn, by its place: the number of its first rollout, whose it is, and its first row."""
    found = {}
    for env, all_of_it in enumerate(told):
        for i in range(max(0, len(all_of_it) - KEPT), len(all_of_it) - BLOCKS + 1):
            env_id, row = all_of_it[i]
            follows = all_of_it[i : i + BLOCKS] == [(env_id, row + k * UNROLL) for k in range(BLOCKS)]
            if follows and i % stride == 0:
                found[env * KEPT + i % KEPT] = i, env_id, row
    return found


def check(ring: SequenceReplay, lives: dict[int, Life], told: Told) -> int:
    at, expected = np.flatnonzero(ring.priorities.tree.leaves > 0), drawable(told, ring.blocks.stride)
    assert set(at.tolist()) == expected.keys()
    assert ring.size == len(at)
    if not len(at):
        return 0
    found = ring.gather(Picks(at, ring.stamp[at], np.ones(len(at), np.float32)))
    seen = found.inputs.obs if isinstance(found.inputs.obs, dict) else {"": found.inputs.obs}
    for i, place in enumerate(at.tolist()):
        number, env_id, row = expected[place]
        life, end = lives[env_id], row + BLOCKS * UNROLL
        action, reward, terminated, _, valid = map(list, zip(*life.rows[row:end], strict=True))
        before = life.rows[row - 1] if row else (0, 0.0)
        assert ring.stamp[place] == number
        assert found.core_state[i].tolist() == [env_id, row]
        assert found.inputs.is_first[:, i].tolist() == life.first[row : end + 1]
        assert found.inputs.prev_action[:, i].tolist() == [before[0], *action]
        assert found.inputs.prev_reward[:, i].tolist() == [before[1], *reward]
        assert found.action[:, i].tolist() == action
        assert found.reward[:, i].tolist() == [2 * x for x in reward]
        assert found.terminated[:, i].tolist() == terminated
        assert found.mask[:, i].tolist() == valid
        for key, x in seen.items():
            assert np.array_equal(x[:, i].cpu().numpy(), np.stack([obs[key] for obs in life.seen[row : end + 1]]))
    return len(at)


@pytest.mark.parametrize("spec", [IMAGE, DICT], ids=["frames", "dict"])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("place", PLACES)
def test_what_may_be_drawn_is_rows_that_followed_each_other(tmp_path, spec, stride, place):
    rng = np.random.default_rng(stride)
    lives = {env_id: Life(rng, spec, number=env_id) for env_id in (3, 17, 1 << 20, 5)}  # more than there are rings
    frames = STACK if spec is IMAGE and stride == 1 else 0  # or whole stacks
    room, blocks = Capacity(spec, 3, 3 * KEPT * UNROLL, frames), Blocks(UNROLL, BLOCKS, stride, (2,))
    ring = SequenceReplay(put(room, place, tmp_path), blocks, 0.6)
    assert is_at(place, ring)
    each = next(iter(ring.obs.values())).rows.nbytes
    assert each <= 3 * KEPT * (UNROLL + STACK) * 20 if frames else spec is DICT or each == 3 * KEPT * (UNROLL + 1) * 60
    told: Told = [[], [], []]
    checked = 0
    for _ in range(80):
        ids = rng.choice([*lives], 3, p=[0.32, 0.32, 0.32, 0.04]).tolist()  # an env may be there twice
        whole = tell(lives, ids, UNROLL, rng)
        ring.add(whole, 2 * whole.reward.numpy())
        for env_id, (_, row) in zip(ids, whole.core_state.tolist(), strict=True):
            told[ring.rings.of[env_id]].append((env_id, int(row)))
        checked += check(ring, lives, told)
        if ring.size:
            ring.priorities.update(ring.priorities.draw(8), rng.exponential(size=8))
    assert min(map(len, told)) > 5 * KEPT
    assert checked > 200
    again = SequenceReplay(room, blocks, 0.6)
    again.load_state_dict({k: x.clone() for k, x in ring.state_dict().items()})
    assert check(again, lives, told)
