"""Vector envs of three speeds whose episodes have four lengths, and which write down themselves what they stepped."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv

from coterie.types import Array

LENGTHS = (3, 7, 20, 50)  # steps of an episode, drawn for each one
PAUSES = (0.0, 2e-3, 6e-3)  # seconds that a step takes on top of its arithmetic


class Paced(VectorEnv[Any, Any, Any]):
    """Half of the episodes are truncated. The process adds up the steps of its whole episodes, by length, in a file of
    its own in the folder `tally`; when there is a file `over`, those that begin then are not counted, and show a 1.
    """

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012 - gymnasium's

    def __init__(self, speed: int, num_envs: int, tally: str, pace: float = 1.0) -> None:
        self.num_envs, self.pause, self.over = num_envs, PAUSES[speed] * pace, Path(tally) / "over"
        self.single_observation_space = spaces.Box(0, 1, (1,), np.float32)
        self.single_action_space = spaces.Discrete(2)
        path = Path(tally) / f"{speed}-{os.getpid()}"
        self.rows = np.memmap(path, np.int64, "r+" if path.exists() else "w+", shape=(len(LENGTHS),))
        self.left, self.drawn, self.late = (np.zeros(num_envs, int) for _ in range(3))

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.rng = np.random.default_rng(seed)
        self._begin(np.ones(self.num_envs, bool))
        return self._see(), {}

    def _begin(self, which: Array) -> None:
        self.drawn[which] = self.rng.integers(len(LENGTHS), size=int(which.sum()))
        self.left[which] = np.array(LENGTHS)[self.drawn[which]]
        self.late[which] = self.over.exists()

    def step(self, actions: Any) -> Any:
        again = self.left == 0
        self.left -= 1
        self._begin(again)
        ended, odd = self.left == 0, self.drawn % 2 == 1
        counted = self.drawn[ended & (self.late == 0)]
        self.rows += np.bincount(counted, minlength=len(LENGTHS)) * LENGTHS
        time.sleep(self.pause)
        return self._see(), np.zeros(self.num_envs, np.float32), ended & ~odd, ended & odd, {}

    def _see(self) -> Array:
        return self.late[:, None].astype(np.float32)


fast, slow, slowest = (partial(Paced, speed) for speed in range(len(PAUSES)))
TASKS = ",".join(f"tests.support.paced:{name}" for name in ("fast", "slow", "slowest"))  # of the processes, in turn


def tallied(folder: Path) -> Array:
    """`[speeds, lengths]`: steps in whole episodes, as the envs themselves have counted them."""
    found = np.zeros((len(PAUSES), len(LENGTHS)), np.int64)
    for path in folder.glob("*-*"):
        found[int(path.name.partition("-")[0])] += np.fromfile(path, np.int64)
    return found
