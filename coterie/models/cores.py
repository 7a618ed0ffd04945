"""Recurrent cores: LSTM, GRU, and what `model.core` names otherwise. Batch first outside this file.

A core has `size`, its output's width, `initial_state(batch)` `[B, ...]`, and a forward over `[T, B, features]` that
resets the state where `is_first`.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from itertools import pairwise
from numbers import Integral
from typing import NamedTuple, Protocol, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from coterie.config import Model as ModelConfig
from coterie.errors import ConfigError
from coterie.plugins import call, named
from coterie.types import Array

Rows = TypeVar("Rows", Tensor, PackedSequence)

# Flat parameters are not laid out as cuDNN wants them: it copies an LSTM's weights at each call, in microseconds.
warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")


class Core(Protocol):
    """A recurrent core. Its state is one tensor, batch first."""

    size: int  # of the output

    def initial_state(self, batch: int) -> Tensor: ...
    def __call__(
        self, x: Tensor, is_first: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]: ...  # [T, B, F], [T, B], [B, ...] -> [T, B, size] and the state after row T - 1


def make_lstm(in_size: int, size: int, forget_bias: float) -> nn.LSTM:
    """An LSTM with orthogonal weights, and zero biases but for the forget gate's."""
    lstm = _orthogonal(nn.LSTM(in_size, size))
    bias = cast(Tensor, lstm.bias_ih_l0)  # of the gates: input, forget, cell, output
    nn.init.constant_(bias[size : 2 * size], forget_bias)
    return cast(nn.LSTM, lstm)


def _orthogonal(layer: nn.RNNBase) -> nn.RNNBase:
    for name, p in layer.named_parameters():
        if "weight" in name:
            nn.init.orthogonal_(p)
        else:
            nn.init.zeros_(p)
    return layer


class _Recurrent(nn.Module, ABC):
    """A fused kernel over `[T, B, features]`, whose state is reset where `is_first`. In float32, also under autocast.

    On a CPU the kernel runs over the stretches between resets: one call for each time step at which some env of the
    batch restarts, not one for each step. On a GPU each env's episodes are sequences of one packed call.
    """

    def __init__(self, layer: nn.RNNBase, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.size, self.shape = layer.hidden_size, shape

    def initial_state(self, batch: int) -> Tensor:
        return next(self.parameters()).new_zeros(batch, *self.shape)

    @abstractmethod
    def _run(self, x: Rows, state: Tensor) -> tuple[Rows, Tensor]:
        """A stretch `[t, B, F]`, or sequences of different lengths."""

    @abstractmethod
    def _step(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """One acting step `[B, F]`. The fused kernel rearranges its weights at every call (an LSTM on a CPU: 217
        against 64 us for one env, 1118 against 272 for 16, 256 units), and a GPU would be waited for.
        """

    def forward(self, x: Tensor, is_first: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """`x` `[T, B, F]`, `is_first` `[T, B]` -> `[T, B, H]` and the state after row T-1."""
        keep = ~is_first.reshape(*is_first.shape, *(1 for _ in self.shape))
        with torch.autocast(x.device.type, enabled=False):
            x = x.to(state.dtype)
            if len(x) == 1 and not torch.is_grad_enabled():
                y, state = self._step(x[0], state * keep[0])
                return y[None], state
            return (self._packed if x.is_cuda else self._stretches)(x, is_first, state, keep)

    def _stretches(self, x: Tensor, is_first: Tensor, state: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
        starts = is_first.any(1).tolist()
        cuts = [t for t, start in enumerate(starts) if start]
        out = []
        for begin, end in pairwise(sorted({0, *cuts, len(starts)})):
            if starts[begin]:
                state = state * keep[begin]
            y, state = self._run(x[begin:end], state)
            out.append(y)
        return out[0] if len(out) == 1 else torch.cat(out), state

    def _packed(self, x: Tensor, is_first: Tensor, state: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
        first = is_first.cpu().numpy()
        if not first[1:].any():
            return self._run(x, state * keep[0])
        packing = pack(first)
        rows, back, column, last, goes_on = (torch.from_numpy(i).to(x.device) for i in packing[:5])
        begun = (state * keep[0])[column] * goes_on.reshape(-1, *(1 for _ in self.shape))
        packed = PackedSequence(x.flatten(0, 1).index_select(0, rows), torch.from_numpy(packing.sizes))
        y, after = self._run(packed, begun)
        return y.data.index_select(0, back).view(*is_first.shape, -1), after[last]


class Packing(NamedTuple):
    """Where the episodes of `[T, B]` rows are in a PackedSequence, the longest first."""

    rows: Array  # [T * B]: the row `t * B + b` of each packed one
    back: Array  # [T * B]: the packed row of each row
    column: Array  # [episodes]: the env of each
    last: Array  # [B]: the last episode of each env
    goes_on: Array  # [episodes]: it begins at row 0
    sizes: Array  # of the batch at each step


def pack(is_first: Array) -> Packing:
    """The packing of `[T, B]` rows, of which those that are first begin an episode."""
    length, width = is_first.shape
    starts = is_first.copy()
    starts[0] = True
    column, begin = np.nonzero(starts.T)
    is_last = np.append(np.diff(column) > 0, True)
    end = np.where(is_last, length, np.append(begin[1:], length))
    order = np.argsort(begin - end, kind="stable")
    step = np.arange((end - begin).max())[:, None]
    there = step < (end - begin)[order]
    rows = ((begin[order] + step) * width + column[order])[there]
    last = np.argsort(order)[is_last]
    return Packing(rows, np.argsort(rows), column[order], last, begin[order] == 0, there.sum(1))


class LSTMCore(_Recurrent):
    """The state is `[B, 2, size]`: hidden, cell."""

    def __init__(self, in_size: int, size: int, forget_bias: float = 1.0) -> None:
        lstm = make_lstm(in_size, size, forget_bias)
        super().__init__(lstm, (2, size))
        self.lstm = lstm

    def _run(self, x: Rows, state: Tensor) -> tuple[Rows, Tensor]:
        h, c = (part[None].contiguous() for part in state.unbind(1))
        y, (h, c) = self.lstm(x, (h, c))
        return y, torch.stack((h[0], c[0]), 1)

    def _step(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        h, c = torch.lstm_cell(x, state.unbind(1), *cast(list[Tensor], list(self.lstm._parameters.values())))
        return h, torch.stack((h, c), 1)


class GRUCore(_Recurrent):
    """The state is `[B, size]`."""

    def __init__(self, in_size: int, size: int) -> None:
        gru = _orthogonal(nn.GRU(in_size, size))
        super().__init__(gru, (size,))
        self.gru = gru

    def _run(self, x: Rows, state: Tensor) -> tuple[Rows, Tensor]:
        y, h = self.gru(x, state[None].contiguous())
        return y, h[0]

    def _step(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.gru_cell(x, state, *cast(list[Tensor], list(self.gru._parameters.values())))
        return h, h


def is_recurrent(config: ModelConfig) -> bool:
    """Whether the network has a state that it carries from step to step."""
    if config.network:
        return hasattr(named("model.network", config.network), "initial_state")
    return config.core != "none"


def build_core(in_size: int, config: ModelConfig) -> Core:
    """The core that `model.core` names. A custom one is `package.module:callable`, called with the width of its input
    and the model config.
    """
    if config.core == "lstm":
        return LSTMCore(in_size, config.core_size, config.forget_bias)
    if config.core == "gru":
        return GRUCore(in_size, config.core_size)
    path = "coterie.models.gtrxl:GTrXLCore" if config.core == "gtrxl" else config.core
    if ":" in path:
        core = call("model.core", path, in_size, config)
        if not isinstance(core, nn.Module) or not isinstance(getattr(core, "size", None), Integral):
            raise ConfigError("model.core: it must be a torch.nn.Module with size, the width of its output")
        return cast(Core, core)
    raise ConfigError(f"model.core: {config.core!r} is not one of none, lstm, gru, gtrxl or package.module:callable")
