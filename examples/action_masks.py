"""Legal choices and mixed actions: fire three shells at a target, each of them once, at a distance of your choice.

    coterie train ppo --env action_masks:Cannon --steps 100000     # in this folder, or with it on PYTHONPATH
    python examples/action_masks.py                                # the same from Python

The action is a Dict: which shell, and how far. `action_mask` in the observation says which shells are left. An action
without numbers suits the value methods, too: the same with `dqn`, and with `--env.kwargs '{"angle": false}'`.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Cannon(gymnasium.Env[Any, Any]):
    """Three shots in an episode, each at a new target, from -1 to 1. A shot is worth 1 less the miss, twice that with
    the right shell: 0 for targets below 0, 2 for those above 0.5, else 1.
    """

    def __init__(self, angle: bool = True) -> None:
        self.angle = angle
        self.observation_space = spaces.Dict(
            {
                "target": spaces.Box(-1, 1, (1,), np.float32),
                "shells": spaces.Tuple((spaces.Discrete(4), spaces.MultiBinary(3))),  # how many are left, and which
                "action_mask": spaces.MultiBinary(3),
            }
        )
        shell, distance = spaces.Discrete(3), spaces.Box(-1, 1, (1,), np.float32)
        self.action_space = spaces.Dict({"shell": shell, "distance": distance}) if angle else shell

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.left = np.ones(3, np.int8)
        self.target = self.np_random.uniform(-1, 1)
        return self.look(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        shell, distance = (action["shell"], action["distance"][0]) if self.angle else (action, self.target)
        if not self.left[shell]:
            raise ValueError(f"shell {shell} was fired before")
        self.left[shell] = 0
        right = shell == (0 if self.target < 0 else 1 if self.target < 0.5 else 2)
        reward = (2 if right else 1) * max(0.0, 1 - abs(float(distance) - self.target))
        self.target = self.np_random.uniform(-1, 1)
        return self.look(), reward, not self.left.any(), False, {}

    def look(self) -> dict[str, Any]:
        left = self.left.copy()
        return {"target": np.array([self.target], np.float32), "shells": (left.sum(), left), "action_mask": left}


if __name__ == "__main__":
    import coterie

    config = coterie.presets.ppo(env="action_masks:Cannon", steps=100_000)
    summary = coterie.train(config)
    print(f"mean return {summary['mean_return']:.2f}; random legal actions have 1.7")
