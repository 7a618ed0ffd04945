"""PQN, Q-learning of many envs in parallel: no replay, no target network (Gallici et al. 2024, arXiv 2407.04811).

    coterie train pqn:pqn --env CartPole-v1
    coterie train pqn:pqn --env Breakout-v5

Run it in this folder, or with this folder on PYTHONPATH. From Python: `python examples/pqn.py [ENV_STEPS]`.
The rollouts, lambda-returns and minibatches are PPO's; a state's value is that of its best action. Settings are those
of the authors' code, but for RAdam: Adam with a warm-up has its effect (arXiv 1910.04209).
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

import coterie
from coterie.algorithms.a2c import RolloutBatch
from coterie.algorithms.base import Loss, combine
from coterie.algorithms.ppo import PPO
from coterie.algorithms.q_base import EpsilonGreedy
from coterie.config import PPO as Passes
from coterie.config import Algo, Config, Model, Optim, Q, Refusal, Schedule
from coterie.models.base import Model as Net
from coterie.presets.common import derive
from coterie.types import ObsSpec


class PQN(EpsilonGreedy, PPO):
    """PPO's batches with the error of the chosen action's value as the loss. Actions are epsilon-greedy."""

    refusals = (
        *PPO.refusals,
        Refusal(lambda c, s: s.action.kind != "categorical", "algorithm", "needs a Discrete action space"),
    )

    def loss(self, model: Net, batch: RolloutBatch) -> Loss:
        params, _, _ = model(batch.inputs, batch.core_state)
        value = model.expected(params).gather(-1, batch.action[..., None])[..., 0]
        error = value - batch.value_target
        return combine({"q_loss": (0.5, error.square())}, {"q": value.detach()}, batch.mask, batch.count)


class Torso(nn.Module):
    """Convolutions for images, then layers of `model.hidden`, each with a layer norm, which makes the learning stable.
    Images may be large, as Atari's, or of 10 x 10 cells, as MinAtar's.
    """

    def __init__(self, obs: dict[str, ObsSpec], config: Model) -> None:
        super().__init__()
        shape, layers = obs[""].shape, list[nn.Module]()
        self.scale = 1 / 255 if obs[""].dtype == "uint8" else 1.0
        self.channels_last = len(shape) == 3 and shape[-1] < shape[0]
        if len(shape) == 3:
            shape = (shape[-1], *shape[:-1]) if self.channels_last else shape
            before = shape[0]
            for maps, kernel, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)) if shape[1] >= 36 else ((16, 3, 1),):
                layers += [nn.Conv2d(before, maps, kernel, stride), nn.GroupNorm(1, maps), nn.ReLU()]
                before = maps
        layers.append(nn.Flatten())
        self.size = nn.Sequential(*layers)(torch.zeros(1, *shape)).shape[-1]
        for width in config.hidden:
            layers += [nn.Linear(self.size, width), nn.LayerNorm(width), nn.ReLU()]
            self.size = width
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """`[N, *shape]` -> `[N, size]`."""
        return self.layers((x.movedim(-1, 1) if self.channels_last else x).float() * self.scale)


def pqn(env: str = "CartPole-v1", **overrides: Any) -> Config:
    """Images: 128 envs of 32 steps, two passes in minibatches of 128. Vectors: 32 envs of 64 steps, four passes."""
    constant, falling = (Schedule(kind, warmup=20_000) for kind in ("constant", "linear"))
    image = {
        "steps": 10_000_000,
        "env.num_envs": 128,
        "model": Model(f"{__name__}:Torso", hidden=(512,)),
        "algo": Algo(32, gae_lambda=0.65),
        "ppo": Passes(epochs=2, minibatch_size=128),
        "q": Q(epsilon_end=0.001, epsilon_steps=1_000_000),
        "optim": Optim("adam", lr=2.5e-4, eps=1e-8, max_grad_norm=10.0, schedule=constant),
    }
    vector = {
        "steps": 500_000,
        "env.num_envs": 32,
        "reward.scale": 0.1,
        "reward.normalize": False,
        "model": Model(f"{__name__}:Torso", hidden=(256, 256)),
        "algo": Algo(64, gae_lambda=0.95),
        "ppo": Passes(epochs=4, minibatch_size=128),
        "q": Q(epsilon_end=0.2, epsilon_steps=100_000),
        "optim": Optim("adam", lr=1e-4, eps=1e-8, max_grad_norm=10.0, schedule=falling),
    }
    return derive(coterie.presets.ppo, "pqn", env, overrides, {"algorithm": f"{__name__}:PQN"}, image, vector)


if __name__ == "__main__":
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 500_000
    print(f"mean return {coterie.train(coterie.presets.make('pqn:pqn', steps=steps))['mean_return']:.1f}")
