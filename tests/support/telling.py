"""An env that has numbers in its info, of every kind that counts and of some that do not."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

from coterie.envs.testing import CountingEnv


class TellingEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A CountingEnv whose info has `step` at each step of an episode (1, 2, ...), and `success` at its last one."""

    def __init__(self, length: int = 5, odd: bool = True) -> None:
        super().__init__(CountingEnv(length))
        self.odd = odd

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return self.env.reset(seed=seed)[0], {"step": 1000.0}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, _ = self.env.step(action)
        inner: Any = self.env
        info: dict[str, Any] = {"step": inner.steps}
        if self.odd:
            info |= {"deep": {"half": np.float32(inner.steps / 2)}, "array": np.zeros(3), "text": "1"}
            info |= {"bad": float("nan"), "large": 10**400, "time": np.timedelta64(5, "s"), "complex": np.complex64(1)}
        if terminated or truncated:
            info["success"] = np.bool_(terminated) if self.odd else terminated
        return obs, reward, terminated, truncated, info
