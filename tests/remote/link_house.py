"""A run that listens and runs that come, in one process: memory, learners, and what a good one sends."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from coterie.exchange.base import Circle
from coterie.exchange.gossip import Gossip
from coterie.exchange.topology import matrices
from coterie.remote.gossip_client import Link
from coterie.remote.gossip_hub import Meeting
from coterie.remote.gossip_mirror import news_layout
from coterie.types import ConfigError
from tests.conftest import make_config
from tests.exchange.gossip_harness import SIZE, distance, machine, weights
from tests.support.wire import hello_frame

METHOD = "/coterie.v1.Coterie/Gossip"
SEATS, NET, WAIT_S = 3, "a net", 20.0


class Hub:
    """A run with one learner, to which others come."""

    def __init__(self, address: str, **changes: Any) -> None:
        self.address = address
        self.memory, [self.learner] = machine(SEATS, [0], np.eye(SEATS, 4))
        config = make_config(**{"exchange": "gossip", "gossip.bind": address, **changes})
        self.meeting = Meeting(config, Circle(0, matrices("complete", SEATS)), self.memory, 1, NET)

    @property
    def here(self) -> list[int]:
        return self.memory.arrays["here"].tolist()


class Guest:
    """A run that comes, with one learner."""

    def __init__(self, address: str, net: str = NET, learners: int = 1, **changes: Any) -> None:
        config = make_config(**{"exchange": "gossip", "gossip.connect": address, "log.stall": 0.5, **changes})
        self.heard: list[str] = []
        self.link = Link(config, learners, False, self.heard.append)
        try:
            self.link.check(net, SIZE, 1)
        except ConfigError:
            self.link.close()
            raise
        own = list(range(self.link.seat, self.link.seat + learners))
        self.memory, self.learners = machine(SEATS, own, np.eye(SEATS, 4))
        self.learner = self.learners[0]
        self.joins = self.link.attach(self.memory, join=True)
        for one in self.learners:
            one.rejoin = self.joins
            one.__enter__()

    def said(self) -> str:
        return "; ".join(self.link.lines)


def until(condition: Callable[[], object], what: str, *learners: Gossip) -> None:
    """These learners train meanwhile."""
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, what
        for one in learners:
            one.step(one.params, 1.0)
        time.sleep(0.002)


def agree(*learners: Gossip) -> None:
    rng = np.random.default_rng(len(learners))
    for one in learners:
        one.params.data[:4] = one.params.data.new_tensor(rng.standard_normal(4))
    until(lambda: distance(weights(list(learners))) < 1e-3, "they come together", *learners)


def news(seat: int, told: int = 1, **changes: Any) -> bytes:
    state = np.zeros((SEATS, 4), np.int64)
    state[seat] = [1, told, told - 1, 0]
    good = {
        "state": state,
        "speaks": np.array([True]),
        "seat": np.array([seat]),
        "message": np.full((1, SIZE), 0.5, np.float32),
        "moments": np.zeros((1, 1)),
    }
    return news_layout(SEATS, SIZE, 1).pack({**good, **changes})


def hello(**changes: Any) -> bytes:
    return hello_frame(news_layout(SEATS, SIZE, 1), **{"env_id": "CartPole-v1", "number": -1, **changes})
