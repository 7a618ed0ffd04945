"""What both replays of value learning share: a ring for each env, observations on memory or disk, priorities."""

from __future__ import annotations

import os
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from coterie.envs.spaces import on_host
from coterie.errors import ConfigError, reason_of
from coterie.ops.returns import turns
from coterie.parallel.hardware import machine_memory
from coterie.replay.priority import Picks, Priorities
from coterie.types import Array, ObsSpec, Rollout, Spec, entries

R = TypeVar("R")  # `n` samples
_USABLE_MEMORY = 0.8  # share of the machine's memory that replay may take


def require_room(field: str, need: int, what: str, disk: str = "") -> None:
    """Raise a `ConfigError` about an option if `need` bytes do not fit into memory, or on the disk of a folder."""
    if disk:
        allocate((1,), "uint8", disk)  # the folder is writable
        have, where, share = shutil.disk_usage(disk).free, f"free in {disk}", 1.0
    else:
        have, where, share = machine_memory(), "of memory in the machine", _USABLE_MEMORY
    if need > share * have:
        raise ConfigError(f"{field}: {what} need {need / 2**30:.1f} GiB, and there are {have / 2**30:.1f} {where}")


def allocate(shape: tuple[int, ...], dtype: str, disk: str = "") -> Array:
    """Zeros; if `disk` names a folder, in an unnamed file there, which is deleted with this process."""
    if not disk:
        return np.zeros(shape, dtype)
    try:
        with tempfile.TemporaryFile(dir=disk) as file:
            # All of it now: writing to a mapped file on a full disk kills the process.
            os.posix_fallocate(file.fileno(), 0, max(1, int(np.prod(shape)) * np.dtype(dtype).itemsize))
            return np.memmap(file, dtype, "r+", shape=shape)
    except OSError as error:
        raise ConfigError(f"replay.disk: cannot write to {disk}: {reason_of(error)}") from None


class EnvRings:
    """The ring of each env id. There are `envs` rings; a new id takes the ring of the least recently used one."""

    def __init__(self, envs: int) -> None:
        self.envs, self.of = envs, OrderedDict[int, int]()

    def place(self, env_id: int) -> int:
        if env_id not in self.of:
            self.of[env_id] = len(self.of) if len(self.of) < self.envs else self.of.popitem(last=False)[1]
        self.of.move_to_end(env_id)
        return self.of[env_id]

    def turns(self, ids: list[int]) -> list[list[int]]:
        """Split the columns of a batch so that no turn has an env twice, or more envs than there are rings."""
        size = self.envs
        return [turn[i : i + size] for turn in turns(ids) for i in range(0, len(turn), size)]

    def table(self) -> Array:
        """`[k, 2]`: env id and ring, the least recently used first."""
        return np.array([*self.of.items()], np.int64).reshape(-1, 2)

    def load(self, table: Array) -> None:
        self.of = OrderedDict((int(env_id), int(ring)) for env_id, ring in table)


class ObsStore:
    """One entry of the observations: rows `[envs x ring, *shape]`, or their newest frames. Rows and what is written are
    arrays on the host, since torch takes four times as long to compare bytes on a CPU, or tensors on a GPU.
    """

    rows: Any

    def __init__(self, room: Capacity, envs: int, ring: int, obs: ObsSpec) -> None:
        self.ring, self.frames, self.device = ring, room.stacked(obs), room.device
        shape = (envs * ring, *(obs.shape[1:] if self.frames else obs.shape))
        if self.device is None:
            self.rows = allocate(shape, obs.dtype, room.disk)
        else:
            self.rows = torch.zeros(shape, dtype=getattr(torch, obs.dtype), device=self.device)
        self.depth = np.zeros(envs * ring if self.frames else 0, np.uint8)  # rows before this one that its stack has
        self.whole: dict[int, Array] = {}  # stacks that are not their rows' newest frames

    def differ(self, at: Array, obs: Any) -> Array:
        """Which rows `[n]` at places `at` are not `obs` `[n, *shape]`."""
        kept = self.read(at)
        return on_host(((kept.numpy() if self.device is None else kept) != obs).reshape(len(at), -1).any(1))

    def write_lead(self, at: Array, obs: Any) -> None:
        """Write all frames but the newest of the stacks `obs` `[b, *shape]` before the places `at` `[b]`, which are to
        be written next.
        """
        for k in range(1, self.frames):
            self.rows[at - k] = obs[:, -1 - k]
        self.depth[at - 1] = self.frames - 2

    def write(self, at: Array, obs: Any, fresh: Array) -> None:
        """Rows `obs` `[t, b, *shape]` at places `at` `[t, b]`, in order. `fresh` `[b]`: the row before does not lead
        to the first one.
        """
        if not self.frames:
            self.rows[at] = obs
            return
        self.rows[at] = obs[:, :, -1]
        repeats = on_host((obs[:, :, :-1] == obs[:, :, -1:]).reshape(*at.shape, -1).all(2))
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
        for i in np.flatnonzero(self.differ(flat, seen)):
            self.whole[int(flat[i])] = on_host(seen[i]).copy()

    def read(self, at: Array) -> Tensor:
        """Rows `[n, *shape]` at places `at` `[n]`, copied."""
        if not self.frames:
            return self._take(at)
        places, back = np.empty((self.frames, len(at)), np.int64), self.depth[at]
        places[-1] = at
        for k in range(1, self.frames):
            places[-1 - k] = np.where(k <= back, self._before(places[-k]), places[-k])
        out = self._take(places.T.reshape(-1)).view(len(at), self.frames, *self.rows.shape[1:])
        if self.whole:
            for i, place in enumerate(at.tolist()):
                if place in self.whole:
                    out[i] = torch.from_numpy(self.whole[place])
        return out

    def _take(self, at: Array) -> Tensor:
        if self.device is not None:
            return cast(Tensor, self.rows.index_select(0, torch.from_numpy(at).to(self.device)))
        # numpy's take: torch's index_select is a fifth slower here, since it takes no huge pages for the result.
        return torch.from_numpy(self.rows.take(at, 0))

    def state_dict(self) -> dict[str, Array]:
        whole = sorted(self.whole)
        state = {"obs": on_host(self.rows), "depth": self.depth, "whole_at": np.array(whole, np.int64)}
        return state | ({"whole": np.stack([self.whole[place] for place in whole])} if whole else {})

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        self.rows[...] = state["obs"] if self.device is None else torch.from_numpy(state["obs"])
        self.depth[...] = state["depth"]
        self.whole = dict(zip(state["whole_at"].tolist(), state.get("whole", ()), strict=True))

    def _before(self, at: Array) -> Array:
        return np.where(at % self.ring == 0, at + self.ring - 1, at - 1)


@dataclass(frozen=True)
class Capacity:
    """What a replay has room for: `rows` env steps of `envs` env ids at a time, which may be any ids. `frames`: of each
    image stack, of which only the newest is stored; images with another number of channels are stored whole.
    Observations are in a file in the folder `disk`, or on the GPU `device`, or in memory.
    """

    spec: Spec
    envs: int
    rows: int
    frames: int = 0
    disk: str = ""
    device: torch.device | None = None

    def stacked(self, obs: ObsSpec) -> int:
        """Frames of a stack; 0: not a stack."""
        return self.frames if obs.is_image and obs.shape[0] == self.frames else 0

    def obs_bytes(self, obs: ObsSpec) -> int:
        """Bytes of one stored row, a stack's depth among them."""
        stacked = self.stacked(obs) > 0
        return int(np.prod(obs.shape[1:] if stacked else obs.shape)) * np.dtype(obs.dtype).itemsize + stacked


class EnvReplay(ABC, Generic[R]):
    """A ring of `ring` places for each env, sampled by priority. A subclass adds `_add`, `gather` and `arrays`."""

    arrays: ClassVar[tuple[str, ...]]  # attributes that a checkpoint holds

    def __init__(self, room: Capacity, ring: int, alpha: float, seed: int) -> None:
        self.room, self.envs, self.ring = room, room.envs, ring
        self.obs = dict[str, ObsStore]()
        self.count = np.zeros(room.envs, np.int64)  # rows (or blocks) of each env so far
        self.rings = EnvRings(room.envs)
        self.priorities = Priorities(room.envs * ring, alpha, seed)
        self.stamp = self.priorities.stamp  # which row (or block) of its env each place has

    @property
    def size(self) -> int:
        """Rows that may be sampled."""
        return self.priorities.tree.filled

    def add(self, rollout: Rollout, reward: Array) -> None:
        """Take in a rollout, with rewards `[T, B]` as they are learned from."""
        for columns in self.rings.turns(rollout.env_id.tolist()):
            env = np.array([self.rings.place(int(i)) for i in rollout.env_id[columns]])
            obs = {k: self._columns(x, columns) for k, x in entries(rollout.obs).items()}
            self._add(env, obs, rollout, columns, reward[:, columns])

    def _columns(self, x: Tensor, columns: list[int]) -> Any:
        return take(x, columns) if self.room.device is None else x[:, columns].to(self.room.device)

    @abstractmethod
    def _add(self, env: Array, obs: dict[str, Any], rollout: Rollout, columns: list[int], reward: Array) -> None:
        """Take in the columns of a rollout. `env` `[b]`: their rings; `obs` and `reward`: of these columns only."""

    @abstractmethod
    def gather(self, picks: Picks) -> R:
        """Copy the samples. Nothing may be added before this returns."""

    def _at(self, env: Array, number: Array) -> Array:
        """The place of an env's row (or block) by its number."""
        at: Array = env * self.ring + number % self.ring
        return at

    def state_dict(self) -> dict[str, Tensor]:
        """All of it, copied only from a GPU."""
        state = {name: getattr(self, name) for name in self.arrays} | self.priorities.state_dict()
        state["owner"] = self.rings.table()
        for i, store in enumerate(self.obs.values()):
            state |= {f"{name}/{i}": array for name, array in store.state_dict().items()}
        return {f"replay/{name}": torch.from_numpy(x) for name, x in state.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        of = {k.removeprefix("replay/"): x.numpy() for k, x in state.items() if k.startswith("replay/")}
        for name in self.arrays:
            getattr(self, name)[...] = of[name]
        self.priorities.load_state_dict(of)
        self.rings.load(of["owner"])
        for i, store in enumerate(self.obs.values()):
            end = f"/{i}"
            store.load_state_dict({k.removesuffix(end): array for k, array in of.items() if k.endswith(end)})


def take(x: Tensor, columns: list[int]) -> Array:
    """Columns of a rollout's field, on the host."""
    taken: Array = on_host(x)[:, columns]
    return taken
