"""Rollouts kept for replay: the newest ones, each as likely as any other (IMPALA, arXiv 1802.01561, section 5.2.2)."""

from __future__ import annotations

import torch
from torch import Tensor

from coterie.replay.alloc import room_for
from coterie.types import CoreState, Inputs, Obs, Rollout


class Fifo:
    """At most `capacity` columns of rollouts of one length, on the host. What is oldest is overwritten."""

    def __init__(self, capacity: int, seed: int) -> None:
        self.capacity, self.size, self.at = capacity, 0, 0
        self.rng = torch.Generator().manual_seed(seed)
        self.kept: list[Tensor] = []  # the fields of `_fields`, columns as axis 1 (of a core state as axis 0)

    def add(self, rollout: Rollout) -> None:
        """Copy the columns of a rollout."""
        fields = _fields(rollout)
        if not self.kept:
            self._room(fields, len(rollout.env_id))
            self.kept = [
                torch.empty(self.capacity, *x.shape[1:], dtype=x.dtype)
                if axis == 0
                else torch.empty(x.shape[0], self.capacity, *x.shape[2:], dtype=x.dtype)
                for axis, x in fields
            ]
        columns = len(rollout.env_id)
        into = (self.at + torch.arange(columns)) % self.capacity
        for kept, (axis, x) in zip(self.kept, fields, strict=True):
            kept.index_copy_(axis, into, x.cpu())
        self.at = (self.at + columns) % self.capacity
        self.size = min(self.capacity, self.size + columns)

    def sample(self, columns: int, like: Rollout) -> Rollout:
        """So many columns, drawn uniformly and with replacement, as a rollout of its own on the device of `like`."""
        which = torch.randint(self.size, (columns,), generator=self.rng)
        device = like.reward.device
        drawn = [
            kept.index_select(axis, which).to(device) for kept, (axis, _) in zip(self.kept, _fields(like), strict=True)
        ]
        return _rollout(drawn, like)

    def _room(self, fields: list[tuple[int, Tensor]], columns: int) -> None:
        need = sum(x.numel() * x.element_size() for _, x in fields) // columns * self.capacity
        room_for("vtrace.replay_capacity", need, f"{self.capacity:,} rollouts")


def _fields(rollout: Rollout) -> list[tuple[int, Tensor]]:
    """What replay needs of a rollout, each with the axis of its columns; one order for all rollouts of a run."""
    obs = list(rollout.obs.values()) if isinstance(rollout.obs, dict) else [rollout.obs]
    timed = [
        *obs, rollout.is_first, rollout.prev_action, rollout.prev_reward, rollout.terminated, rollout.truncated,
        rollout.behavior_log_prob, rollout.behavior_value, rollout.policy_version,
    ]  # fmt: skip
    core = [] if rollout.core_state is None else [(0, rollout.core_state)]
    return [*((1, x) for x in timed), (0, rollout.env_id), *core]


def _rollout(fields: list[Tensor], like: Rollout) -> Rollout:
    core: CoreState = fields.pop() if like.core_state is not None else None
    *obs, is_first, action, reward, terminated, truncated, log_prob, value, version, env_id = fields
    seen: Obs = dict(zip(like.obs, obs, strict=True)) if isinstance(like.obs, dict) else obs[0]
    inputs = Inputs(seen, is_first, action, reward)
    return Rollout(*inputs, action[1:], reward[1:], terminated, truncated, log_prob, value, version, env_id, core)
