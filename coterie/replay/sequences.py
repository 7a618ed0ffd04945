"""Overlapping sequences for recurrent networks (R2D2; Kapturowski et al. 2019).

Rollouts are kept as blocks, each with the recurrent state that acting had before its first row. A sequence is a few
blocks of one env in a row, and the state that is stored with it is that of its very first row, burn-in or not. Of
stacks of frames a block has each frame once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from coterie.replay.env_rings import Owners
from coterie.replay.priority import LEAST, Picks, Priorities
from coterie.replay.transitions import Storage, restore, stored
from coterie.types import Array, ConfigError, Inputs, Obs, Rollout, Spec

# Rewards `[T, n]`, values of the actions taken `[T+1, n]`, terminated and mask `[T, n]` -> priorities `[n]`.
Judge = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass
class Sequences:
    """`n` sequences of T rows, time first; row T is there for its value only."""

    inputs: Inputs  # [T+1, n]
    action: Tensor  # [T, n]
    reward: Tensor  # [T, n], as it is learned from
    terminated: Tensor  # [T, n]
    mask: Tensor  # [T, n]
    core_state: Tensor  # [n, ...] before row 0
    weight: Tensor  # [n] importance weight
    picks: Picks

    def to(self, device: torch.device) -> Sequences:
        if device.type == "cpu":
            return self
        obs = self.inputs.obs
        seen = {k: x.to(device) for k, x in obs.items()} if isinstance(obs, dict) else obs.to(device)
        inputs = Inputs(seen, *(x.to(device) for x in self.inputs[1:]))
        return Sequences(
            inputs,
            self.action.to(device),
            self.reward.to(device),
            self.terminated.to(device),
            self.mask.to(device),
            self.core_state.to(device),
            self.weight.to(device),
            self.picks,
        )


class SequenceRing:
    """Blocks of `unroll` rows of `envs` simulators. `blocks`: how many a sequence is long; `stride`: how many lie
    between the beginnings of two; `frames`: of each stack. `judge`: first priorities from the values that acted; None:
    the highest so far.
    """

    def __init__(
        self, spec: Spec, envs: int, capacity: int, unroll: int, blocks: int, stride: int, core: tuple[int, ...], *,
        frames: int = 0, alpha: float = 0.0, seed: int = 0, disk: str = "", judge: Judge | None = None,
    ) -> None:  # fmt: skip
        self.unroll, self.blocks, self.stride, self.judge = unroll, blocks, stride, judge
        self.ring = capacity // envs // unroll
        if self.ring <= blocks:
            raise ConfigError(
                f"replay.capacity: {self.ring} rollouts for each env are too few for sequences of {blocks}"
            )
        places, t = envs * self.ring, unroll
        self.obs = dict[str, Storage]()
        self.before = dict[str, int]()  # frames of a block that its first row's stack has besides its own
        for key, s in spec.obs.items():
            self.before[key] = max(0, frames - 1) if s.is_image else 0
            depth = frames if s.is_image else 0
            self.obs[key] = Storage(places, t + 1 + self.before[key], s.shape, s.dtype, depth, disk)
        self.is_first = np.zeros((places, t + 1), bool)
        self.action = np.zeros((places, t + 1, *spec.action.shape), spec.action.dtype)  # a row before row 0, as below
        self.seen_reward = np.zeros((places, t + 1), np.float32)  # raw: what the network is told
        self.reward = np.zeros((places, t), np.float32)
        self.terminated = np.zeros((places, t), bool)
        self.value = np.zeros((places, t + 1), np.float32)
        self.core = np.zeros((places, *core), np.float32)
        self.run = np.zeros(places, np.int64)  # blocks that lead up to this one without a gap, itself among them
        self.count = np.zeros(envs, np.int64)  # blocks of each env so far
        self.owners = Owners(envs)
        self.priorities = Priorities(places, alpha, seed)
        self.stamp = self.priorities.stamp  # which block of its env it is
        self.draw, self.update = self.priorities.draw, self.priorities.update

    @staticmethod
    def bytes_for(spec: Spec, envs: int, capacity: int, unroll: int, core: tuple[int, ...], frames: int = 0) -> int:
        """What it takes, in bytes, without starting."""
        each = (unroll + 1) * (1 + 8 + 4 + 4) + unroll * (4 + 1) + 4 * int(np.prod(core)) + 24
        for s in spec.obs.values():
            stacked = bool(frames) and s.is_image
            size = int(np.prod(s.shape[1:] if stacked else s.shape)) * np.dtype(s.dtype).itemsize
            each += (unroll + 1 + (frames - 1) * stacked) * (size + stacked)
        return each * (capacity // envs // unroll) * envs

    @property
    def size(self) -> int:
        """Sequences that may be drawn."""
        return self.priorities.tree.filled

    def add(self, rollout: Rollout, reward: Array) -> None:
        """Take in a rollout, with rewards `[T, B]` as they are learned from."""
        for columns in self.owners.turns(rollout.env_id.tolist()):
            self._add(rollout, torch.tensor(columns), reward[:, columns])

    def _add(self, rollout: Rollout, columns: Tensor, reward: Array) -> None:
        env = np.array([self.owners.place(int(i)) for i in rollout.env_id[columns]])

        def block(x: Tensor) -> Array:
            """Time inside: what is read together stands together."""
            found: Array = x.index_select(1, columns.to(x.device)).transpose(0, 1).cpu().numpy()
            return found

        obs = rollout.obs if isinstance(rollout.obs, dict) else {"": rollout.obs}
        number = self.count[env]
        at, before = self._at(env, number), self._at(env, number - 1)
        is_first = block(rollout.is_first)
        follows = (number > 0) & (self.is_first[before, -1] == is_first[:, 0])
        for key, x in obs.items():
            new = x.index_select(1, columns.to(x.device)).cpu().numpy()
            last = self.obs[key].read(self._places(key, before, self.unroll)).numpy()
            follows &= (last == new[0]).reshape(len(env), -1).all(1)
            rows = self._places(key, at, np.arange(self.unroll + 1)[:, None])
            if self.before[key]:
                self.obs[key].lead(rows[0], new[0])
            self.obs[key].write(rows, new, np.zeros(len(env), bool))
        self.run[at] = np.where(follows, self.run[before], 0) + 1
        self.is_first[at], self.action[at] = is_first, block(rollout.prev_action)
        self.seen_reward[at], self.terminated[at] = block(rollout.prev_reward), block(rollout.terminated)
        self.value[at], self.reward[at] = block(rollout.behavior_value), reward.T
        assert rollout.core_state is not None
        self.core[at] = rollout.core_state[columns].cpu().numpy()
        self.stamp[at] = number
        self.count[env] = number + 1
        self.priorities.hide(at)  # what stood there, and every sequence that began there
        begin = number - self.blocks + 1
        whole = (self.run[at] >= self.blocks) & (begin % self.stride == 0)
        if whole.any():
            self._show(self._at(env[whole], begin[whole]))

    def _show(self, at: Array) -> None:
        priority = np.full(len(at), self.priorities.highest)
        if self.judge is not None:
            x = self.gather(Picks(at, self.stamp[at], np.ones(len(at), np.float32)), obs=False)
            value = self._rows(self.value, at)
            priority = self.judge(x.reward, value, x.terminated, x.mask).double().numpy() + LEAST
        self.priorities.set(at, priority)

    def _at(self, env: Array, number: Array) -> Array:
        at: Array = env * self.ring + number % self.ring
        return at

    def gather(self, picks: Picks, obs: bool = True) -> Sequences:
        """Copy what was drawn. Nothing may be added before this has ended."""
        at = picks.index
        seen: Obs = {k: self._seen(k, at) for k in self.obs} if obs else {}
        is_first, action = self._rows(self.is_first, at), self._rows(self.action, at)
        return Sequences(
            Inputs(seen[""] if list(seen) == [""] else seen, is_first, action, self._rows(self.seen_reward, at)),
            action[1:],
            self._rows(self.reward, at),
            self._rows(self.terminated, at),
            ~is_first[1:],
            torch.from_numpy(self.core[at]),
            torch.from_numpy(picks.weight),
            picks,
        )

    def _places(self, key: str, at: Array, row: Array | int) -> Array:
        """Where an entry of the observations has the rows of the blocks at `at`."""
        store = self.obs[key]
        place: Array = at * store.ring + self.before[key] + row
        return place

    def _blocks(self, at: Array) -> Array:
        """The blocks `[n, blocks]` of the sequences that begin at `at`."""
        begin = at // self.ring * self.ring
        blocks: Array = begin[:, None] + (at[:, None] - begin[:, None] + np.arange(self.blocks)) % self.ring
        return blocks

    def _seen(self, key: str, at: Array) -> Tensor:
        """The observations `[T+1, n, *shape]` of the sequences at `at`."""
        row = np.arange(self.blocks * self.unroll + 1)
        block = np.minimum(row // self.unroll, self.blocks - 1)
        places = self._places(key, self._blocks(at).T[block], (row - block * self.unroll)[:, None])
        rows = self.obs[key].read(places.reshape(-1))
        return rows.view(*places.shape, *rows.shape[1:])

    def _rows(self, x: Array, at: Array) -> Tensor:
        """The rows of all blocks of the sequences at `at`, `[T or T+1, n, ...]`; row T of the last block only."""
        blocks = self._blocks(at)
        taken = torch.from_numpy(x).index_select(0, torch.from_numpy(blocks.reshape(-1)))
        taken = taken.view(*blocks.shape, *taken.shape[1:])
        rows = taken[:, :, : self.unroll].flatten(1, 2)
        if x.shape[1] > self.unroll:
            rows = torch.cat((rows, taken[:, -1, self.unroll :]), 1)
        return rows.transpose(0, 1)

    def state_dict(self) -> dict[str, Tensor]:
        state = {name: getattr(self, name) for name in _ARRAYS} | self.priorities.state_dict()
        state["owner"] = self.owners.table()
        state |= stored(self.obs)
        return {f"replay/{name}": torch.from_numpy(x) for name, x in state.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        of = {k.removeprefix("replay/"): x.numpy() for k, x in state.items() if k.startswith("replay/")}
        for name in _ARRAYS:
            getattr(self, name)[...] = of[name]
        restore(self.obs, of)
        self.priorities.load_state_dict(of)
        self.owners.load(of["owner"])


_ARRAYS = ("is_first", "action", "seen_reward", "reward", "terminated", "value", "core", "stamp", "run", "count")
