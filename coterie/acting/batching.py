"""What central acting decides: which streams may go on, and which requests are answered together. The simulation of
`coterie plan` uses `has_room` and `choose_batch`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Protocol, TypeVar


class Stream(Protocol):
    """The envs of one group of an env host."""

    @property
    def width(self) -> int: ...


class Request(Protocol):
    """A request for actions, made at time `since`."""

    @property
    def width(self) -> int: ...

    @property
    def since(self) -> float: ...


R = TypeVar("R", bound=Request)
S = TypeVar("S", bound=Stream)


def has_room(finished: int, envs: int, buffered: int) -> bool:
    """Whether new rollouts may begin: true while fewer than 2 x `envs` + `buffered` finished columns are waiting."""
    return finished < 2 * envs + buffered


def may_go(row: int, unroll_length: int, lockstep: bool, room: bool) -> bool:
    """Whether a stream's next row can be written. `row`: of its unfinished rollout, -1 without one; `room`: another
    rollout may begin. In lockstep no row follows the last one of a rollout.
    """
    begins = row < 0 or (row == unroll_length and not lockstep)
    return room or not begins


def choose_batch(requests: Sequence[R], now: float, least: int, most: int, wait: float) -> tuple[list[R], float]:
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
    picked, rows = list[R](), 0
    for request in requests:
        if picked and most and rows + request.width > most:
            break
        picked.append(request)
        rows += request.width
    return picked, 0.0


def choose_turn(streams: Collection[S], envs: int, rests: Callable[[S], bool], ready: Callable[[S], bool]) -> list[S]:
    """In lockstep: all streams of `envs` envs at once, except those that rest until newer weights are published; none
    before all others are ready.
    """
    due = [stream for stream in streams if not rests(stream)]
    complete = sum(stream.width for stream in streams) == envs
    return due if complete and all(map(ready, due)) else []
