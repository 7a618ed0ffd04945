"""Which machine's weights a new group of machines starts from. A newcomer cannot choose its own."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True)
class Request:
    """A machine that wants to be in the next group."""

    uid: str
    name: str  # for messages
    kind: str  # what it trains
    seed: int  # of its envs
    sums: int  # that it took part in
    group: int  # the one that it was in; 0: none
    first: bool = False  # whether it is the listening machine, by its own knowledge alone
    nonce: str = ""  # that the answer repeats


def source_of(requests: list[Request]) -> int:
    """The rank of the machine whose state all take: the listening one, which is at most one sum behind its group. If it
    was restarted, the median of those that return from the same group.
    """
    first = next((rank for rank, request in enumerate(requests) if request.first), 0)
    groups = Counter(request.group for request in requests if request.group)
    if requests[first].group or not groups:
        return first
    last = max(groups, key=lambda group: (groups[group], group))
    there = sorted((request.sums, rank) for rank, request in enumerate(requests) if request.group == last)
    return there[len(there) // 2][1]
