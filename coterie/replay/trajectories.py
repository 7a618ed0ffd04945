"""Replay of whole rollouts: the newest ones, sampled uniformly (IMPALA, arXiv 1802.01561, section 5.2.2)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from coterie.types import Rollout, entries, map_obs


class TrajectoryReplay:
    """At most `capacity` columns of rollouts of one length, on the host. The oldest are overwritten."""

    def __init__(self, capacity: int, seed: int) -> None:
        self.capacity, self.size, self.at = capacity, 0, 0
        self.rng = torch.Generator().manual_seed(seed)
        self.kept: list[Tensor] = []  # the fields of `_fields`, with `capacity` columns

    def add(self, rollout: Rollout) -> None:
        """Copy the columns of a rollout."""
        fields, columns = list(_fields(rollout)), len(rollout.env_id)
        if not self.kept:
            for axis, x in fields:
                shape = (*x.shape[:axis], self.capacity, *x.shape[axis + 1 :])
                self.kept.append(torch.empty(shape, dtype=x.dtype))
        into = (self.at + torch.arange(columns)) % self.capacity
        for kept, (axis, x) in zip(self.kept, fields, strict=True):
            kept.index_copy_(axis, into, x.cpu())
        self.at = (self.at + columns) % self.capacity
        self.size = min(self.capacity, self.size + columns)

    def sample(self, columns: int, like: Rollout) -> Rollout:
        """`columns` columns, sampled uniformly and with replacement, as a rollout on the device of `like`."""
        which = torch.randint(self.size, (columns,), generator=self.rng)
        device = like.reward.device
        fields = zip(self.kept, _fields(like), strict=True)
        sampled = iter([kept.index_select(axis, which).to(device) for kept, (axis, _) in fields])
        obs = map_obs(lambda x: next(sampled), like.obs)
        values = {name: next(sampled) for name in _NAMES}
        values |= {"action": values["prev_action"][1:], "reward": values["prev_reward"][1:]}
        core = None if like.core_state is None else next(sampled)
        return replace(like, obs=obs, core_state=core, episodes=[], origins=[], **values)


# What replay needs of a rollout; `action` and `reward` are rows of the previous ones.
_NAMES = (
    "is_first", "prev_action", "prev_reward", "terminated", "truncated", "behavior_log_prob", "behavior_value",
    "policy_version", "env_id",
)  # fmt: skip


def _fields(rollout: Rollout) -> Iterator[tuple[int, Tensor]]:
    """The fields in a fixed order, each with the axis of its columns."""
    for x in entries(rollout.obs).values():
        yield 1, x
    for name in _NAMES:
        yield int(name != "env_id"), getattr(rollout, name)
    if rollout.core_state is not None:
        yield 0, rollout.core_state
