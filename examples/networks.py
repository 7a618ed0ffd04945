"""A whole network and a recurrent core of your own.

    coterie train ppo --env CartPole-v1 --model.network networks:Simba --reward.normalize True
    coterie train ppo --env CartPole-v1 --model.core networks:MinGRU --reward.normalize True

Run it in this folder, or with this folder on PYTHONPATH. From Python: `python examples/networks.py [ENV_STEPS]`.
"""

from __future__ import annotations

import math
import sys

import torch
from torch import Tensor, nn

import coterie
from coterie.config import Model
from coterie.types import Inputs, Spec


class Simba(nn.Module):
    """Residual blocks with layer norm, as in SimBa (Lee et al. 2024, arXiv 2410.09754), for policy and value together.

    `outputs`: what the algorithm needs of a row. A policy's logits (the means of continuous actions), or the values of
    the actions.
    """

    def __init__(self, spec: Spec, config: Model, outputs: int) -> None:
        super().__init__()
        width = 64
        self.embed = nn.Linear(math.prod(spec.obs[""].shape), width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))
            for _ in range(2)
        )
        self.norm = nn.LayerNorm(width)
        self.params, self.value = nn.Linear(width, outputs), nn.Linear(width, 1)
        nn.init.orthogonal_(self.params.weight, 0.01)

    def forward(self, inputs: Inputs, core_state: None) -> tuple[Tensor, Tensor, None]:
        """`inputs.obs` `[N, *shape]` -> `[N, outputs]` and `[N]`; without memory there is no core state."""
        x = self.embed(inputs.obs.flatten(1).float())
        for block in self.blocks:
            x = x + block(x)
        x = self.norm(x)
        return self.params(x), self.value(x)[..., 0], None


class MinGRU(nn.Module):
    """The minimal GRU of Feng et al. 2024 (arXiv 2410.01201): gates that do not see the state."""

    def __init__(self, in_size: int, config: Model) -> None:
        super().__init__()
        self.size = config.core_size
        self.gate, self.proposal = nn.Linear(in_size, self.size), nn.Linear(in_size, self.size)

    def initial_state(self, batch: int) -> Tensor:
        """`[batch, ...]`, of any shape; zeros also stand for it where the run has none."""
        return self.gate.weight.new_zeros(batch, self.size)

    def forward(self, x: Tensor, is_first: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """`[T, B, in_size]`, `[T, B]`, `[B, size]` -> `[T, B, size]` and the state after row T - 1."""
        gates, proposals, found = self.gate(x.float()).sigmoid(), self.proposal(x.float()), []
        for z, proposal, first in zip(gates, proposals, is_first, strict=True):
            state = torch.lerp(state * ~first[:, None], proposal, z)
            found.append(state)
        return torch.stack(found), state


if __name__ == "__main__":
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    options = {"model.network": "networks:Simba", "reward.normalize": True}
    run = coterie.train(coterie.presets.ppo(env="CartPole-v1", steps=steps, **options))
    print(f"mean return {run['mean_return']:.1f}")
