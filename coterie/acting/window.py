"""The bound on the policy lag of central acting, kept by pacing what begins."""

from __future__ import annotations

import threading
from collections import deque

from coterie.config import ResolvedConfig
from coterie.envs.tasks import envs_per_child
from coterie.wire.codec import Refused


class Window:
    """Keeps rollouts that are trained together from being of very different age: none begins while one that began more
    than `columns` columns before it is not trained yet (0: no limit). What has begun is never dropped for that.

    Between its beginning and its training at most 2 x (`columns` - its width) columns are then trained: those that
    began before it and were not trained yet, and those that begin after it.
    """

    def __init__(self, columns: int) -> None:
        self.columns, self.begun = columns, 0
        self.untrained: dict[int, int] = {}  # width by ticket, the columns that began before it; the oldest first
        self.finished = deque[tuple[int, int]]()  # ticket and columns, in the order of training
        self._lock = threading.Lock()  # between acting and training

    def check(self, width: int, batch_size: int) -> None:
        """Raise `Refused` for a group of envs that may be kept from beginning for ever."""
        if self.columns and width > (widest := self.columns - batch_size + 1):
            raise Refused(f"max_lag allows groups of at most {widest} envs, not {width}")

    def may_begin(self, width: int) -> bool:
        with self._lock:
            oldest = next(iter(self.untrained), self.begun)
            return not self.columns or self.begun + width - oldest <= self.columns

    def begin(self, width: int) -> int:
        """Begin a rollout; returns its ticket."""
        with self._lock:
            ticket, self.begun = self.begun, self.begun + width
            self.untrained[ticket] = width
            return ticket

    def abandon(self, ticket: int) -> None:
        with self._lock:
            self.untrained.pop(ticket, None)

    def finish(self, ticket: int) -> None:
        with self._lock:
            self.finished.append((ticket, self.untrained[ticket]))

    def train(self, columns: int) -> None:
        """This number of columns was trained, of the rollouts that finished first."""
        with self._lock:
            while columns:
                ticket, left = self.finished.popleft()
                if left > columns:
                    self.finished.appendleft((ticket, left - columns))
                else:
                    del self.untrained[ticket]
                columns -= min(left, columns)


def window_of(max_lag: int, batch_size: int, updates: int) -> int:
    """Columns of the `Window` that keeps `max_lag`, of batches of `batch_size` with `updates` learner steps each."""
    return max_lag // updates * batch_size // 2


def worst_lag(config: ResolvedConfig, updates: int) -> int | None:
    """A slow stream's rollout may be overtaken by any number of others, unless `max_lag` says how many."""
    return 0 if config.central.lockstep else config.max_lag or None


def least_lag(config: ResolvedConfig, updates: int) -> int:
    """Its `Window` has room for a batch and for the envs of a host beside it."""
    batch = config.central.batch_size or config.env.num_envs
    return 0 if config.central.lockstep else -(-2 * (batch + envs_per_child(config) - 1) // batch) * updates
