"""`Envs`: a learner's environments, in one group or in two that step independently (alternating sampling).

Accelerated Methods 3.1 (two groups), 4.1 (start decorrelation; resets in place, held back, or swapped for a reserve).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType

import numpy as np

from coterie import config
from coterie.envs.backend import Backend
from coterie.envs.group import Group, env_seed
from coterie.types import Array, CoterieError, TimeStep

_REASONS_KEPT = 50

MakeBackend = Callable[[Sequence[int]], Backend]  # one seed for each instance


class Envs:
    """Environments with global ids `first_env_id` and up, seeded apart by (seed, id) whatever the groups."""

    def __init__(
        self, make: MakeBackend, env: config.Env, *, seed: int, first_env_id: int = 0, groups: int = 1,
        union: bool = False,
    ) -> None:  # fmt: skip
        self.num_envs = env.num_envs
        size = env.num_envs // groups
        self.groups = [slice(g * size, (g + 1) * size) for g in range(groups)]
        self.replaced = 0
        self._lock = threading.Lock()
        self._budget, self._reasons = env.replace_budget, deque[str](maxlen=_REASONS_KEPT)
        self._group: list[Group] = []
        self._backends: list[Backend] = []
        reserve = -(-(env.reserve or -(-env.num_envs // 4)) // groups) if env.reset == "swap" else 0
        try:
            for cols in self.groups:
                ids = np.arange(cols.start, cols.stop, dtype=np.int64) + first_env_id
                keys: list[tuple[int, ...]] = [(int(i),) for i in ids]
                keys += [(int(ids[0]), 1, r) for r in range(reserve)]
                self._backends.append(make([env_seed(seed, *key) for key in keys]))
                group = Group(self._backends[-1], ids, keys, seed, env.reset, env.time_limit, self._count)
                self._group.append(group)
            for group in self._group:  # apart from the above, so that both groups start at once
                group.start(env.decorrelate)
        except BaseException:
            self.close()
            raise
        self.spec = self._backends[0].spec
        self._legal = self.spec.action.sizes[0] if union and self.spec.action.kind == "categorical" else 0
        delayed = env.delay_learner in (-1, first_env_id // env.num_envs)
        self._delay, self._exponential = env.delay * delayed, env.delay_kind == "exponential"
        self._delays = np.random.default_rng(env_seed(seed, first_env_id, 2))

    def failures(self) -> list[str]:
        """Why envs were replaced since this was last asked, the newest last (the last 50)."""
        with self._lock:
            reasons = list(self._reasons)
            self._reasons.clear()
        return reasons

    def recv(self, group: int) -> TimeStep:
        """Wait for a group's TimeStep; the first one holds the first observations."""
        seen = self._group[group].recv()
        if self._delay:  # after the step: before it, the envs would step meanwhile
            time.sleep(self._delays.exponential(self._delay) if self._exponential else self._delay)
        return seen

    def send(self, group: int, action: Array) -> None:
        """Start a step of a group: int64 `[B]` or `[B, A]`, or float32 `[B, A]`."""
        self._group[group].send(np.where(action < self._legal, action, 0) if self._legal else action)

    def end_rollout(self) -> None:
        """After the last `recv` of a rollout: start the resets that `wait` and `swap` held back; does not wait."""
        for group in self._group:
            group.end_rollout()

    def begin_rollout(self, group: int) -> TimeStep:
        """Row 0 of the next rollout: the last TimeStep, with the rows of envs that were reset since replaced."""
        return self._group[group].begin_rollout()

    def close(self) -> None:
        for backend in self._backends:
            backend.close()

    def __enter__(self) -> Envs:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _count(self, reasons: Sequence[str]) -> None:
        with self._lock:  # groups may run in threads of their own
            self.replaced += len(reasons)
            self._reasons.extend(reasons)
        if self.replaced > self._budget:
            raise CoterieError(
                f"{self.replaced} envs had to be replaced, more than env.replace_budget {self._budget}; "
                f"the last: {reasons[-1]}"
            )
