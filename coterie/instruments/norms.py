"""How large the weights, gradients and steps of each layer are, and what a whole batch tells beyond its half: where the
two gradients are as one, a larger batch is of no use; where noise is all, their cosine is the root of a half
(Accelerated Methods, section 5).
"""

from __future__ import annotations

import torch
from torch import Tensor

from coterie.parallel.params import FlatParams


class Norms:
    """Looks at one learner step every `every` env steps of this learner; 0: never."""

    def __init__(self, params: FlatParams, every: int) -> None:
        self.params, self.every, self.next = params, every, 0
        self.found: dict[str, float] = {}
        self.before: Tensor | None = None

    def begin(self, env_steps: int) -> Tensor | None:
        """Where this step is looked at: room for the gradient of half of the batch."""
        if not self.every or env_steps < self.next:
            return None
        self.next = env_steps + self.every
        return torch.zeros_like(self.params.grad)

    def gradient(self, half: Tensor) -> None:
        """`params.grad` is the whole batch's, nothing clipped; `half` is zero where the batch could not be halved."""
        whole, self.before = self.params.grad, self.params.data.clone()
        self._each("gradient", whole)
        self._each("weights", self.before)
        if float(half.norm()) > 0 and float(whole.norm()) > 0:
            self.found["cosine/half"] = float(torch.cosine_similarity(half, whole, dim=0))

    def step(self) -> None:
        """The update has been made."""
        if self.before is not None:
            self._each("step", self.params.data - self.before)
            self.before = None

    def _each(self, kind: str, flat: Tensor) -> None:
        self.found |= {f"norm/{kind}/{name}": float(flat[at].norm()) for name, at in self.params.slices.items()}
