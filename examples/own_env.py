"""Train an environment that is defined in this very script: python examples/own_env.py [ENV_STEPS]

The class goes to the worker processes by value. The run remembers its name only: give the class again to go on later,
as in `coterie.resume(folder, env=Corridor, steps=40_000)`.
"""

import sys

import gymnasium
import numpy as np

import coterie


class Corridor(gymnasium.Env):
    """Walk to the end of a corridor: 1 for arriving, a little less for each step."""

    def __init__(self, length=8):
        self.length = length
        self.observation_space = gymnasium.spaces.Box(0.0, 1.0, (length,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)  # back, forward

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at, self.steps = 0, 0
        return self.look(), {}

    def step(self, action):
        self.at, self.steps = max(0, self.at + (1 if action == 1 else -1)), self.steps + 1
        arrived = self.at == self.length - 1
        info = {"success": arrived}  # its last value in each episode becomes the metric env/success
        return self.look(), 1.0 * arrived - 0.01, arrived, self.steps == 50, info

    def look(self):
        return np.eye(self.length, dtype=np.float32)[self.at]


if __name__ == "__main__":
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    run = coterie.train(env=Corridor, preset="ppo", steps=steps)  # or env=lambda: Corridor(length=12)
    score = coterie.evaluate_run(run["folder"], episodes=20)
    print(f"{run['folder']}: mean return {score['mean_return']:.2f}, at best 0.93")
