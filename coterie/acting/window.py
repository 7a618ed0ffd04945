"""The pace of central acting: which requests are answered together, and which rollouts may begin, to bound the lag."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeVar

from coterie.config import ResolvedConfig
from coterie.envs.tasks import envs_per_child
from coterie.wire.codec import Refused


class Request(Protocol):
    """A request for actions, made at time `since`."""

    @property
    def width(self) -> int: ...

    @property
    def since(self) -> float: ...


Q = TypeVar("Q", bound=Request)
R = TypeVar("R", bound=Any)  # an `InferenceRequest`


def has_room(finished: int, envs: int, buffered: int) -> bool:
    """Whether new rollouts may begin: true while fewer than 2 x `envs` + `buffered` finished columns are waiting."""
    return finished < 2 * envs + buffered


def choose_batch(requests: Sequence[Q], now: float, least: int, most: int, wait: float) -> tuple[list[Q], float]:
    """The requests to answer now, the oldest first, or for how many seconds to wait for more (infinity: there are
    none). A batch has at least `least` envs, unless a request has waited for `wait` seconds, and at most `most` (0: any
    number), unless one request has more.
    """
    if not requests:
        return [], math.inf
    rows = sum(request.width for request in requests)
    left = wait - (now - min(request.since for request in requests))
    if rows < least and left > 0:
        return [], left
    picked, rows = list[Q](), 0
    for request in requests:
        if picked and most and rows + request.width > most:
            break
        picked.append(request)
        rows += request.width
    return picked, 0.0


class Window:
    """Bounds the policy lag. A rollout begins only if, with it, at most `columns` columns are begun and not yet trained
    on, and at most `columns` have begun since the oldest unfinished rollout (0: no limit). A rollout that has begun
    always finishes, and is never dropped for this bound.

    Between its beginning and its training at most 2 x (`columns` - its width) columns are then trained: those that
    began before it and were not trained yet, and those that begin after it and overtake it.
    """

    def __init__(self, columns: int) -> None:
        self.columns, self.begun = columns, 0
        self.unfinished: dict[int, int] = {}  # width by ticket, the columns that began before it; the oldest first
        self.finished = deque[int]()  # widths, in the order of training
        self._lock = threading.Lock()  # between acting and training

    def check(self, width: int, batch_size: int) -> None:
        """Raise `Refused` for a group of envs that might never begin."""
        if self.columns and width > (widest := self.columns - batch_size + 1):
            raise Refused(f"max_lag allows groups of at most {widest} envs, not {width}")

    def may_begin(self, width: int) -> bool:
        with self._lock:
            oldest = next(iter(self.unfinished), self.begun)
            untrained = sum(self.unfinished.values()) + sum(self.finished)
            return not self.columns or max(self.begun - oldest, untrained) + width <= self.columns

    def begin(self, width: int) -> int:
        """Begin a rollout; returns its ticket."""
        with self._lock:
            ticket, self.begun = self.begun, self.begun + width
            if self.columns:
                self.unfinished[ticket] = width
            return ticket

    def abandon(self, ticket: int) -> None:
        """A rollout will never finish."""
        with self._lock:
            self.unfinished.pop(ticket, None)

    def finish(self, ticket: int) -> None:
        with self._lock:
            if self.columns:
                self.finished.append(self.unfinished.pop(ticket))

    def trained(self, columns: int) -> None:
        """This number of columns was trained, of the rollouts that finished first."""
        with self._lock:
            while columns and self.finished:
                taken = min(columns, self.finished[0])
                self.finished[0] -= taken
                columns -= taken
                if not self.finished[0]:
                    self.finished.popleft()


def going(requests: Iterable[R], room: bool) -> list[R]:
    """The requests that can be answered now, in one batch."""
    found, begun = list[R](), 0
    for request in requests:
        if request.stream.may_go(room, begun):
            found.append(request)
            begun += request.stream.width if request.stream.recorder is None else 0
    return found


def window_of(max_lag: int, batch_size: int, updates: int) -> int:
    """Columns of the `Window` that keeps `max_lag`, of batches of `batch_size` with `updates` learner steps each. One
    batch is left for weights that are not published yet when a rollout begins.
    """
    return max(1, max_lag // updates - 1) * batch_size // 2 if max_lag else 0


def worst_lag(config: ResolvedConfig, updates: int) -> int | None:
    """A slow stream's rollout may be overtaken by any number of others, unless `max_lag` says how many."""
    return 0 if config.central.lockstep else config.max_lag or None


def least_lag(config: ResolvedConfig, updates: int) -> int:
    """Its `Window` has room for a batch and for the envs of a host beside it."""
    batch = config.central.batch_size or config.env.num_envs
    return 0 if config.central.lockstep else (1 - (-2 * (batch + envs_per_child(config) - 1) // batch)) * updates
