"""A run that listens for gossip and runs that connect, in one process: memory, learners, and a client's good frames."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from coterie.exchange.gossip import Gossip
from coterie.exchange.mailboxes import MAX_REMOTE_LEARNERS, Net, message_layout
from coterie.remote.gossip_link import GossipClient, GossipHub
from tests.conftest import make_config
from tests.exchange.gossip_harness import SIZE, distance, linked, weights
from tests.support.waiting import wait_until
from tests.support.wire import hello_frame

METHOD = "/coterie.v1.Coterie/Gossip"
DIGEST = "a net"
LAYOUT = message_layout(SIZE, 1)


class HubRun:
    """A run with one learner, to which others connect. `begun`: the learner has started."""

    def __init__(self, address: str, begun: bool = True, **changes: Any) -> None:
        self.memory, [self.learner] = linked(1, np.eye(1, 4))
        config = make_config(**{"exchange": "gossip", "gossip.bind": address, **changes})
        self.hub = GossipHub(config, 1, Net(DIGEST, SIZE, 1))
        self.hub.start(self.memory)
        if begun:
            self.learner.__enter__()

    @property
    def present(self) -> list[int]:
        """Rows of the learners that take part."""
        return np.flatnonzero(self.memory.arrays["present"]).tolist()

    def close(self, over: bool = True) -> None:
        self.hub.close(over)


class ClientRun:
    """A run that connects; its learners start with the others' weights if there are any."""

    def __init__(self, address: str, digest: str = DIGEST, learners: int = 1, **changes: Any) -> None:
        config = make_config(**{"exchange": "gossip", "gossip.connect": address, **changes})
        self.client = GossipClient(config, learners, Net(digest, SIZE, 1))
        self.memory, self.learners = linked(learners, np.eye(8, 4)[1:])
        self.learner = self.learners[0]
        self.joins = self.client.start(self.memory, join=True)
        for one in self.learners:
            one.rejoin = self.joins
            one.__enter__()
        self.log: list[str] = []

    def said(self) -> str:
        self.log += self.client.lines()
        return "; ".join(self.log)

    def close(self) -> None:
        self.client.close()


def train_until(condition: Callable[[], object], what: str, *learners: Gossip) -> None:
    """These learners train meanwhile."""

    def train() -> object:
        for one in learners:
            one.step(one.params, 1.0)
        return condition()

    wait_until(train, 20.0, what)


def agree(*learners: Gossip) -> None:
    """Learners with different weights have nearly the same after a while."""
    rng = np.random.default_rng(len(learners))
    for one in learners:
        one.params.data[:4] = one.params.data.new_tensor(rng.standard_normal(4))
    train_until(lambda: distance(weights(list(learners))) < 1e-3, "the same weights", *learners)


def frame(sender: int = 0, **changes: Any) -> bytes:
    good = {
        "present": np.arange(MAX_REMOTE_LEARNERS) == sender,
        "filled": np.array([True]),
        "learner": np.array([sender]),
        "weights": np.full((1, SIZE), 0.5, np.float32),
        "moments": np.zeros((1, 1)),
    }
    return LAYOUT.pack({**good, **changes})


def hello(**changes: Any) -> bytes:
    return hello_frame(LAYOUT, **{"env_id": "CartPole-v1", "envs": 1, "number": -1, **changes})
