"""Overlapping sequences for recurrent networks (R2D2; Kapturowski et al. 2019).

Rollouts are kept as blocks, each with the recurrent state that acting had before its first row. A sequence is a few
consecutive blocks of one env; its stored state is that before its very first row, burn-in or not. A block stores each
frame of its stacks once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.errors import ConfigError
from coterie.replay.priority import LEAST, Picks
from coterie.replay.storage import Capacity, EnvReplay, ObsStore, take
from coterie.types import Array, Inputs, Obs, Rollout, from_entries, map_tensors

# Rewards `[T, n]`, values of the actions taken `[T+1, n]`, terminated and mask `[T, n]` -> priorities `[n]`.
FirstPriorities = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


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

    def part(self, at: slice) -> Sequences:
        """Some of the sequences."""
        return map_tensors(lambda x: x[:, at], self, core_state=self.core_state[at], weight=self.weight[at])


@dataclass(frozen=True)
class Blocks:
    """How rollouts are kept: `unroll` rows to a block, `length` blocks to a sequence, of which one begins every
    `stride` blocks. `core`: shape of a recurrent state.
    """

    unroll: int
    length: int
    stride: int
    core: tuple[int, ...]


class SequenceReplay(EnvReplay[Sequences]):
    """`first`: priorities of new sequences from the values that acted; None: the highest so far."""

    arrays = ("is_first", "action", "seen_reward", "reward", "terminated", "value", "core", "stamp", "run", "count")

    def __init__(
        self, room: Capacity, blocks: Blocks, alpha: float = 0.0, seed: int = 0, first: FirstPriorities | None = None
    ) -> None:
        super().__init__(room, room.rows // room.envs // blocks.unroll, alpha, seed)
        self.blocks, self.unroll, self.first = blocks, blocks.unroll, first
        if self.ring <= blocks.length:
            raise ConfigError(
                f"replay.capacity: {self.ring} rollouts for each env are too few for sequences of {blocks.length}"
            )
        spec, places, t = room.spec, room.envs * self.ring, blocks.unroll
        self.before = dict[str, int]()  # frames of a block that its first row's stack has besides its own
        for key, s in spec.obs.items():
            self.before[key] = max(0, room.stacked(s) - 1)
            self.obs[key] = ObsStore(room, places, t + 1 + self.before[key], s)
        self.is_first = np.zeros((places, t + 1), bool)
        self.action = np.zeros((places, t + 1, *spec.action.shape), spec.action.dtype)  # and the one before row 0
        self.seen_reward = np.zeros((places, t + 1), np.float32)  # raw, with the one before row 0: the network's input
        self.reward = np.zeros((places, t), np.float32)
        self.terminated = np.zeros((places, t), bool)
        self.value = np.zeros((places, t + 1), np.float32)
        self.core = np.zeros((places, *blocks.core), np.float32)
        self.run = np.zeros(places, np.int64)  # blocks that lead up to this one without a gap, itself among them

    @staticmethod
    def bytes_for(room: Capacity, blocks: Blocks) -> int:
        """Bytes that it will take."""
        t = blocks.unroll
        each = (t + 1) * (1 + 8 + 4 + 4) + t * (4 + 1) + 4 * int(np.prod(blocks.core)) + 24
        each += sum((t + 1 + max(0, room.stacked(s) - 1)) * room.obs_bytes(s) for s in room.spec.obs.values())
        return each * (room.rows // room.envs // t) * room.envs

    def _add(self, env: Array, obs: dict[str, Any], rollout: Rollout, columns: list[int], reward: Array) -> None:
        def block(x: Tensor) -> Array:
            return take(x, columns).swapaxes(0, 1)  # rows of a block lie side by side, as they are read

        number = self.count[env]
        at, before = self._at(env, number), self._at(env, number - 1)
        is_first = block(rollout.is_first)
        follows = (number > 0) & (self.is_first[before, -1] == is_first[:, 0])
        for key, new in obs.items():
            follows &= ~self.obs[key].differ(self._places(key, before, self.unroll), new[0])
            rows = self._places(key, at, np.arange(self.unroll + 1)[:, None])
            if self.before[key]:
                self.obs[key].write_lead(rows[0], new[0])
            self.obs[key].write(rows, new, np.zeros(len(env), bool))
        self.run[at] = np.where(follows, self.run[before], 0) + 1
        self.is_first[at], self.action[at] = is_first, block(rollout.prev_action)
        self.seen_reward[at], self.terminated[at] = block(rollout.prev_reward), block(rollout.terminated)
        self.value[at], self.reward[at] = block(rollout.behavior_value), reward.T
        assert rollout.core_state is not None
        self.core[at] = rollout.core_state.cpu().numpy()[columns]
        self.stamp[at] = number
        self.count[env] = number + 1
        self.priorities.hide(at)  # the overwritten block, and the sequence that began there
        begin = number - self.blocks.length + 1
        whole = (self.run[at] >= self.blocks.length) & (begin % self.blocks.stride == 0)
        if whole.any():
            self._show(self._at(env[whole], begin[whole]))

    def _show(self, at: Array) -> None:
        priority = np.full(len(at), self.priorities.highest)
        if self.first is not None:
            x = self.gather(Picks(at, self.stamp[at], np.ones(len(at), np.float32)), obs=False)
            value = self._rows(self.value, at)
            priority = self.first(x.reward, value, x.terminated, x.mask).double().numpy() + LEAST
        self.priorities.set(at, priority)

    def gather(self, picks: Picks, obs: bool = True) -> Sequences:
        at = picks.index
        seen: Obs = from_entries({k: self._seen(k, at) for k in self.obs}) if obs else {}
        is_first, action = self._rows(self.is_first, at), self._rows(self.action, at)
        return Sequences(
            Inputs(seen, is_first, action, self._rows(self.seen_reward, at)),
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
        """The blocks `[n, length]` of the sequences that begin at `at`."""
        begin = at // self.ring * self.ring
        blocks: Array = begin[:, None] + (at[:, None] - begin[:, None] + np.arange(self.blocks.length)) % self.ring
        return blocks

    def _seen(self, key: str, at: Array) -> Tensor:
        """The observations `[T+1, n, *shape]` of the sequences at `at`."""
        row = np.arange(self.blocks.length * self.unroll + 1)
        block = np.minimum(row // self.unroll, self.blocks.length - 1)
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
