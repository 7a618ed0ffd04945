"""The secondary learner of Accelerated Methods (arXiv 1803.02811, section 5): the primary's initial weights, and
training from the primary's replay alone, on as many samples but in batches of another size. Where it scores as the
primary does, a batch size is no obstacle to learning; where not, it is one to exploring or to optimizing.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from coterie.algorithms.base import Compute
from coterie.algorithms.q_base import QLearning
from coterie.build.factory import exchange_setup, make_algorithm, make_model, normalizers
from coterie.config import ResolvedConfig
from coterie.exchange.base import Peers
from coterie.exchange.solo import Solo
from coterie.learner import Gradients, Observer, take_step
from coterie.models.build import Network
from coterie.parallel.params import FlatParams
from coterie.types import Rollout, Spec


class Secondary(Observer):
    """Trains beside `primary`, on samples of its replay, from the weights that its `model` has now."""

    def __init__(
        self, config: ResolvedConfig, spec: Spec, compute: Compute, model: Network, primary: QLearning[Any]
    ) -> None:
        own = config.q
        self.config = config = replace(config, q=replace(own, batch_size=own.secondary_batch))
        self.model = make_model(config, spec).to(compute.device)
        self.model.load_state_dict(model.state_dict())
        self.params = FlatParams(self.model)
        self.algorithm = cast(QLearning[Any], make_algorithm(config, spec, compute))
        self.algorithm.borrow(primary)
        self.exchange = Solo(exchange_setup(config, self.params, normalizers(config, self.model), Peers()))
        self.gradients = Gradients(self.model, self.params, compute)
        self.learner_steps = 0
        self.last: dict[str, float] = {}

    def rollout(self, rollout: Rollout, lr: float) -> None:
        """Train on the batches that are due. The primary has stored the rollout. `lr`: the primary's."""
        lr *= (self.config.q.secondary_lr or self.config.optim.lr) / self.config.optim.lr
        for batch in self.algorithm.batches(self.model, rollout):
            totals = self.gradients.compute(self.algorithm, batch)
            take_step(self.exchange, self.params, totals, lr, f"the secondary learner's step {self.learner_steps}")
            self.learner_steps += 1
            self.last = {name: value for name, value in totals.items() if math.isfinite(value)}
        self.algorithm.after_rollout(self.model, rollout)

    def gauges(self) -> dict[str, float]:
        """What it does, and its last batch's losses."""
        counts = {"learner_steps": self.learner_steps, "skipped_batches": self.exchange.guard.skipped}
        return {f"secondary/{name}": value for name, value in {**self.last, **counts}.items()}

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        return {
            "secondary": dict(self.model.state_dict()),
            "secondary_exchange": self.exchange.state_dict(),
            "secondary_algorithm": {**self.algorithm.state_dict(), "steps": torch.tensor([self.learner_steps])},
        }

    def load(self, tensors: dict[str, dict[str, Tensor]]) -> None:
        self.model.load_state_dict(tensors["secondary"])
        self.exchange.load_state_dict(tensors["secondary_exchange"])
        algorithm = dict(tensors["secondary_algorithm"])
        self.learner_steps = int(algorithm.pop("steps"))
        self.algorithm.load_state_dict(algorithm)
