"""The protocol of a network: what the rest of the program calls of it."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from coterie.models.heads import Normalizer
from coterie.types import Inputs, Obs


class Model(Protocol):
    """A network; `models/build.py` has the real one."""

    recurrent: bool
    atoms: Tensor  # C51: the returns that have a probability
    return_norm: Normalizer

    def __call__(
        self, inputs: Inputs, core_state: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]: ...  # policy parameters or action values, value, next core state
    def initial_state(self, batch: int) -> Tensor | None: ...
    def observe(self, obs: Obs, valid: Tensor) -> None: ...  # update the observation normalizers
    def expected(self, params: Tensor) -> Tensor: ...  # action values from a value network's output
    def resample(self, rng: torch.Generator | None) -> None: ...  # the noise of noisy layers
