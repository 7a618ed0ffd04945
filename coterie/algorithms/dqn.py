"""DQN (Mnih et al. 2015) with double, dueling, n-step, prioritised, distributional (C51) and noisy variants, which
together are Rainbow (arXiv 1710.02298). Accelerated Methods' epsilon-Rainbow is all of them but the noise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import itemgetter

import torch
from torch import Tensor

from coterie.algorithms.a2c import Loss, combine, slices
from coterie.algorithms.q_base import Means, Values, size_of, stack_of
from coterie.config import Config
from coterie.models.build import Network
from coterie.ops.q import cross_entropy, divergence, huber, project
from coterie.replay.transitions import Ring, Transitions
from coterie.types import Inputs, Obs, Rollout, Spec, map_obs


@dataclass
class Batch:
    """Drawn transitions; a part holds at most `chunk` of them (0: all)."""

    rows: Transitions
    after: Tensor  # the target network's parameters of what follows, [n, P]
    chunk: int
    count: int
    priority: Tensor  # [n], written by the parts' losses
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def valid(self) -> int:
        return self.count

    def parts(self, ways: int = 1) -> Iterator[Batch]:
        for at in slices(len(self.priority), self.chunk, ways):
            yield Batch(self.rows.map(itemgetter(at)), self.after[at], self.chunk, self.count, self.priority[at])


class DQN:
    """Single transitions, without a recurrent core."""

    def __init__(self, config: Config, spec: Spec, seed: int, means: Means) -> None:
        self.config, self.spec, self.own, self.chunk, self.seed = config, spec, config.q, means.chunk, seed
        self.base = base = Values(config, spec, seed, config.q.batch_size, self._replay, _judge, 0, means)
        self.clock, self.explore, self.acts_at, self.sampled = base.clock, base.explore, base.acts_at, base.sampled
        self.act, self.after_step, self.after_rollout, self.gauges = (
            base.act, base.after_step, base.after_rollout, base.gauges,
        )  # fmt: skip
        self.state_dict, self.load_state_dict = base.state_dict, base.load_state_dict

    def _replay(self, rollout: Rollout) -> Ring:
        own = self.config.replay
        return Ring(
            self.spec, *size_of(self.config), self.config.algo.gamma, self.own.n_step, alpha=own.alpha,
            frames=stack_of(self.config), seed=self.seed, disk=own.disk, judged=own.initial == "acting",
        )  # fmt: skip

    @staticmethod
    def replay_bytes(config: Config, spec: Spec) -> int:
        """What the replay of one learner takes when it is full."""
        return Ring.bytes_for(spec, *size_of(config), stack_of(config))

    def batches(self, model: Network, rollout: Rollout) -> Iterator[Batch]:
        """Keep the rollout, then draw what is due."""
        n = self.own.batch_size
        for rows, after in self.base.drawn(model, rollout):
            yield Batch(rows, after, self.chunk, n, torch.zeros(n, device=rows.weight.device))

    def loss(self, model: Network, part: Batch) -> Loss:
        """The error of what was drawn, weighted; its size is left in `part.priority`."""
        rows, after = part.rows, part.after
        params = model(_inputs(rows.obs, rows.action))[0]
        with torch.no_grad():
            chooser = model(_inputs(rows.next_obs, rows.action))[0] if self.own.double else after
            best = model.expected(chooser).argmax(-1)
        value = model.expected(params.detach()).gather(-1, rows.action[:, None])[:, 0]
        if self.own.atoms:
            each = torch.arange(len(best), device=best.device)
            logits = params.view(len(best), -1, self.own.atoms)[each, rows.action]
            probs = after.view(len(best), -1, self.own.atoms)[each, best].softmax(-1)
            wanted = project(probs, rows.n_step, rows.discount, model.atoms)
            error, priority = cross_entropy(wanted, logits), divergence(wanted, logits.detach())
        else:
            wanted = rows.n_step + rows.discount * after.gather(-1, best[:, None])[:, 0]
            found = params.gather(-1, rows.action[:, None])[:, 0]
            error, priority = huber(found - wanted, self.own.huber), (found - wanted).detach().abs()
        part.priority.copy_(priority)
        mask = torch.ones_like(best, dtype=torch.bool)
        return combine({"q_loss": (1.0, rows.weight * error)}, {"q": value, "q_error": priority}, mask, part.count)


def _judge(target: Network, rows: Transitions, at: slice) -> Tensor:
    params: Tensor = target(_inputs(map_obs(itemgetter(at), rows.next_obs), rows.action[at]))[0]
    return params


def _inputs(obs: Obs, action: Tensor) -> Inputs:
    """What a network without a core looks at."""
    n = len(action)
    first = torch.ones(n, dtype=torch.bool, device=action.device)
    return Inputs(obs, first, action, torch.zeros(n, device=action.device))
