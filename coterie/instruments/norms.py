"""Norms of each layer's weights, gradient and step, and the cosine of half a batch's gradient with the whole one's: 1
where a larger batch would not help, the root of a half where the gradient is noise (Accelerated Methods, section 5).
"""

from __future__ import annotations

import torch
from torch import Tensor

from coterie.algorithms.base import AnyAlgorithm, AnyBatch
from coterie.learner import Gradients, Observer


class Norms(Observer):
    """Measures one learner step every `every` env steps of this learner."""

    def __init__(self, gradients: Gradients, every: int) -> None:
        self.gradients, self.params, self.every, self.next = gradients, gradients.params, every, 0
        self.found: dict[str, float] = {}
        self.before: Tensor | None = None

    def gradient(self, env_steps: int, algorithm: AnyAlgorithm, batch: AnyBatch) -> None:
        if env_steps < self.next:
            return
        self.next = env_steps + self.every
        whole, self.before = self.params.grad, self.params.data.clone()  # nothing is clipped yet
        self._each("gradient", whole)
        self._each("weights", self.before)
        half = self.gradients.of_half(algorithm, batch)
        if half is not None and float(half.norm()) > 0 and float(whole.norm()) > 0:
            self.found["cosine/half"] = float(torch.cosine_similarity(half, whole, dim=0))

    def step(self) -> None:
        if self.before is not None:
            self._each("step", self.params.data - self.before)
            self.before = None

    def gauges(self) -> dict[str, float]:
        found, self.found = self.found, {}
        return found

    def _each(self, kind: str, flat: Tensor) -> None:
        self.found |= {f"norm/{kind}/{name}": float(flat[at].norm()) for name, at in self.params.slices.items()}
