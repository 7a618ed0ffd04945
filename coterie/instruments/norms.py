"""Norms of each layer's weights, gradient and step, and the cosine of half a batch's gradient with the whole one's: 1
where a larger batch would not help, the root of a half where the gradient is noise (Accelerated Methods, section 5).

A half is that of half of the envs: steps of one env depend on each other. The value loss points one way early in
training, whatever the batch, so the cosine is also taken of the loss without it (`policy`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from coterie.algorithms.base import AnyAlgorithm, AnyBatch
from coterie.learner import Gradients, Observer


class Norms(Observer):
    """Measures one learner step every `every` env steps of this learner."""

    def __init__(self, gradients: Gradients, every: int, policy: AnyAlgorithm | None = None) -> None:
        self.gradients, self.params, self.every, self.next = gradients, gradients.params, every, 0
        self.policy = policy  # the algorithm without its value loss
        self.found: dict[str, float] = {}
        self.before: Tensor | None = None

    def gradient(self, env_steps: int, algorithm: AnyAlgorithm, batch: AnyBatch) -> None:
        if env_steps < self.next:
            return
        self.next = env_steps + self.every
        self.found = {}
        whole, self.before = self.params.grad, self.params.data.clone()  # nothing is clipped yet
        self._each("gradient", whole)
        self._each("weights", self.before)
        if (half := batch.half()).valid == batch.valid:  # of a single column
            return
        self._cosine("half", self._gradient(algorithm, half), whole)
        if self.policy is not None:
            self.policy.clock = algorithm.clock
            self.policy.load_state_dict(algorithm.state_dict())  # an adapted entropy bonus, for example
            self._cosine("half_policy", self._gradient(self.policy, half), self._gradient(self.policy, batch))

    def step(self) -> None:
        if self.before is not None:
            self._each("step", self.params.data - self.before)
            self.before = None

    def gauges(self) -> dict[str, float]:
        return self.found

    def _gradient(self, algorithm: AnyAlgorithm, batch: AnyBatch) -> Tensor:
        """The gradient of a batch in a new tensor, besides what `params.grad` holds."""
        grad = self.params.grad
        kept = grad.clone()
        grad.zero_()
        self.gradients.compute(algorithm, batch)
        found = grad.clone()
        grad.copy_(kept)
        return found

    def _cosine(self, name: str, half: Tensor, whole: Tensor) -> None:
        if float(half.norm()) > 0 and float(whole.norm()) > 0:
            self.found[f"cosine/{name}"] = float(torch.cosine_similarity(half, whole, dim=0))

    def _each(self, kind: str, flat: Tensor) -> None:
        self.found |= {f"norm/{kind}/{name}": float(flat[at].norm()) for name, at in self.params.slices.items()}
