"""Which of a replay's rings is which env's."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from coterie.ops.returns import turns
from coterie.types import Array


class Owners:
    """At most `envs` env ids at a time: a new one takes the ring of the one not heard of for the longest time."""

    def __init__(self, envs: int) -> None:
        self.envs, self.of = envs, OrderedDict[int, int]()

    def place(self, env_id: int) -> int:
        if env_id not in self.of:
            self.of[env_id] = len(self.of) if len(self.of) < self.envs else self.of.popitem(last=False)[1]
        self.of.move_to_end(env_id)
        return self.of[env_id]

    def turns(self, ids: list[int]) -> list[list[int]]:
        """The columns of a batch such that no env is twice in one turn, and no turn has more of them than rings."""
        size = self.envs
        return [turn[i : i + size] for turn in turns(ids) for i in range(0, len(turn), size)]

    def table(self) -> Array:
        """`[k, 2]`: env id and ring, who was heard of last comes last."""
        return np.array([*self.of.items()], np.int64).reshape(-1, 2)

    def load(self, table: Array) -> None:
        self.of = OrderedDict((int(env_id), int(ring)) for env_id, ring in table)
