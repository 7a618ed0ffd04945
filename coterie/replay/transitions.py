"""Transitions by env: the row that follows a row is the next one in its env's ring.

Of a frame stack only the newest frame is stored; the stack is rebuilt when a row is read. n-step returns are computed
then, too. A row may be sampled once its n steps are stored, and until a row that it needs is overwritten.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.errors import ConfigError
from coterie.replay.priority import LEAST, Picks
from coterie.replay.storage import Capacity, EnvReplay, ObsStore, take
from coterie.types import Array, Obs, Rollout, from_entries, map_tensors

GOES_ON, TERMINATED, CUT = range(3)  # what a row is followed by: the next row, nothing, or only an observation


@dataclass
class Transitions:
    """`[n]` rows: observations and actions, the rewards of the next n steps, and the observations after those."""

    obs: Obs
    action: Tensor
    n_step: Tensor  # discounted sum of rewards, float32
    discount: Tensor  # of what follows; 0 after a terminated episode
    next_obs: Obs
    weight: Tensor  # importance weight, float32
    picks: Picks

    def part(self, at: slice) -> Transitions:
        """Some of the samples."""
        return map_tensors(itemgetter(at), self)


class TransitionReplay(EnvReplay[Transitions]):
    """`gamma` and `n_step`: of the returns. `from_values`: the first priority of a row is the error of the values that
    acted; otherwise it is the highest so far.
    """

    arrays = ("action", "reward", "value", "after", "valid", "stamp", "count")

    def __init__(
        self,
        room: Capacity,
        gamma: float,
        n_step: int,
        *,
        alpha: float = 0.0,
        seed: int = 0,
        from_values: bool = False,
    ) -> None:
        super().__init__(room, room.rows // room.envs, alpha, seed)
        self.gamma, self.n_step, self.from_values = gamma, n_step, from_values
        places, spec = self.envs * self.ring, room.spec
        for key, s in spec.obs.items():
            self.obs[key] = ObsStore(room, self.envs, self.ring, s)
        self.action = np.zeros((places, *spec.action.shape), spec.action.dtype)
        self.reward, self.value = np.zeros(places, np.float32), np.zeros(places, np.float32)
        self.after = np.zeros(places, np.uint8)  # GOES_ON, TERMINATED or CUT
        self.valid = np.zeros(places, bool)  # False: a fake step, or the newest observation, which has no action yet

    @staticmethod
    def bytes_for(room: Capacity) -> int:
        """Bytes that it will take."""
        each = 8 * max(1, int(np.prod(room.spec.action.shape))) + 4 + 4 + 1 + 1 + 8 + 8
        each += sum(room.obs_bytes(s) for s in room.spec.obs.values())
        return each * (room.rows // room.envs) * room.envs

    # Writing.

    def _add(self, env: Array, obs: dict[str, Any], rollout: Rollout, columns: list[int], reward: Array) -> None:
        t = len(reward)
        if t + self.n_step + max(1, self.room.frames) > self.ring:
            raise ConfigError(f"replay.capacity: {self.ring} rows for each env are too few for rollouts of {t}")
        is_first = take(rollout.is_first, columns)
        terminated, truncated = take(rollout.terminated, columns), take(rollout.truncated, columns)
        begun = self.count[env] > 0
        here = self._at(env, self.count[env])
        # A restarted env may begin with its last observation: then an episode begins although none had ended.
        restarted = is_first[0] & self.valid[self._at(env, self.count[env] - 1)]
        follows = begun & ~restarted & ~self._breaks(here, {k: x[0] for k, x in obs.items()})
        if (ended := begun & ~follows).any():
            self._close(env[ended])
        first = self.count[env]
        at = self._at(env, first + np.arange(t + 1)[:, None])  # [t+1, b]
        for key, x in obs.items():
            self.obs[key].write(at, x, ~follows)
        rows, last = at[:-1], at[-1]
        self.action[rows], self.reward[rows] = take(rollout.action, columns), reward
        self.after[rows] = np.where(terminated, TERMINATED, np.where(truncated, CUT, GOES_ON))
        self.valid[rows], self.valid[last] = ~is_first[1:], False
        self.stamp[at] = first + np.arange(t + 1)[:, None]
        # The episode of a replaced env ends with its last observation before that.
        before = np.concatenate([self._at(env, first - 1)[None], rows[:-1]])
        self._cut(before[is_first[1:]])
        self.value[at] = take(rollout.behavior_value, columns)
        self.count[env] = first + t
        self._show(env, t)

    def _close(self, env: Array) -> None:
        """End a segment: its last observation stays, as a row that is never sampled."""
        at = self._at(env, self.count[env])
        self._cut(self._at(env, self.count[env] - 1))
        self.after[at], self.valid[at] = CUT, False
        self.count[env] += 1
        self._show(env, 1)

    def _cut(self, at: Array) -> None:
        self.after[at] = np.where(self.after[at] == GOES_ON, CUT, self.after[at])

    def _show(self, env: Array, t: int) -> None:
        """After `t` more rows: allow those whose n steps are now stored, hide those that the cursor approaches."""
        begin = self.count[env] - t - self.n_step + 1
        rows = begin + np.arange(t + self.n_step - 1 + max(1, self.room.frames))[:, None]
        at = self._at(env, rows)
        # Hidden are the newest, which wait for what follows, and the oldest, which have lost the frames before them.
        priority = np.zeros(at.shape)
        there = (rows[:t] >= 0) & self.valid[at[:t]]
        priority[:t][there] = self._first(at[:t][there])
        self.priorities.set(at.reshape(-1), priority.reshape(-1))

    def _first(self, at: Array) -> Array | float:
        """Priorities of new rows."""
        if not self.from_values:
            return self.priorities.highest
        n_step, discount, then = self.window(at)
        error: Array = np.abs(n_step + discount * self.value[then] - self.value[at])
        return error + LEAST

    def _breaks(self, at: Array, obs: dict[str, Any]) -> Array:
        """Which envs `[b]` begin with something other than their last observation, at `at`."""
        changed = np.zeros(len(at), bool)
        for key, x in obs.items():
            changed |= self.obs[key].differ(at, x)
        return changed

    # Reading.

    def window(self, at: Array) -> tuple[Array, Array, Array]:
        """Discounted sum of the next n rewards, discount of what follows, and its place: `[k]` each. An episode's end
        cuts the sum short, and what follows a truncated one is its last observation.
        """
        begin, row = at // self.ring * self.ring, at % self.ring
        total, factor, then = np.zeros(len(at), np.float32), np.ones(len(at), np.float32), at
        going = np.ones(len(at), bool)
        for i in range(self.n_step):
            here = begin + (row + i) % self.ring
            total += np.where(going, factor * self.reward[here], 0)
            end = self.after[here]
            factor = np.where(going, factor * np.float32(self.gamma) * (end != TERMINATED), factor)
            then = np.where(going, begin + (row + i + 1) % self.ring, then)
            going &= end == GOES_ON
        return total, factor, then

    def gather(self, picks: Picks) -> Transitions:
        at, n = picks.index, len(picks.index)
        n_step, discount, then = self.window(at)
        both = {key: store.read(np.concatenate((at, then))) for key, store in self.obs.items()}
        return Transitions(
            from_entries({k: x[:n] for k, x in both.items()}),
            torch.from_numpy(self.action[at]),
            torch.from_numpy(n_step),
            torch.from_numpy(discount),
            from_entries({k: x[n:] for k, x in both.items()}),
            torch.from_numpy(picks.weight),
            picks,
        )
