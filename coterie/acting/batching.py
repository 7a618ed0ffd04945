"""Which requests of central acting are answered together: by the learner, and in the simulation of `coterie plan`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, TypeVar


class Request(Protocol):
    """A request for actions, made at time `since`."""

    @property
    def width(self) -> int: ...

    @property
    def since(self) -> float: ...


R = TypeVar("R", bound=Request)


def has_room(finished: int, envs: int, buffered: int) -> bool:
    """Whether new rollouts may begin: true while fewer than 2 x `envs` + `buffered` finished columns are waiting."""
    return finished < 2 * envs + buffered


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
