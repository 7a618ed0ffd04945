"""A transformer with memory: GTrXL (Parisotto et al. 2020, "Stabilizing Transformers for Reinforcement Learning").

Each layer attends to its own inputs at the last `memory` steps of the episode and at this one. Layer norm comes before
attention and MLP, and gates with GRU-like weights take the place of residual connections (their section 3). Ours: a
learned bias for each distance in place of Transformer-XL's sinusoids and content biases, and an MLP whose hidden
layer has twice the size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coterie.config import Model
from coterie.errors import ConfigError

_GATE_BIAS = 2.0  # the layers begin as nearly the identity (their section 3.3)


class Gate(nn.Module):
    """What is kept of `x` and what is taken of `y`, both `[.., size]` (their equations of the GRU-type gate)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.of_y, self.of_x = nn.Linear(size, 3 * size, bias=False), nn.Linear(size, 2 * size, bias=False)
        self.inner = nn.Linear(size, size, bias=False)
        self.bias = nn.Parameter(torch.full((size,), _GATE_BIAS))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        (ry, zy, hy), (rx, zx) = self.of_y(y).chunk(3, -1), self.of_x(x).chunk(2, -1)
        update = torch.sigmoid(zy + zx - self.bias)
        proposed = torch.tanh(hy + self.inner(torch.sigmoid(ry + rx) * x))
        return torch.lerp(x, proposed, update)


class Layer(nn.Module):
    """Attention to `rows` `[B, M + T, size]`, of which the last T are `x`, then an MLP; each with a gate."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm_mlp = nn.LayerNorm(size), nn.LayerNorm(size)
        self.query, self.key_value = nn.Linear(size, size, bias=False), nn.Linear(size, 2 * size, bias=False)
        self.out = nn.Linear(size, size)
        self.mlp = nn.Sequential(nn.Linear(size, 2 * size), nn.ReLU(), nn.Linear(2 * size, size))
        self.gate, self.gate_mlp = Gate(size), Gate(size)

    def forward(self, x: Tensor, rows: Tensor, bias: Tensor) -> Tensor:
        """`bias` `[B, heads, T, M + T]` is -inf where a step cannot see a row."""
        seen = self.norm(rows)
        q, kv = self.query(seen[:, -x.shape[1] :]), self.key_value(seen)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (q, *kv.chunk(2, -1)))
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        x = self.gate(x, F.relu(self.out(found.transpose(1, 2).flatten(2))))
        return self.gate_mlp(x, F.relu(self.mlp(self.norm_mlp(x))))  # type: ignore[no-any-return]


class GTrXLCore(nn.Module):
    """A core whose state `[B, 1 + layers x memory x size]` has the number of steps it remembers, at most `memory`, and
    each layer's inputs at the last `memory` steps. Runs in float32 also under autocast.
    """

    def __init__(self, in_size: int, config: Model) -> None:
        super().__init__()
        self.size, heads, self.memory = config.core_size, config.core_heads, config.core_memory
        if self.size % heads:
            raise ConfigError(f"model.core_size: {self.size} must be a multiple of model.core_heads {heads}")
        self.embed = nn.Linear(in_size, self.size)
        self.layers = nn.ModuleList(Layer(self.size, heads) for _ in range(config.core_layers))
        self.distance = nn.Parameter(torch.zeros(heads, self.memory + 1))  # a bias for each

    def initial_state(self, batch: int) -> Tensor:
        return self.distance.new_zeros(batch, 1 + len(self.layers) * self.memory * self.size)

    def forward(self, x: Tensor, is_first: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """`x` `[T, B, F]`, `is_first` `[T, B]` -> `[T, B, size]` and the state after row T - 1."""
        with torch.autocast(x.device.type, enabled=False):
            h = self.embed(x.to(state.dtype)).transpose(0, 1)
            remembered, memories = state[:, 0], state[:, 1:].reshape(state.shape[0], -1, self.memory, self.size)
            episode = is_first.long().cumsum(0).t()  # [B, T]: 0 is the one that the memory is of
            bias, kept = self._visible(episode, remembered), []
            for layer, memory in zip(self.layers, memories.unbind(1), strict=True):
                rows = torch.cat((memory, h), 1)
                kept.append(rows[:, -self.memory :])
                h = layer(h, rows, bias)
            last = episode[:, -1:]
            steps = (episode == last).sum(1) + torch.where(last[:, 0] == 0, remembered, 0)
            after = torch.cat((steps.clamp(max=self.memory)[:, None], torch.stack(kept, 1).flatten(1)), 1)
            return h.transpose(0, 1), after

    def _visible(self, episode: Tensor, remembered: Tensor) -> Tensor:
        """The bias `[B, heads, T, M + T]`: of the distance, or -inf beyond the memory, ahead, or in another episode."""
        t = torch.arange(episode.shape[1], device=episode.device)
        at = torch.arange(-self.memory, episode.shape[1], device=episode.device)  # the time of each row
        distance = t[:, None] - at
        near = (distance >= 0) & (distance <= self.memory)
        before = (episode == 0)[:, :, None] & (at[: self.memory] >= -remembered[:, None])[:, None]
        within = episode[:, :, None] == episode[:, None]
        seen = near & torch.cat((before, within), 2)
        bias = self.distance[:, distance.clamp(0, self.memory)]
        return torch.where(seen[:, None], bias, -torch.inf)
