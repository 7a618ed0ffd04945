"""Envs that a replay does not find as they were, in a module that is imported quickly."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np

from coterie.envs.testing import CountingEnv


class Fickle(CountingEnv):
    """Not deterministic from its 30th step on."""

    def __init__(self) -> None:
        super().__init__(length=1000)
        self.steps = 0

    def step(self, action):
        obs, reward, *more = super().step(action)
        self.steps += 1
        return obs, reward + (time.time() % 1 if self.steps > 30 else 0.0), *more


class Unseeded(CountingEnv):
    """Begins anywhere, whatever its seed."""

    def reset(self, **seeds):
        obs, info = super().reset(**seeds)
        return obs + np.random.default_rng().random(obs.shape).astype(obs.dtype), info


class Changed(CountingEnv):
    """Deterministic, but not the same in a replay."""

    def step(self, action):
        obs, reward, *more = super().step(action)
        return obs, reward + ("REPLAYED" in os.environ), *more


class Poisonous(CountingEnv):
    """Its reward becomes infinite."""

    def step(self, action):
        obs, reward, *more = super().step(action)
        return obs, 1e25 if reward > 60 else 0.0, *more


class Poisoned(Poisonous):
    """It is infinite once in a while."""

    def step(self, action):
        obs, reward, *more = super().step(action)
        return obs, reward if self.count % 50 == 0 else 0.0, *more


class Uneven(CountingEnv):
    """The env that steps first is slow, and in a replay none is. `first`: a file that it makes."""

    def __init__(self, first):
        super().__init__()
        self.first, self.slow = Path(first), None

    def step(self, action):
        if self.slow is None:
            try:
                self.first.touch(exist_ok=False)
            except FileExistsError:
                self.slow = False
            else:
                self.slow = True
        time.sleep(8e-3 * self.slow)
        return super().step(action)
