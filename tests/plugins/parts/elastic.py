"""An exchange in one file: elastic averaging SGD (Zhang et al. 2015, arXiv 1412.6651, Algorithm 1).

Learners step alone. Now and then each one moves towards weights in shared memory, and these move towards it.
"""

from __future__ import annotations

import numpy as np
import torch

import coterie
from coterie.exchange.base import ExchangeKind
from coterie.exchange.solo import Solo
from coterie.parallel.shm import SharedArrays

EVERY, PULL = 4, 0.25  # learner steps between two meetings; the share of the distance that is made good in one


class Elastic(Solo):
    def __init__(self, setup, shared):
        super().__init__(setup)
        self.center, self.made = torch.from_numpy(shared.arrays["center"]), 0

    @torch.no_grad()
    def step(self, params, lr):
        norm = super().step(params, lr)
        self.made += 1
        if self.made % EVERY == 0:
            move = PULL * (params.data - self.center)
            params.data -= move
            self.center += move
        return norm

    def gauges(self):
        return {"elastic/made": self.made}

    def state_dict(self):
        return {**super().state_dict(), "center": self.center.clone(), "made": torch.tensor(self.made)}

    def load_state_dict(self, state):
        own = dict(state)
        self.made = int(own.pop("made"))
        own.pop("center")  # restored in the parent
        super().load_state_dict(own)


def memory(setup):
    shared = SharedArrays({"center": (tuple(setup.params.data.shape), "float32")}, name="elastic")
    shared.arrays["center"][:] = setup.params.data.numpy()
    return shared


def restore(shared, state, moments):
    shared.arrays["center"][:] = state["center"].numpy()


def connect(setup):
    return Elastic(setup, setup.peers.memory or memory(setup))


def mixing(config, learners):
    """All learners average with all. Its memory is not that of gossip, and nothing reads their distance from it."""
    return [np.full((learners, learners), 1 / learners)]


KIND = ExchangeKind(
    connect, memory, restore, mixing, on_gpu=False, simulation="tests.plugins.parts.elastic_plan:SimElastic"
)
coterie.register_exchange("elastic", KIND)
