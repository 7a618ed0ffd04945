"""Proximal policy optimization with the clipped objective (Schulman et al. 2017, arXiv 1707.06347, eq. 7).

Several epochs of shuffled minibatches over each rollout. Acting, rewards and advantages are A2C's; what differs is
here. With a core a minibatch is a set of whole env columns, so that each sequence starts at its `core_state`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from coterie.algorithms.a2c import A2C, Batch, Loss, combine
from coterie.config import Config
from coterie.models.build import Network
from coterie.ops.optim import schedule_value
from coterie.ops.policy import normalize, ppo_clip, ppo_stats, value_loss, value_loss_clipped
from coterie.types import Rollout, Spec


def horizon(config: Config) -> int:
    """Steps of each env in a rollout; with `ppo.batch_size` it shrinks as envs are added (Accelerated Methods)."""
    if config.algorithm == "ppo" and config.ppo.batch_size:
        return max(1, config.ppo.batch_size // config.env.num_envs)
    return config.algo.unroll_length


class PPO:
    """A2C's parts with another `batches` and `loss`."""

    def __init__(self, config: Config, spec: Spec, chunk: int = 0, seed: int = 0) -> None:
        self.base = base = A2C(config, spec, chunk)
        self.clock, self.act, self.gauges = base.clock, base.act, base.gauges
        self.explore, self.acts_at, self.sampled = base.explore, base.acts_at, base.sampled
        self.after_step, self.after_rollout = base.after_step, base.after_rollout
        self.config, self.ppo = config, config.ppo
        self.rng = torch.Generator().manual_seed(seed)

    def batches(self, model: Network, rollout: Rollout) -> Iterator[Batch]:
        whole = self.base.prepare(model, rollout)
        t, b = rollout.mask.shape
        columns = b if model.recurrent else t * b
        size = max(1, self.ppo.minibatch_size // t) if model.recurrent else self.ppo.minibatch_size
        pieces = max(1, columns // size)  # equal sizes: a ragged last minibatch would weigh its samples more
        for _ in range(self.ppo.epochs):
            order = torch.randperm(columns, generator=self.rng).to(whole.mask.device)
            for index in order.tensor_split(pieces):
                batch = whole.take(index)
                if self.base.algo.normalize_advantage:
                    batch.advantage = normalize(batch.advantage, batch.mask)
                yield batch
                if self.ppo.target_kl and batch.metrics["kl"] > 1.5 * self.ppo.target_kl:
                    return

    def loss(self, model: Network, batch: Batch) -> Loss:
        params, value, _ = model(batch.inputs, batch.core_state)
        log_prob, entropy = self.base.dist.evaluate(params, batch.action)
        clip = self.ppo.clip * schedule_value(self.ppo.clip_schedule, self.clock.env_steps, self.config.steps)

        if self.ppo.clip_value:
            values = value_loss_clipped(value, batch.behavior_value, batch.value_target, self.ppo.clip_value)
        else:
            values = value_loss(value, batch.value_target)
        terms = {
            "policy_loss": (1.0, ppo_clip(log_prob, batch.behavior_log_prob, batch.advantage, clip)),
            "value_loss": (self.base.algo.value_coef, values),
            "entropy": (-self.base.entropy_coef(), entropy),
        }
        clipped, kl = ppo_stats(log_prob, batch.behavior_log_prob, clip)
        return combine(terms, {"kl": kl, "clip_fraction": clipped}, batch.mask, batch.count)

    def state_dict(self) -> dict[str, Tensor]:
        return {**self.base.state_dict(), "minibatch_rng": self.rng.get_state()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.base.load_state_dict(state)
        self.rng.set_state(state["minibatch_rng"])
