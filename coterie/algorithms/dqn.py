"""DQN (Mnih et al. 2015) with double, dueling, n-step, prioritized, distributional (C51) and noisy variants, which
together are Rainbow (arXiv 1710.02298). Accelerated Methods' epsilon-Rainbow leaves out the noise.
"""

from __future__ import annotations

from dataclasses import replace
from operator import itemgetter

import torch
from torch import Tensor

from coterie.algorithms.base import Batch, Loss, combine
from coterie.algorithms.q_base import QLearning
from coterie.algorithms.replay_base import ReplayBatch, single_steps
from coterie.algorithms.replay_size import value_refusals
from coterie.config import Config, Refusal
from coterie.models.base import Model
from coterie.models.cores import is_recurrent
from coterie.ops.q import cross_entropy, divergence, huber, project
from coterie.parallel.graphs import recordable
from coterie.replay.transitions import Transitions
from coterie.types import map_obs

# In bf16 each thread casts the weights again. A batch of 32, Nature, two threads against one, 2 cores of an AMD EPYC
# (Zen 5): 1.2 times as fast in fp32, equal in bf16 (docs/benchmarks/changes.md).
_SAMPLES_PER_THREAD = {torch.float32: 16, torch.bfloat16: 64}
_RATE, _MOST_CLIPPED = 0.001, 0.25  # of the running mean of clipped targets, which begins at 0; for a warning. Ours


class DQN(QLearning[Transitions]):
    """Single transitions, without a recurrent core."""

    clipped, warned = 0.0, False  # running share of the targets beyond C51's range; whether that was said
    refusals = (
        *value_refusals(),
        Refusal(
            lambda c, s: is_recurrent(c.model),
            "MEMORY",
            "must have no memory with dqn, which learns from single steps; or use algorithm r2d2",
        ),
    )

    @staticmethod
    def training_threads(config: Config, most: int, dtype: torch.dtype) -> int:
        return max(1, min(most, config.q.batch_size // _SAMPLES_PER_THREAD[dtype]))

    @recordable
    def look_ahead(self, target: Model, rows: Transitions, at: slice) -> Tensor:
        params: Tensor = target(single_steps(map_obs(itemgetter(at), rows.next_obs), rows.action[at]))[0]
        return params

    def after_step(self, model: Model, batch: Batch[ReplayBatch[Transitions]]) -> None:
        super().after_step(model, batch)
        self.clipped += _RATE * (batch.metrics.get("q_clipped", 0.0) - self.clipped)

    def warning(self) -> str:
        """One line, once, where the range of C51 is too narrow for the returns."""
        if self.warned or self.clipped < _MOST_CLIPPED:
            return ""
        self.warned = True
        return (
            f"C51: {100 * self.clipped:.0f}% of the targets lie beyond q.v_min and q.v_max ({self.q.v_min:g} and "
            f"{self.q.v_max:g}), where it cannot tell returns apart. Set a wider range, or reward.scale lower"
        )

    @recordable
    def loss(self, model: Model, batch: ReplayBatch[Transitions]) -> Loss:
        """The weighted error of the samples; their priority is its absolute value, or with C51 the divergence."""
        rows, after = batch.rows, batch.ahead
        params = model(single_steps(rows.obs, rows.action))[0]
        with torch.no_grad():
            chooser = model(single_steps(rows.next_obs, rows.action))[0] if self.q.double else after
            best = model.expected(chooser).argmax(-1)
        value = model.expected(params.detach()).gather(-1, rows.action[:, None])[:, 0]
        clipped = {}
        if self.q.atoms:
            each = torch.arange(len(best), device=best.device)
            logits = params.view(len(best), -1, self.q.atoms)[each, rows.action]
            probs = after.view(len(best), -1, self.q.atoms)[each, best].softmax(-1)
            z = model.atoms
            mean = rows.n_step + rows.discount * (probs @ z)
            clipped = {"q_clipped": ((mean < z[0]) | (mean > z[-1])).float()}
            wanted = project(probs, rows.n_step, rows.discount, z)
            error, priority = cross_entropy(wanted, logits), divergence(wanted, logits.detach())
        else:
            wanted = rows.n_step + rows.discount * after.gather(-1, best[:, None])[:, 0]
            found = params.gather(-1, rows.action[:, None])[:, 0]
            error, priority = huber(found - wanted, self.q.huber), (found - wanted).detach().abs()
        terms, watched = {"q_loss": (1.0, rows.weight * error)}, {"q": value, "q_error": priority, **clipped}
        return replace(combine(terms, watched, batch.mask, batch.count), priority=priority)
