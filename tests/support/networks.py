"""Cores and networks that a user might write."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn


class Leaky(nn.Module):
    """A core: a leaky sum of its input."""

    def __init__(self, in_size: int, config: Any) -> None:
        super().__init__()
        self.size, self.layer = config.core_size, nn.Linear(in_size, config.core_size)

    def initial_state(self, batch: int) -> Tensor:
        return self.layer.weight.new_zeros(batch, self.size)

    def forward(self, x: Tensor, is_first: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        out = []
        for row, first in zip(self.layer(x.float()), is_first, strict=True):
            state = 0.9 * state * ~first[:, None] + row
            out.append(state)
        return torch.stack(out), state


class Mixer(nn.Module):
    """A whole network for one observation, without a memory."""

    def __init__(self, spec: Any, config: Any, outputs: int) -> None:
        super().__init__()
        width = math.prod(spec.obs[""].shape)
        self.outputs = outputs
        self.layers = nn.Sequential(nn.Linear(width, 16), nn.GELU(), nn.Linear(16, outputs + 1))

    def forward(self, inputs: Any, core_state: None) -> tuple[Tensor, Tensor | None, None]:
        y = self.layers(inputs.obs.flatten(1).float())
        return y[..., : self.outputs], y[..., self.outputs], None


class Rewarded(Mixer):
    """It adds the last reward, which a replay of single steps does not have."""

    def forward(self, inputs: Any, core_state: None) -> Any:
        params, value, _ = super().forward(inputs, core_state)
        return params + inputs.prev_reward[..., None] * ~inputs.is_first[..., None], value, None


class Counter(Mixer):
    """The same with a memory: the largest number that the episode has seen, which it adds to the observation."""

    def __init__(self, spec: Any, config: Any, outputs: int) -> None:
        super().__init__(spec, config, outputs)
        self.factor = nn.Parameter(torch.ones(()))

    def initial_state(self, batch: int) -> Tensor:
        return torch.zeros(batch, 1)

    def forward(self, inputs: Any, core_state: Any) -> Any:
        params, value = [], []
        for t in range(len(inputs.is_first)):
            core_state = core_state * ~inputs.is_first[t][:, None]
            y = self.layers(inputs.obs[t].flatten(1).float() + self.factor * core_state)
            core_state = torch.maximum(core_state, inputs.obs[t].flatten(1).float().amax(1, keepdim=True))
            params.append(y[..., : self.outputs])
            value.append(y[..., self.outputs])
        return torch.stack(params), torch.stack(value), core_state


class Frozen(nn.Module):
    """A torso with features that are not trained."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.size, self.layer = 8, nn.Linear(8, 8)
        self.register_buffer("fixed", torch.randn(width, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.layer(x.flatten(1) @ self.fixed))


def frozen(obs: Any, config: Any) -> Frozen:
    return Frozen(math.prod(obs[""].shape))


def wrong(change: Any) -> type[Mixer]:
    return type("Wrong", (Mixer,), {"forward": lambda self, *args: change(*Mixer.forward(self, *args))})


narrow = wrong(lambda params, value, state: (params[..., 1:], value, state))
valueless = wrong(lambda params, value, state: (params, None, state))
wide = wrong(lambda params, value, state: (params, params, state))
stateful = wrong(lambda params, value, state: (params, value, value))
stateless = wrong(lambda params, value, state: (params, value))
centered = wrong(lambda params, value, state: (params - params.mean(0), value, state))


class Endless(Counter):
    def forward(self, inputs: Any, core_state: Any) -> Any:
        return super().forward(inputs._replace(is_first=torch.zeros_like(inputs.is_first)), core_state)


class Lengthy(Counter):
    def forward(self, inputs: Any, core_state: Any) -> Any:
        params, value, core_state = super().forward(inputs, core_state)
        return params + len(params), value, core_state


class Batched(Mixer):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.layers.append(nn.BatchNorm1d(self.outputs + 1))


class Dropping(Mixer):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.layers.append(nn.Dropout(0.1))


def not_a_module(spec: Any, config: Any, outputs: int) -> None: ...
