"""Proximal policy optimization with the clipped objective (Schulman et al. 2017, arXiv 1707.06347, eq. 7).

Several epochs of shuffled minibatches over each rollout. Acting, rewards and advantages are A2C's; what differs is
here. With a core a minibatch is a set of whole env columns, so that each sequence starts at its `core_state`.

`ppo.proximal` decouples the policy that acted from the one that the clip is around (Hilton et al. 2021, arXiv
2110.00641): the latter has the weights from before the rollout's first minibatch. Left out: its moving average.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from coterie.acting.table import acting_kind
from coterie.algorithms.a2c import A2C, RolloutBatch
from coterie.algorithms.base import ON_CPU, Compute, Loss, Terms, combine
from coterie.algorithms.table import algorithm_class
from coterie.config import Config, Refusal, Schedule
from coterie.exchange.table import exchange_kind
from coterie.models.base import Model
from coterie.models.cores import is_recurrent
from coterie.ops.optim import schedule_value
from coterie.ops.policy import normalize, ppo_clip, ppo_stats, value_loss, value_loss_clipped
from coterie.parallel.graphs import recordable
from coterie.types import Rollout, Spec


class PPO(A2C):
    """A2C with another `batches` and `loss`."""

    refusals = (
        Refusal(
            lambda c, s: exchange_kind(c).in_lockstep and c.ppo.target_kl > 0,
            "ppo.target_kl",
            "must be 0 with exchange allreduce: it stops learners after different numbers of steps",
        ),
        Refusal(
            lambda c, s: (
                not is_recurrent(c.model)
                and c.ppo.minibatch_size > algorithm_class(c).unroll_length(c) * acting_kind(c).batch_size(c)
            ),
            "ppo.minibatch_size",
            "must not exceed the samples of a rollout (algo.unroll_length x the envs of a batch, or ppo.batch_size)",
        ),
    )

    def __init__(self, config: Config, spec: Spec, compute: Compute = ON_CPU, seed: int = 0) -> None:
        super().__init__(config, spec, compute, seed)
        self.ppo = config.ppo
        self.rng = torch.Generator().manual_seed(seed)

    @classmethod
    def corrects(cls, config: Config) -> bool:
        return config.ppo.proximal

    @staticmethod
    def unroll_length(config: Config) -> int:
        """Steps of each env in a rollout; with `ppo.batch_size` fewer for more columns (Accelerated Methods)."""
        if config.ppo.batch_size:
            return max(1, config.ppo.batch_size // acting_kind(config).batch_size(config))
        return config.algo.unroll_length

    @staticmethod
    def lockstep_settings(config: Config) -> tuple[object, ...]:
        return (
            replace(config.ppo, clip_schedule=Schedule()),
            config.env.num_envs,
            acting_kind(config).batch_size(config),
        )

    @staticmethod
    def updates(config: Config, columns: int, unroll: int) -> tuple[float, float]:
        rows, size = columns * unroll, config.ppo.minibatch_size
        pieces = max(1, columns // max(1, size // unroll) if is_recurrent(config.model) else rows // size)
        return config.ppo.epochs * pieces, rows / pieces

    def batches(self, model: Model, rollout: Rollout) -> Iterator[RolloutBatch]:
        """`ppo.epochs` passes over shuffled minibatches, until `ppo.target_kl` is exceeded."""
        whole = self.prepare(model, rollout)
        if self.ppo.proximal:
            self._decouple(model, whole)
        t, b = rollout.mask.shape
        columns = b if model.recurrent else t * b
        size = max(1, self.ppo.minibatch_size // t) if model.recurrent else self.ppo.minibatch_size
        pieces = max(1, columns // size)  # equal sizes: a ragged last minibatch would weigh its samples more
        for _ in range(self.ppo.epochs):
            order = torch.randperm(columns, generator=self.rng).to(whole.mask.device)
            for batch in whole.shuffled(order, pieces):
                if self.algo.normalize_advantage:
                    batch.advantage = normalize(batch.advantage, batch.mask)
                if batch.log_rho is not None:  # above 0, so that it may as well be the objective's factor
                    batch.advantage = batch.advantage * batch.log_rho.clamp(max=math.log(self.ppo.rho_max)).exp()
                yield batch
                if self.ppo.target_kl and batch.metrics["kl"] > 1.5 * self.ppo.target_kl:
                    return

    @torch.no_grad()
    def _decouple(self, model: Model, whole: RolloutBatch) -> None:
        """Clip around the learner's weights of now, and weigh each sample by their ratio to those that acted.

        Advantages and value targets stay those of the values while acting, as in the authors' code.
        """
        with self.compute.autocast():  # as in `loss`, so that the first ratio is 1
            found = [self.dist.log_prob(model(p.inputs, p.core_state)[0], p.action) for p in whole.parts()]
        proximal = torch.cat(found, -1)
        whole.log_rho = torch.where(whole.mask, proximal - whole.behavior_log_prob, 0.0)
        whole.behavior_log_prob = proximal

    def clip(self) -> float:
        """By how much the ratio may leave 1, now."""
        return self.ppo.clip * schedule_value(self.ppo.clip_schedule, self.clock.env_steps, self.config.steps)

    def changing(self) -> dict[str, float]:
        return {**super().changing(), "clip": self.clip()}

    @recordable
    def loss(self, model: Model, batch: RolloutBatch) -> Loss:
        """The clipped objective, (clipped) squared value error, entropy bonus."""
        params, value, _ = model(batch.inputs, batch.core_state)
        log_prob, entropy = self.dist.evaluate(params, batch.action)
        clip = self.factor("clip")
        if self.ppo.clip_value:
            values = value_loss_clipped(value, batch.behavior_value, batch.value_target, self.ppo.clip_value)
        else:
            values = value_loss(value, batch.value_target)
        terms: Terms = {
            "policy_loss": (1.0, ppo_clip(log_prob, batch.behavior_log_prob, batch.advantage, clip)),
            "value_loss": (self.algo.value_coef, values),
            "entropy": (self.factor("entropy"), entropy),
        }
        clipped, kl = ppo_stats(log_prob, batch.behavior_log_prob, clip)
        watched = {"kl": kl, "clip_fraction": clipped}
        if batch.log_rho is not None:
            watched |= self.off_policy.diagnostics(batch.log_rho, self.ppo.rho_max)
        return combine(terms, watched, batch.mask, batch.count)

    def state_dict(self) -> dict[str, Tensor]:
        return {**super().state_dict(), "minibatch_rng": self.rng.get_state()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        super().load_state_dict(state)
        self.rng.set_state(state["minibatch_rng"])
