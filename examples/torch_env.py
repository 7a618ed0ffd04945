"""A simulator written in torch, for any device, behind a backend of its own: python examples/torch_env.py [ENV_STEPS]

Or by name, from the folder examples: coterie train ppo --env.backend torch_env:Reach --env reach
"""

import sys

import numpy as np
import torch
from gymnasium.spaces import Box

import coterie
from coterie.envs.backend import Backend, StepResults, declare

LENGTH = 30
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Reach(Backend):
    """Push a point to a goal: all points in a few calls, on a GPU if there is one."""

    tensors = True

    def __init__(self, env_id, seeds, device=DEVICE):
        super().__init__(declare(env_id, Box(-np.inf, np.inf, (4,)), Box(-1, 1, (2,))), len(seeds))
        self.rng, self.device = torch.Generator(device).manual_seed(seeds[0]), device

    def reset(self, ids):
        self.place, self.goal = self.random(), self.random()
        self.reward = self.steps = torch.zeros(self.num_instances, device=self.device)
        self.arrived = torch.zeros_like(self.steps, dtype=torch.bool)

    def step(self, ids, actions):
        begins = self.arrived | (self.steps == LENGTH)  # their step is the reset
        fresh = begins[:, None]
        self.place = torch.where(fresh, self.random(), self.place + 0.2 * actions)
        self.goal = torch.where(fresh, self.random(), self.goal)
        self.steps = torch.where(begins, 0, self.steps + 1)
        distance = (self.place - self.goal).norm(dim=1)
        self.arrived = ~begins & (distance < 0.2)
        self.reward = torch.where(begins, 0, 1.0 * self.arrived - 0.1 * distance)

    def recv(self):
        late = ~self.arrived & (self.steps == LENGTH)  # a time limit, from which the value is bootstrapped
        obs = torch.cat([self.place, self.goal - self.place], 1)
        return StepResults(obs, self.reward, self.arrived, late, self.arrived | late)

    def random(self):
        return 2 * torch.rand(self.num_instances, 2, generator=self.rng, device=self.device) - 1


if __name__ == "__main__":
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 200_000
    settings = {"env.backend": Reach, "env.num_envs": 256, "algo.unroll_length": 32, "eval.every": 0}
    settings |= {"ppo.batch_size": 0, "ppo.minibatch_size": 1024}
    summary = coterie.train(env="reach", preset="ppo", steps=steps, **settings)
    print(f"{summary['folder']}: mean return {summary['mean_return']:.2f}")
