"""Replay of transitions against a list of everything that happened: what may be drawn, and what is read there."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from coterie.replay.priority import Picks
from coterie.replay.ring import Ring
from coterie.types import ActionSpec, ConfigError, CoterieError, ObsSpec, Rollout, Spec

GAMMA = 0.9
STACK = 3
IMAGE = Spec("x", {"": ObsSpec((STACK, 5, 4), "uint8")}, ActionSpec("categorical", (4,)))
DICT = Spec("x", {"a": ObsSpec((3,), "float32"), "b": ObsSpec((2, 2), "int64")}, ActionSpec("categorical", (4,)))


@dataclass
class Life:
    """All rows of one env: what was seen, done and got, and what the row was followed by."""

    rng: np.random.Generator
    spec: Spec
    seen: list[dict[str, np.ndarray]] = field(default_factory=list)
    first: list[bool] = field(default_factory=list)
    rows: list[tuple[int, float, bool, bool, bool]] = field(default_factory=list)  # action, reward, flags, valid
    breaks: set[int] = field(default_factory=set)  # rows that no step was taken from: another life follows

    def obs(self, first: bool) -> dict[str, np.ndarray]:
        if self.spec is DICT:
            return {"a": self.rng.random(3, np.float32), "b": self.rng.integers(0, 9, (2, 2))}
        frame = self.rng.integers(0, 255, (5, 4), np.uint8)
        kind = self.rng.integers(3) if first else 1
        if not self.seen or kind == 0:
            return {"": np.stack([frame] * STACK)}
        if kind == 1:  # it goes on, also beyond the loss of a life
            return {"": np.concatenate([self.seen[-1][""][1:], frame[None]])}
        return {"": self.rng.integers(0, 255, (STACK, 5, 4)).astype(np.uint8)}  # no promise was made

    def look(self, first: bool) -> None:
        self.seen.append(self.obs(first))
        self.first.append(first)

    def live(self, steps: int, again: bool) -> Rollout:
        """The next rollout of this env. `again`: it was started anew, and nothing led here."""
        if not self.seen:
            self.look(True)
        elif again:
            self.breaks.add(len(self.seen) - 1)
            self.rows.append((0, 0.0, False, False, False))
            self.look(True)
        begin = len(self.seen) - 1
        for _ in range(steps):
            last = self.rows[-1] if self.rows and len(self.seen) - 1 not in self.breaks else None
            ended = last is not None and (last[2] or last[3]) and not self.first[-1]
            replaced = not ended and self.rng.random() < 0.04
            if ended or replaced:
                self.rows.append((int(self.rng.integers(4)), 0.0, False, False, False))
                self.look(True)
                continue
            dice = self.rng.random()
            term, trunc = dice < 0.12, dice > 0.9
            self.rows.append((int(self.rng.integers(4)), float(np.float32(self.rng.normal())), term, trunc, True))
            self.look(False)
        rows, seen = self.rows[begin:], self.seen[begin:]
        obs = {k: torch.from_numpy(np.stack([x[k] for x in seen]))[:, None] for k in seen[0]}
        action, reward, term, trunc = (torch.tensor([row[i] for row in rows])[:, None] for i in range(4))
        none = torch.zeros(1, 1)
        return Rollout(
            obs.get("", obs), torch.tensor(self.first[begin:])[:, None],
            torch.cat((none.long(), action)), torch.cat((none, reward)), action, reward.float(), term, trunc,
            torch.zeros(steps, 1), torch.zeros(steps + 1, 1), torch.zeros(steps, 1, dtype=torch.long),
            torch.zeros(1, dtype=torch.long),
        )  # fmt: skip

    def after(self, row: int) -> str:
        _, _, term, trunc, _ = self.rows[row]
        if term:
            return "nothing"
        replaced = row + 1 < len(self.rows) and not self.rows[row + 1][4]
        return "cut" if trunc or replaced or row + 1 in self.breaks else "more"

    def transition(self, row: int, n: int) -> tuple[float, float, int]:
        """Return, discount and place of what follows, by going there."""
        total, discount = 0.0, 1.0
        for i in range(n):
            total += discount * self.rows[row + i][1]
            discount *= GAMMA
            after = self.after(row + i)
            if after != "more":
                return total, 0.0 if after == "nothing" else discount, row + i + 1
        return total, discount, row + n


def join(rollouts: list[Rollout], ids: list[int]) -> Rollout:
    fields = {}
    for k, x in vars(rollouts[0]).items():
        if isinstance(x, dict):
            fields[k] = {name: torch.cat([getattr(r, k)[name] for r in rollouts], 1) for name in x}
        elif isinstance(x, torch.Tensor) and k != "env_id":
            fields[k] = torch.cat([getattr(r, k) for r in rollouts], 1)
    return Rollout(**fields, env_id=torch.tensor(ids))


def check(ring: Ring, lives: dict[int, Life], n: int) -> int:
    leaves = ring.priorities.tree.leaves
    drawable = set(np.flatnonzero(leaves > 0).tolist())
    spare = STACK - 1 if ring.frames else 0
    expected = {}
    for env_id, life in lives.items():
        count, env = len(life.seen) - 1, ring.owners.of[env_id]
        assert ring.count[env] == count
        for row in range(max(0, count - ring.ring + 1 + spare), count - n + 1):
            if life.rows[row][4]:
                expected[env * ring.ring + row % ring.ring] = (life, row)
    assert drawable == expected.keys()
    assert ring.size == len(drawable)
    if not drawable:
        return 0
    at = np.array(sorted(drawable))
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
                assert np.array_equal((got if key == "" else got[key])[i].numpy(), x)
    return len(at)


@pytest.mark.parametrize("spec", [IMAGE, DICT], ids=["frames", "dict"])
@pytest.mark.parametrize("n", [1, 3, 5])
@pytest.mark.parametrize("disk", [False, True])
def test_what_may_be_drawn_and_what_is_read(tmp_path, spec, n, disk):
    rng = np.random.default_rng(n)
    lives = {env_id: Life(rng, spec) for env_id in (3, 17, 1 << 20)}
    frames = STACK if spec is IMAGE else 0
    ring = Ring(spec, 3, 3 * 31, GAMMA, n, alpha=0.6, frames=frames, disk=str(tmp_path) if disk else "")
    checked = 0
    for turn in range(40):
        steps = int(rng.integers(1, 9))
        ids = [int(rng.choice(list(lives))) for _ in range(3)] if turn else list(lives)  # an env may be there twice
        rollouts = [lives[env_id].live(steps, rng.random() < 0.1) for env_id in ids]
        whole = join(rollouts, ids)
        ring.add(whole, whole.reward.numpy())
        checked += check(ring, lives, n)
    assert checked > 1000
    again = Ring(spec, 3, 3 * 31, GAMMA, n, alpha=0.6, frames=frames)
    again.load_state_dict({k: x.clone() for k, x in ring.state_dict().items()})
    assert check(again, lives, n)
    assert any(len(x.whole) for x in ring.obs.values()) == bool(frames)


def test_an_env_that_is_new_takes_the_place_of_the_one_not_heard_of_for_the_longest_time():
    rng = np.random.default_rng(0)
    ring, lives = Ring(DICT, 2, 40, GAMMA, 2), {i: Life(rng, DICT) for i in range(4)}
    for env_id in (0, 1, 0, 2):
        whole = join([lives[env_id].live(5, False)], [env_id])
        ring.add(whole, whole.reward.numpy())
    assert ring.owners.of == {0: 0, 2: 1}
    # Nothing of env 1 leads into env 2.
    assert ring.after[ring.ring + 4] != 0
    assert ring.count.tolist() == [10, 11]


def test_initial_priorities_are_the_errors_of_the_values_that_acted():
    rng = np.random.default_rng(0)
    life, ring = Life(rng, DICT), Ring(DICT, 1, 200, GAMMA, 3, alpha=1.0, judged=True)
    values = rng.normal(size=101).astype(np.float32)
    for i in range(10):
        whole = join([life.live(10, False)], [0])
        whole.behavior_value = torch.from_numpy(values[10 * i : 10 * i + 11, None])
        ring.add(whole, whole.reward.numpy())
    for row in range(98):
        total, discount, then = life.transition(row, 3)
        expected = abs(total + discount * values[then] - values[row]) if life.rows[row][4] else 0
        assert ring.priorities.tree.leaves[row] == pytest.approx(expected, abs=1e-4)


def test_a_priority_never_reaches_what_has_taken_the_place():
    rng = np.random.default_rng(0)
    life, ring = Life(rng, DICT), Ring(DICT, 1, 30, GAMMA, 1, alpha=1.0)
    ring.add(*_of(life, 12))
    picks = ring.draw(64)
    ring.add(*_of(life, 12))
    ring.add(*_of(life, 12))  # rows 30 to 35 have taken the places of rows 0 to 5
    before = ring.priorities.tree.leaves.copy()
    ring.update(picks, np.full(64, 7.0))
    now = ring.priorities.tree.leaves
    changed = np.flatnonzero(before != now)
    assert set(changed) == {i for i in picks.index if 6 < i < 12 and before[i] > 0}
    assert (now[changed] == 7).all()
    fresh = ring.draw(8)
    ring.update(fresh, np.full(8, np.nan))
    assert np.isfinite(ring.priorities.tree.leaves).all()
    assert np.array_equal(now, ring.priorities.tree.leaves)
    with pytest.raises(CoterieError, match="a priority is negative, infinite or no number"):
        ring.priorities.set(np.array([0]), np.array([np.nan]))


def _of(life: Life, steps: int) -> tuple[Rollout, np.ndarray]:
    whole = join([life.live(steps, False)], [0])
    return whole, whole.reward.numpy()


def test_a_ring_that_a_rollout_fills_is_refused():
    life = Life(np.random.default_rng(0), DICT)
    with pytest.raises(ConfigError, match=r"^replay\.capacity: 10 rows for each env are too few for rollouts of 9"):
        Ring(DICT, 1, 10, GAMMA, 2).add(*_of(life, 9))


def test_what_it_takes_is_known_before():
    ring = Ring(IMAGE, 4, 1000, GAMMA, 1, frames=STACK)
    kept = [ring.action, ring.reward, ring.value, ring.after, ring.valid, ring.stamp, ring.priorities.tree.leaves]
    kept += [x for s in ring.obs.values() for x in (s.rows, s.depth)]
    assert Ring.bytes_for(IMAGE, 4, 1000, STACK) == sum(x.nbytes for x in kept)
