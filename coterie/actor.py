"""The environment loop, and the Recorder that turns what it sees into rollouts.

`env_loop` knows nothing of learning: acting is a callable, a local call here, a rendezvous or an RPC elsewhere.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from coterie.types import AgentOutput, Array, Inputs, Rollout, Spec, TimeStep

Act = Callable[[int, int, TimeStep], Array]  # (group, row of the rollout, what is seen) -> actions


class Envs(Protocol):
    """What acting needs of a set of environments; `envs/owner.py` has the real one."""

    spec: Spec
    num_envs: int
    groups: list[slice]

    def recv(self, group: int) -> TimeStep: ...
    def send(self, group: int, action: Array) -> None: ...
    def end_rollout(self) -> None: ...
    def begin_rollout(self, group: int) -> TimeStep: ...


class Stages:
    """Seconds spent in each stage, by one thread."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def add(self, stage: str, begin: float) -> float:
        """Book the time since `begin`; returns now."""
        now = time.perf_counter()
        self.seconds[stage] += now - begin
        return now

    def merge(self, others: Sequence[Stages]) -> None:
        """Take over what threads that ran side by side have booked: their mean."""
        for other in others:
            for stage, seconds in other.seconds.items():
                self.seconds[stage] += seconds / len(others)
            other.seconds.clear()


def env_loop(envs: Envs, act: Act, rows: range, seen: dict[int, TimeStep], stages: Stages) -> dict[int, TimeStep]:
    """Take a step for each of `rows` in each group of `seen`, starting from what it shows; returns what is seen last.

    With two groups one steps while the other is acted on: a group is waited for only when its turn comes again.
    """
    seen = dict(seen)
    begin = time.perf_counter()
    for row in rows:
        for g in seen:
            if row > rows.start:
                seen[g] = envs.recv(g)
                begin = stages.add("env", begin)
            envs.send(g, act(g, row, seen[g]))
            begin = stages.add("act", begin)
    for g in seen:
        seen[g] = envs.recv(g)
    stages.add("env", begin)
    return seen


@dataclass
class _Columns:
    """What one group writes and reads: views `[T+1 or T, b, ...]` of the recorder's arrays."""

    obs: dict[str, Tensor]
    is_first: Tensor  # on the host
    action: Tensor
    reward: Tensor  # on the host
    log_prob: Tensor
    value: Tensor


class Recorder:
    """Writes timesteps and agent outputs of all groups into one set of `[T+1, B]` arrays, in place.

    Observations and agent outputs live on `device`, written as they are acted on (one upload per observation, none
    at training); the env's small fields are written on the host and follow when the rollout is done. Actions and
    rewards have a row before row 0, so that `prev_action` and `prev_reward` are views of the same storage.
    Floats that were never written are -42.42: a misread shows.
    """

    def __init__(
        self, spec: Spec, num_envs: int, groups: list[slice], unroll_length: int, device: torch.device
    ) -> None:
        t, b = unroll_length, num_envs
        self.unroll_length, self.groups, self.device = t, groups, device
        self.obs: dict[str, Tensor] = {
            k: torch.zeros((t + 1, b, *s.shape), dtype=getattr(torch, s.dtype), device=device)
            for k, s in spec.obs.items()
        }
        self.plain = list(spec.obs) == [""]
        poison = -42.42
        action_dtype = getattr(torch, spec.action.dtype)
        self.action = torch.zeros((t + 1, b, *spec.action.shape), dtype=action_dtype, device=device)
        self.log_prob = torch.full((t, b), poison, device=device)
        self.value = torch.full((t + 1, b), poison, device=device)
        self.version = np.zeros((t, b), np.int64)
        self.reward = np.full((t + 1, b), poison, np.float32)
        self.reward[0] = 0
        self.is_first = np.ones((t + 1, b), bool)
        self.terminated = np.zeros((t, b), bool)
        self.truncated = np.zeros((t, b), bool)
        self.env_id = np.zeros(b, np.int64)
        self.core_states: list[Tensor] = []
        self.episodes: list[tuple[float, int]] = []
        # Each group's columns of all rows: a row of them is one call away.
        self.columns = [
            _Columns(
                {k: x[:, cols] for k, x in self.obs.items()},
                torch.from_numpy(self.is_first)[:, cols],
                self.action[:, cols],
                torch.from_numpy(self.reward)[:, cols],
                self.log_prob[:, cols],
                self.value[:, cols],
            )
            for cols in groups
        ]

    def begin(self, core_states: list[Tensor | None]) -> None:
        """Start a rollout: the last row of the one before becomes the row before row 0."""
        self.action[0].copy_(self.action[-1])
        self.reward[0] = self.reward[-1]
        self.episodes = []
        self.core_states = [s for s in core_states if s is not None]

    def see(self, g: int, row: int, ts: TimeStep) -> Inputs:
        """Write `obs[row]` and the consequence of `action[row - 1]`; returns the row's columns as the model's input."""
        cols = self.groups[g]
        seen = {"": ts.obs} if self.plain else ts.obs
        for key, storage in self.columns[g].obs.items():
            storage[row].copy_(torch.from_numpy(seen[key]), non_blocking=True)
        self.is_first[row, cols] = ts.is_first
        if row:
            self.reward[row, cols] = ts.reward
            self.terminated[row - 1, cols] = ts.terminated
            self.truncated[row - 1, cols] = ts.truncated
            ended = ~np.isnan(ts.episode_return)
            if ended.any():
                self.episodes += zip(
                    ts.episode_return[ended].tolist(), ts.episode_length[ended].astype(int).tolist(), strict=True
                )
        else:
            self.env_id[cols] = ts.env_id
        return self.inputs(g, row)

    def inputs(self, g: int, row: int) -> Inputs:
        """What the model saw, or is to see, at `row`."""
        mine = self.columns[g]
        obs = mine.obs[""][row] if self.plain else {k: x[row] for k, x in mine.obs.items()}
        return Inputs(obs, self._up(mine.is_first[row]), mine.action[row], self._up(mine.reward[row]))

    def act(self, g: int, row: int, out: AgentOutput, version: int) -> None:
        """Write what the policy said at `row`."""
        mine = self.columns[g]
        mine.action[row + 1].copy_(out.action)
        mine.log_prob[row].copy_(out.log_prob)
        mine.value[row].copy_(out.value)
        self.version[row, self.groups[g]] = version

    def bootstrap(self, g: int, value: Tensor) -> None:
        """Write the value of row T."""
        self.columns[g].value[-1].copy_(value)

    def rollout(self) -> Rollout:
        """The rollout just recorded: views of this storage, valid until the next `begin`."""
        reward = self._host(self.reward)
        return Rollout(
            obs=self.obs[""] if self.plain else dict(self.obs),
            is_first=self._host(self.is_first),
            prev_action=self.action,
            prev_reward=reward,
            action=self.action[1:],
            reward=reward[1:],
            terminated=self._host(self.terminated),
            truncated=self._host(self.truncated),
            behavior_log_prob=self.log_prob,
            behavior_value=self.value,
            policy_version=self._host(self.version),
            env_id=self._host(self.env_id),
            # A clone made here is an ordinary tensor; the states themselves are inference tensors.
            core_state=torch.cat(self.core_states).clone() if self.core_states else None,
            episodes=self.episodes,
        )

    def _host(self, array: Array) -> Tensor:
        return self._up(torch.from_numpy(array))

    def _up(self, tensor: Tensor) -> Tensor:
        return tensor if self.device.type == "cpu" else tensor.to(self.device, non_blocking=True)
