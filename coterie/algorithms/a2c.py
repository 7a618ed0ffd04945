"""Advantage actor-critic: A2C and, with a lock-free or central exchange, A3C.

Mnih et al. 2016 (arXiv 1602.01783) with GAE (Schulman et al. 2016, arXiv 1506.02438); `gae_lambda` 1 is the n-step
return. One pass over each rollout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from operator import itemgetter

import torch
from torch import Tensor

from coterie.algorithms.base import ON_CPU, AlgorithmBase, Batch, Compute, Loss, Terms, combine, even, slices
from coterie.algorithms.off_policy import OffPolicy
from coterie.config import Config
from coterie.models.base import Model
from coterie.ops.dist import make_distribution
from coterie.ops.optim import schedule_value
from coterie.ops.policy import normalize, policy_gradient, value_loss
from coterie.ops.returns import explained_variance, gae
from coterie.parallel.graphs import recordable
from coterie.types import AgentOutput, Inputs, Rollout, Spec, map_obs, map_tensors

_ENTROPY_MOST = 7.0  # bound of the log of the adapted factor, for a target entropy that is out of reach
_ENTROPY_RATE = 0.01  # largest change of the log of the entropy coefficient in one learner step


@dataclass
class RolloutBatch:
    """Rows `[N]`, or columns `[T, b]` with `core_state` if the network has a core."""

    inputs: Inputs
    action: Tensor
    advantage: Tensor
    value_target: Tensor
    behavior_log_prob: Tensor
    behavior_value: Tensor
    mask: Tensor
    core_state: Tensor | None
    count: int  # T x B of the whole batch, masked or not: the one divisor of every sum
    chunk: int  # most samples in one pass through the network; 0: all
    envs: int = 1  # number of envs if rows are in [T, B] order; 1: shuffled
    metrics: dict[str, float] = field(default_factory=dict)  # the whole batch's, after it was trained on
    priority: Tensor | None = None
    log_rho: Tensor | None = None  # log of the importance weight, 0 on masked rows; None: the newest weights acted

    @cached_property
    def valid(self) -> int:
        """How many of the `count` rows are learned from."""
        return int(self.mask.sum())

    def parts(self, ways: int = 1) -> Iterator[RolloutBatch]:
        """Pieces that fit the cache, a multiple of `ways`; their losses and gradients add up to the batch's."""
        axis = self.mask.dim() - 1
        length = self.mask.shape[axis]
        size = max(1, self.chunk // (self.mask.shape[0] if axis else 1)) if self.chunk else length
        pieces = slices(length, size, ways)
        if len(pieces) <= 1:
            yield self
            return
        yield from map(self._cut, pieces)

    def shuffled(self, order: Tensor, pieces: int) -> Iterator[RolloutBatch]:
        """Minibatches of the rows, or columns, in `order` `[n]`. What is small is copied for all of them at once, which
        takes fewer calls; observations for one of them at a time.
        """
        axis, inputs = self.mask.dim() - 1, self.inputs
        rest = replace(self, inputs=inputs._replace(obs={}), metrics={})
        rest = map_tensors(lambda x: x.index_select(axis, order), rest, core_state=self._cores(order))
        for at in even(len(order), pieces):
            batch = rest._cut(at)
            obs = map_obs(partial(torch.index_select, dim=axis, index=order[at]), inputs.obs)
            batch.inputs, batch.count, batch.envs = batch.inputs._replace(obs=obs), batch.mask.numel(), 1
            yield batch

    def half(self) -> RolloutBatch:
        """The rows of half the envs (steps of one env are correlated); of shuffled rows the first half."""
        rows = torch.arange(self.mask.shape[-1], device=self.mask.device)
        turns = rows.view(-1, self.envs if self.envs > 1 else len(rows))
        return next(self.shuffled(turns[:, : max(1, turns.shape[1] // 2)].flatten(), 1))

    def _cut(self, at: slice) -> RolloutBatch:
        cut = itemgetter((slice(None), at) if self.mask.dim() > 1 else at)
        return map_tensors(cut, self, core_state=self._cores(at), metrics={})

    def _cores(self, columns: slice | Tensor) -> Tensor | None:
        return None if self.core_state is None else self.core_state[columns]


class A2C(AlgorithmBase):
    """Policy gradient with a value baseline; PPO and V-trace differ in `batches` and `loss`."""

    on_policy = True

    def __init__(self, config: Config, spec: Spec, compute: Compute = ON_CPU, seed: int = 0) -> None:
        super().__init__(config, spec, compute, seed)
        self.algo, self.dist = config.algo, make_distribution(spec.action)
        self.off_policy = OffPolicy(self.replays_rollouts(config))
        self.entropy_adjustment = 0.0  # log of a factor of the entropy coefficient
        self.explained: tuple[Tensor, Tensor, Tensor] | None = None  # values, targets and mask of the last rollout

    @recordable
    def act(
        self, model: Model, inputs: Inputs, core_state: Tensor | None, explore: Tensor | None, rng: torch.Generator
    ) -> tuple[AgentOutput, Tensor | None]:
        """Sample, or take the likeliest action where `explore` is None. Builds no graph."""
        with torch.inference_mode():
            params, value, core_state = model(inputs, core_state)
            if explore is None:
                action = self.dist.mode(params)
                log_prob = self.dist.log_prob(params, action)
            else:
                action, log_prob = self.dist.sample_with_log_prob(params, rng)
            return AgentOutput(action, log_prob, value), core_state

    def prepare(self, model: Model, rollout: Rollout) -> RolloutBatch:
        """The whole rollout as one batch, advantages and value targets from the values of the acting weights."""
        mask = rollout.mask
        reward = self.rewards.normalized(model, rollout)
        advantage, target = gae(
            reward, rollout.behavior_value, rollout.terminated, mask, self.algo.gamma, self.algo.gae_lambda
        )
        t, b = mask.shape
        if self.algo.value_target == "n-step":
            target = gae(reward, rollout.behavior_value, rollout.terminated, mask, self.algo.gamma, 1.0)[1]
        self.explained = (rollout.behavior_value[:t], target, mask)
        r = rollout
        inputs = r.inputs.map(lambda x: x[:t])
        batch = RolloutBatch(
            inputs, r.action, advantage, target, r.behavior_log_prob, r.behavior_value[:t], mask, r.core_state,
            t * b, self.chunk,
        )  # fmt: skip
        if model.recurrent:
            return batch
        # Without a core rows are independent: flatten time, so that a part is a contiguous slice.
        return map_tensors(lambda x: x.flatten(0, 1), batch, core_state=None, envs=b)

    def batches(self, model: Model, rollout: Rollout) -> Iterator[RolloutBatch]:
        """The rollout, once."""
        batch = self.prepare(model, rollout)
        if self.algo.normalize_advantage:
            batch.advantage = normalize(batch.advantage, batch.mask)
        yield batch

    def entropy_coef(self) -> float:
        factor = schedule_value(
            self.algo.entropy_schedule, self.clock.env_steps, self.config.steps, self.clock.episodes
        )
        return self.algo.entropy_coef * factor * math.exp(self.entropy_adjustment)

    def changing(self) -> dict[str, float]:
        return {"entropy": -self.entropy_coef()}

    @recordable
    def loss(self, model: Model, batch: RolloutBatch) -> Loss:
        """Policy gradient, squared value error, entropy bonus."""
        params, value, _ = model(batch.inputs, batch.core_state)
        log_prob, entropy = self.dist.evaluate(params, batch.action)
        terms: Terms = {
            "policy_loss": (1.0, policy_gradient(log_prob, batch.advantage)),
            "value_loss": (self.algo.value_coef, value_loss(value, batch.value_target)),
            "entropy": (self.factor("entropy"), entropy),
        }
        return combine(terms, {}, batch.mask, batch.count)

    def warning(self) -> str:
        return self.off_policy.warning()

    def after_step(self, model: Model, batch: Batch[object]) -> None:
        """Measure how far from the policy the data is, where the loss says so (`OffPolicy`). Adapt the entropy bonus
        towards the target entropy, where there is one (SEED RL).
        """
        self.off_policy.measure(batch)
        target = self.algo.entropy_target
        if target and batch.valid:
            missing = (target - batch.metrics.get("entropy", target)) / abs(target)
            if math.isfinite(missing):  # not finite after a skipped batch
                moved = self.entropy_adjustment + _ENTROPY_RATE * max(-1.0, min(1.0, missing))
                self.entropy_adjustment = max(-_ENTROPY_MOST, min(_ENTROPY_MOST, moved))

    def gauges(self) -> dict[str, float]:
        """The share of the value targets' variance that the values explained in the last rollout."""
        return {} if self.explained is None else {"explained_variance": float(explained_variance(*self.explained))}

    def state_dict(self) -> dict[str, Tensor]:
        adjustment = torch.tensor([self.entropy_adjustment], dtype=torch.float64)
        return {"entropy_adjustment": adjustment, **super().state_dict()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        super().load_state_dict(state)
        if "entropy_adjustment" in state:
            self.entropy_adjustment = float(state["entropy_adjustment"])
