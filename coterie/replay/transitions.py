"""Transitions by simulator: each env has a ring of rows of its own, in which what follows a row stands behind it.

Only the newest frame of a stack is kept; the stack is put together where a row is read. n-step returns are worked out
then, too. A row is drawn once all that its return needs is there, and not any more when a part of that has been
overwritten.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from coterie.replay.alloc import memory
from coterie.replay.env_rings import Owners
from coterie.replay.priority import LEAST, Picks, Priorities
from coterie.types import Array, ConfigError, Obs, Rollout, Spec, map_obs

GOES_ON, TERMINATED, CUT = range(3)  # what a row is followed by: the next row, nothing, or only an observation


@dataclass
class Transitions:
    """`[n]` rows: what was seen and done, the rewards of the next n steps, and what was seen then."""

    obs: Obs
    action: Tensor
    n_step: Tensor  # discounted sum of rewards, float32
    discount: Tensor  # of what follows; 0 after a terminated episode
    next_obs: Obs
    weight: Tensor  # importance weight, float32
    picks: Picks

    def map(self, call: Callable[[Tensor], Tensor]) -> Transitions:
        """`call` of each tensor."""
        action, n_step, discount, weight = map(call, (self.action, self.n_step, self.discount, self.weight))
        after = map_obs(call, self.next_obs)
        return Transitions(map_obs(call, self.obs), action, n_step, discount, after, weight, self.picks)

    def to(self, device: torch.device) -> Transitions:
        return self if device.type == "cpu" else self.map(lambda x: x.to(device))


class Storage:
    """One entry of the observations: rows `[envs x ring, *shape]`, or their newest frames. `frames`: of each stack."""

    def __init__(self, envs: int, ring: int, shape: tuple[int, ...], dtype: str, frames: int, disk: str) -> None:
        self.ring, self.frames = ring, frames
        self.rows = memory((envs * ring, *(shape[1:] if frames else shape)), dtype, disk)
        self.depth = np.zeros(envs * ring if frames else 0, np.uint8)  # rows before this one that its stack has
        self.whole: dict[int, Array] = {}  # stacks that are not their rows' newest frames

    def lead(self, at: Array, obs: Array) -> None:
        """All frames but the newest of the stacks `obs` `[b, *shape]`, in the places before `at` `[b]`, where those are
        to be written next.
        """
        for k in range(1, self.frames):
            self.rows[at - k] = obs[:, -1 - k]
        self.depth[at - 1] = self.frames - 2

    def write(self, at: Array, obs: Array, fresh: Array) -> None:
        """Rows `obs` `[t, b, *shape]` at places `at` `[t, b]`, the first first. `fresh` `[b]`: nothing leads there."""
        if not self.frames:
            self.rows[at] = obs
            return
        self.rows[at] = obs[:, :, -1]
        repeats = (obs[:, :, :-1] == obs[:, :, -1:]).reshape(*at.shape, -1).all(2)
        depth = np.where(fresh, 0, np.minimum(self.depth[self._before(at[0])] + 1, self.frames - 1))
        for t, row in enumerate(at):
            depth = np.where(repeats[t], 0, depth)
            self.depth[row] = depth
            depth = np.minimum(depth + 1, self.frames - 1)
        flat, seen = at.reshape(-1), obs.reshape(-1, *obs.shape[2:])
        if self.whole:
            for place in flat.tolist():
                self.whole.pop(place, None)
        # An env need not promise that its stacks go on: those that do not are kept as they are.
        for i in np.flatnonzero((self.read(flat).numpy() != seen).reshape(len(flat), -1).any(1)):
            self.whole[int(flat[i])] = seen[i].copy()

    def read(self, at: Array) -> Tensor:
        """Rows `[n, *shape]` at places `at` `[n]`, copied."""
        if not self.frames:
            return torch.from_numpy(self.rows.take(at, 0))
        places, back = np.empty((self.frames, len(at)), np.int64), self.depth[at]
        places[-1] = at
        for k in range(1, self.frames):
            places[-1 - k] = np.where(k <= back, self._before(places[-k]), places[-k])
        # numpy's take: torch's index_select is a fifth slower here, since it takes no huge pages for the result.
        out = self.rows.take(places.T.reshape(-1), 0).reshape(len(at), self.frames, *self.rows.shape[1:])
        if self.whole:
            for i, place in enumerate(at.tolist()):
                if place in self.whole:
                    out[i] = self.whole[place]
        return torch.from_numpy(out)

    def state_dict(self) -> dict[str, Array]:
        whole = sorted(self.whole)
        state = {"obs": self.rows, "depth": self.depth, "whole_at": np.array(whole, np.int64)}
        return state | ({"whole": np.stack([self.whole[place] for place in whole])} if whole else {})

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        self.rows[...], self.depth[...] = state["obs"], state["depth"]
        self.whole = dict(zip(state["whole_at"].tolist(), state.get("whole", ()), strict=True))

    def _before(self, at: Array) -> Array:
        return np.where(at % self.ring == 0, at + self.ring - 1, at - 1)


def stored(obs: Mapping[str, Storage]) -> dict[str, Array]:
    """All entries' states in one, by name and number."""
    return {f"{name}/{i}": array for i, x in enumerate(obs.values()) for name, array in x.state_dict().items()}


def restore(obs: Mapping[str, Storage], state: Mapping[str, Array]) -> None:
    for i, x in enumerate(obs.values()):
        end = f"/{i}"
        x.load_state_dict({k.removesuffix(end): array for k, array in state.items() if k.endswith(end)})


class Ring:
    """At most `capacity` rows of `envs` simulators, and as many env ids at a time: one that is new takes the place of
    the one that was not heard of for the longest time. `gamma` and `n_step`: of the returns.
    `judged`: what is new has the priority that the values of who acted give; otherwise it is the highest so far.
    """

    def __init__(
        self, spec: Spec, envs: int, capacity: int, gamma: float, n_step: int, *, alpha: float = 0.0, frames: int = 0,
        seed: int = 0, disk: str = "", judged: bool = False,
    ) -> None:  # fmt: skip
        self.spec, self.envs, self.ring, self.gamma, self.n_step = spec, envs, capacity // envs, gamma, n_step
        self.frames, self.judged = frames, judged
        places = envs * self.ring
        self.obs = {
            key: Storage(envs, self.ring, s.shape, s.dtype, frames if s.is_image else 0, disk)
            for key, s in spec.obs.items()
        }
        self.action = np.zeros((places, *spec.action.shape), spec.action.dtype)
        self.reward, self.value = np.zeros(places, np.float32), np.zeros(places, np.float32)
        self.after = np.zeros(places, np.uint8)  # GOES_ON, TERMINATED or CUT
        self.valid = np.zeros(places, bool)  # what a policy did there means something
        self.count = np.zeros(envs, np.int64)  # rows of each env so far; the next observation stands there already
        self.owners = Owners(envs)
        self.priorities = Priorities(places, alpha, seed)
        self.stamp = self.priorities.stamp  # which row of its env it is
        self.draw, self.update = self.priorities.draw, self.priorities.update

    @staticmethod
    def bytes_for(spec: Spec, envs: int, capacity: int, frames: int) -> int:
        """What it takes, in bytes, without starting."""
        each = 8 * max(1, int(np.prod(spec.action.shape))) + 4 + 4 + 1 + 1 + 8 + 8 + 1
        for s in spec.obs.values():
            shape = s.shape[1:] if frames and s.is_image else s.shape
            each += int(np.prod(shape)) * np.dtype(s.dtype).itemsize
        return each * (capacity // envs) * envs

    @property
    def size(self) -> int:
        """Rows that may be drawn."""
        return self.priorities.tree.filled

    # Writing.

    def add(self, rollout: Rollout, reward: Array) -> None:
        """Take in a rollout, with rewards `[T, B]` as they are learned from."""
        obs = rollout.obs if isinstance(rollout.obs, dict) else {"": rollout.obs}
        fields = {key: x.cpu().numpy() for key, x in obs.items()}
        is_first, terminated = rollout.is_first.cpu().numpy(), rollout.terminated.cpu().numpy()
        truncated, action = rollout.truncated.cpu().numpy(), rollout.action.cpu().numpy()
        value = rollout.behavior_value.cpu().numpy()  # of the actions taken
        for columns in self.owners.turns(rollout.env_id.tolist()):
            ids = [int(rollout.env_id[c]) for c in columns]
            self._add(
                np.array([self.owners.place(i) for i in ids]), {k: x[:, columns] for k, x in fields.items()},
                is_first[:, columns], terminated[:, columns], truncated[:, columns], action[:, columns],
                reward[:, columns], value[:, columns],
            )  # fmt: skip

    def _add(
        self, env: Array, obs: dict[str, Array], is_first: Array, terminated: Array, truncated: Array, action: Array,
        reward: Array, value: Array,
    ) -> None:  # fmt: skip
        t = len(reward)
        if t + self.n_step + max(1, self.frames) > self.ring:
            raise ConfigError(f"replay.capacity: {self.ring} rows for each env are too few for rollouts of {t}")
        begun = self.count[env] > 0
        here = env * self.ring + self.count[env] % self.ring
        # An env that was started again may show what it showed last: then it says that an episode begins, where none
        # had ended.
        anew = is_first[0] & self.valid[self._at(env, self.count[env] - 1)]
        follows = begun & ~anew & ~self._breaks(here, {k: x[0] for k, x in obs.items()})
        if (ended := begun & ~follows).any():
            self._close(env[ended])
        first = self.count[env]
        at = self._at(env, first + np.arange(t + 1)[:, None])  # [t+1, b]
        for key, x in obs.items():
            self.obs[key].write(at, x, ~follows)
        rows, last = at[:-1], at[-1]
        self.action[rows], self.reward[rows] = action, reward
        self.after[rows] = np.where(terminated, TERMINATED, np.where(truncated, CUT, GOES_ON))
        self.valid[rows], self.valid[last] = ~is_first[1:], False
        self.stamp[at] = first + np.arange(t + 1)[:, None]
        # An env that was replaced: its episode ends with what was seen last before that.
        before = np.concatenate([self._at(env, first - 1)[None], rows[:-1]])
        self._cut(before[is_first[1:]])
        self.value[at] = value
        self.count[env] = first + t
        self._show(env, t)

    def _close(self, env: Array) -> None:
        """End a segment: the observation that stands at its end stays, as a row of no meaning."""
        at = self._at(env, self.count[env])
        self._cut(self._at(env, self.count[env] - 1))
        self.after[at], self.valid[at] = CUT, False
        self.count[env] += 1
        self._show(env, 1)

    def _cut(self, at: Array) -> None:
        self.after[at] = np.where(self.after[at] == GOES_ON, CUT, self.after[at])

    def _show(self, env: Array, t: int) -> None:
        """After `t` more rows: those whose returns are whole now may be drawn, those that the cursor nears may not."""
        begin = self.count[env] - t - self.n_step + 1
        rows = begin + np.arange(t + self.n_step - 1 + max(1, self.frames))[:, None]
        at = self._at(env, rows)
        # Hidden are the newest, which wait for what follows, and the oldest, which have lost the frames before them.
        priority = np.zeros(at.shape)
        there = (rows[:t] >= 0) & self.valid[at[:t]]
        priority[:t][there] = self._first(at[:t][there])
        self.priorities.set(at.reshape(-1), priority.reshape(-1))

    def _first(self, at: Array) -> Array | float:
        """Priorities of what is new."""
        if not self.judged:
            return self.priorities.highest
        n_step, discount, then = self.window(at)
        error: Array = np.abs(n_step + discount * self.value[then] - self.value[at])
        return error + LEAST

    def _breaks(self, at: Array, obs: dict[str, Array]) -> Array:
        """Which envs `[b]` show something other than what they showed last."""
        changed = np.zeros(len(at), bool)
        for key, x in obs.items():
            changed |= (self.obs[key].read(at).numpy() != x).reshape(len(at), -1).any(1)
        return changed

    def _at(self, env: Array, row: Array) -> Array:
        at: Array = env * self.ring + row % self.ring
        return at

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
        """Copy what was drawn. Nothing may be added before this has ended."""
        at = picks.index
        n_step, discount, then = self.window(at)
        both = {key: storage.read(np.concatenate((at, then))) for key, storage in self.obs.items()}
        n = len(at)
        obs, after = {k: x[:n] for k, x in both.items()}, {k: x[n:] for k, x in both.items()}
        plain = list(obs) == [""]
        return Transitions(
            obs[""] if plain else obs,
            torch.from_numpy(self.action[at]),
            torch.from_numpy(n_step),
            torch.from_numpy(discount),
            after[""] if plain else after,
            torch.from_numpy(picks.weight),
            picks,
        )

    # Checkpoints.

    def state_dict(self) -> dict[str, Tensor]:
        """All of it, not copied."""
        state = {name: getattr(self, name) for name in _ARRAYS} | self.priorities.state_dict()
        state["owner"] = self.owners.table()
        state |= stored(self.obs)
        return {f"replay/{name}": torch.from_numpy(x) for name, x in state.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        of = {k.removeprefix("replay/"): x.numpy() for k, x in state.items() if k.startswith("replay/")}
        for name in _ARRAYS:
            getattr(self, name)[...] = of[name]
        self.priorities.load_state_dict(of)
        self.owners.load(of["owner"])
        restore(self.obs, of)


_ARRAYS = ("action", "reward", "value", "after", "valid", "stamp", "count")
