"""PPO in one file and one process, in the manner of CleanRL, on EnvPool.

    python single_file.py {lunar,breakout} [--seconds 60] [--envs 32] [--epochs 4] [--threads 2]

128 steps of each env, minibatches of 256, separate 64-64 nets for vectors and one Nature CNN for images, in fp32.
"""

from __future__ import annotations

import argparse

import envpool
import numpy as np
import torch
from meter import Meter
from torch import Tensor, nn
from torch.distributions import Categorical

STEPS, MINIBATCH, GAMMA, LAMBDA, CLIP = 128, 256, 0.99, 0.95, 0.1
TASKS = {"lunar": "LunarLander-v3", "breakout": "Breakout-v5"}


def layer(module: nn.Module, gain: float = 2**0.5) -> nn.Module:
    nn.init.orthogonal_(module.weight, gain)  # type: ignore[arg-type]
    nn.init.zeros_(module.bias)  # type: ignore[arg-type]
    return module


class Agent(nn.Module):
    def __init__(self, obs: tuple[int, ...], actions: int) -> None:
        super().__init__()
        self.images = len(obs) == 3

        def trunk() -> nn.Sequential:
            if self.images:
                convolutions = [layer(nn.Conv2d(*c)) for c in ((obs[0], 32, 8, 4), (32, 64, 4, 2), (64, 64, 3, 1))]
                parts = [part for c in convolutions for part in (c, nn.ReLU())]
                return nn.Sequential(*parts, nn.Flatten(), layer(nn.Linear(64 * 7 * 7, 512)), nn.ReLU())
            return nn.Sequential(layer(nn.Linear(obs[0], 64)), nn.Tanh(), layer(nn.Linear(64, 64)), nn.Tanh())

        self.actor = trunk()
        self.critic = self.actor if self.images else trunk()
        size = 512 if self.images else 64
        self.policy, self.value = layer(nn.Linear(size, actions), 0.01), layer(nn.Linear(size, 1), 1.0)

    def forward(self, obs: Tensor) -> tuple[Categorical, Tensor]:
        x = obs.float() / 255 if self.images else obs.float()
        features = self.actor(x)
        value = self.value(features if self.images else self.critic(x))
        return Categorical(logits=self.policy(features)), value.squeeze(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--envs", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    o = parser.parse_args()
    torch.set_num_threads(1 if o.task == "lunar" else o.threads)  # one is the faster for nets of 64 units
    torch.manual_seed(0)
    options = {"reward_clip": True, "episodic_life": True} if o.task == "breakout" else {}
    envs = envpool.make_gymnasium(TASKS[o.task], num_envs=o.envs, num_threads=o.threads, seed=0, **options)
    agent = Agent(envs.observation_space.shape, int(envs.action_space.n))
    optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)
    meter = Meter(o.seconds, 10, {"peer": "one file, as in CleanRL", "simulator": "envpool"})
    obs = torch.from_numpy(envs.reset()[0])
    done = torch.zeros(o.envs)
    observations = torch.zeros((STEPS, *obs.shape), dtype=obs.dtype)
    actions = torch.zeros((STEPS, o.envs), dtype=torch.long)
    log_probs, rewards, dones, values = torch.zeros((4, STEPS, o.envs))
    total = 0
    while True:
        for t in range(STEPS):
            observations[t], dones[t] = obs, done
            with torch.no_grad():
                distribution, values[t] = agent(obs)
            actions[t] = distribution.sample()
            log_probs[t] = distribution.log_prob(actions[t])
            seen, reward, terminated, truncated, _ = envs.step(actions[t].numpy().astype(np.int32))
            obs, rewards[t] = torch.from_numpy(seen), torch.from_numpy(reward).float()
            done = torch.from_numpy(terminated | truncated).float()
        total += STEPS * o.envs
        advantages, last = torch.zeros_like(rewards), torch.zeros(o.envs)
        with torch.no_grad():
            following, not_done = agent(obs)[1], 1 - done
        for t in reversed(range(STEPS)):
            delta = rewards[t] + GAMMA * following * not_done - values[t]
            advantages[t] = last = delta + GAMMA * LAMBDA * not_done * last
            following, not_done = values[t], 1 - dones[t]
        flat = [x.flatten(0, 1) for x in (observations, actions, log_probs, advantages, advantages + values)]
        for _ in range(o.epochs):
            for rows in torch.randperm(STEPS * o.envs).split(MINIBATCH):
                seen_now, action, before, advantage, target = (x[rows] for x in flat)
                distribution, value = agent(seen_now)
                ratio = (distribution.log_prob(action) - before).exp()
                advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
                policy_loss = -torch.min(advantage * ratio, advantage * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()
                loss = policy_loss - 0.01 * distribution.entropy().mean() + 0.5 * 0.5 * (value - target).square().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
        meter.tick(total)


if __name__ == "__main__":
    main()
