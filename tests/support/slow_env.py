"""An env that costs a known time, in a module that is imported quickly."""

from __future__ import annotations

import time
from typing import Any

import gymnasium
import numpy as np


class Slow(gymnasium.Env[Any, Any]):
    """A step takes 2 ms of a core."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        end = time.process_time() + 0.002
        while time.process_time() < end:
            pass
        return np.zeros(2, np.float32), 0.0, False, False, {}
