"""An env that breaks, in every way that one can."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from coterie.envs.testing import CountingEnv


class FlakyEnv(gymnasium.Env[Any, Any]):
    """A CountingEnv that breaks at its `at`-th step (counted over episodes), or at any step with `probability`.

    `how`: raise, quit (SystemExit), nan_reward, nan_obs, huge_obs, exit (the process ends), kill (SIGKILL), hang, or
    construct (the constructor raises). `marker`: a file that the first failure creates; with it no env breaks any more.
    """

    def __init__(self, how: str, at: int = 0, probability: float = 0.0, marker: str = "", length: int = 5) -> None:
        self.how, self.at, self.probability, self.marker = how, at, probability, marker
        self.inner = CountingEnv(length)
        self.observation_space, self.action_space = self.inner.observation_space, self.inner.action_space
        self.total = 0
        if how == "construct":
            raise RuntimeError("this env cannot be made")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self.inner.reset(seed=seed)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.total += 1
        obs, reward, terminated, truncated, info = self.inner.step(action)
        if self._breaks():
            if self.how == "raise":
                raise ValueError("flaky by design")
            if self.how == "quit":
                raise SystemExit("no license")
            if self.how == "exit":
                os._exit(3)
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "hang":
                time.sleep(3600)
            reward = float("nan") if self.how == "nan_reward" else reward
            obs = np.full_like(obs, {"nan_obs": np.nan, "huge_obs": 1e9}[self.how]) if "_obs" in self.how else obs
        return obs, reward, terminated, truncated, info

    def _breaks(self) -> bool:
        if self.total != self.at and self.np_random.random() >= self.probability:
            return False
        if not self.marker:
            return True
        try:
            Path(self.marker).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True
