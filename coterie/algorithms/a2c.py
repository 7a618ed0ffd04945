"""Advantage actor-critic: A2C and, with a lock-free or central exchange, A3C.

Mnih et al. 2016 (arXiv 1602.01783) with GAE (Schulman et al. 2016, arXiv 1506.02438); `gae_lambda` 1 is the n-step
return. One pass over each rollout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from coterie.config import Config
from coterie.models.build import Network
from coterie.ops.dist import make_distribution
from coterie.ops.optim import schedule_value
from coterie.ops.policy import masked_mean, normalize, policy_gradient, value_loss
from coterie.ops.returns import RunningReturns, explained_variance, gae
from coterie.types import AgentOutput, Inputs, Rollout, Spec

_ENTROPY_MOST = 7.0  # of the log of the adapted factor: an entropy out of reach must not let the bonus run away
_ENTROPY_RATE = 0.01  # most that the log of the entropy coefficient moves in one learner step


@dataclass
class Clock:
    """How far the whole run is, for schedules: the learner sets it before each rollout's batches."""

    env_steps: int = 0
    episodes: int = 0


@dataclass
class Loss:
    """What to minimise, and named scalars (tensors, no graph). Both are sums over parts: divided by the whole batch."""

    total: Tensor
    metrics: dict[str, Tensor]


def slices(length: int, size: int, ways: int) -> list[slice]:
    """Even pieces of at most `size` (0: any), as many as a multiple of `ways` where there is that much."""
    pieces = min(length, math.ceil(math.ceil(length / (size or length)) / ways) * ways)
    return [slice(length * i // pieces, length * (i + 1) // pieces) for i in range(pieces)]


def combine(terms: dict[str, tuple[float, Tensor]], watched: dict[str, Tensor], mask: Tensor, count: int) -> Loss:
    """The weighted sum of the terms' means, and as metrics these means and those of `watched`, over the valid rows.

    One reduction instead of one for each term: for a small net the calls are what takes the time.
    """
    columns = torch.stack([*(x for _, x in terms.values()), *watched.values()])
    means = masked_mean(columns, mask, count)
    weights = means.new_tensor([weight for weight, _ in terms.values()])
    total = torch.dot(means[: len(terms)], weights)
    return Loss(total, dict(zip([*terms, *watched], means.detach().unbind(), strict=True)))


@dataclass
class Batch:
    """What one optimizer step learns from: rows `[N]`, or columns `[T, b]` with `core_state` when there is a core."""

    inputs: Inputs
    action: Tensor
    advantage: Tensor
    value_target: Tensor
    behavior_log_prob: Tensor
    behavior_value: Tensor
    mask: Tensor
    core_state: Tensor | None
    count: int  # T x B of the whole batch, masked or not: the one divisor of every sum
    chunk: int  # most samples that go through the network at once; 0: all
    metrics: dict[str, float] = field(default_factory=dict)  # the whole batch's, once it was trained on

    @property
    def valid(self) -> int:
        """How many of the `count` rows are learned from."""
        return int(self.mask.sum())

    def parts(self, ways: int = 1) -> Iterator[Batch]:
        """Pieces that fit the cache, a multiple of `ways`; their losses and gradients add up to the batch's."""
        axis = self.mask.dim() - 1
        length = self.mask.shape[axis]
        size = max(1, self.chunk // (self.mask.shape[0] if axis else 1)) if self.chunk else length
        pieces = slices(length, size, ways)
        if len(pieces) <= 1:
            yield self
            return
        for at in pieces:
            yield self._map(partial(_cut, axis, at), at)

    def take(self, index: Tensor) -> Batch:
        """The rows `[n]` of a flat batch, or the columns of one with time, at `index`; copied."""
        axis = self.mask.dim() - 1
        batch = self._map(lambda x: x.index_select(axis, index), index)
        batch.count = batch.mask.numel()
        return batch

    def _map(self, pick: Callable[[Tensor], Tensor], columns: Any) -> Batch:
        return Batch(
            self.inputs.map(pick),
            pick(self.action),
            pick(self.advantage),
            pick(self.value_target),
            pick(self.behavior_log_prob),
            pick(self.behavior_value),
            pick(self.mask),
            self.core_state[columns] if self.core_state is not None else None,
            self.count,
            self.chunk,
        )


def _cut(axis: int, at: slice, x: Tensor) -> Tensor:
    return x[:, at] if axis else x[at]


def _keep(x: Tensor) -> Tensor:
    return x


def _fold_time(x: Tensor) -> Tensor:
    return x.flatten(0, 1)


class A2C:
    """The algorithm's pure parts, and what it must remember: the progress that its schedules read."""

    def __init__(self, config: Config, spec: Spec, chunk: int = 0) -> None:
        self.config, self.algo, self.chunk = config, config.algo, chunk
        self.dist = make_distribution(spec.action)
        self.clock = Clock()
        self.sampled = 1.0  # what `explore` is in an evaluation that samples
        self.entropy_adjustment = 0.0  # log of a factor of the entropy coefficient
        self.judged: tuple[Tensor, Tensor, Tensor] | None = None  # values, targets and mask of the last rollout
        self.running = RunningReturns()  # for the reward's deviation

    def act(
        self,
        model: Network,
        inputs: Inputs,
        core_state: Tensor | None,
        explore: Tensor | None,
        rng: torch.Generator,
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

    def explore(self, env_id: Tensor) -> Tensor:
        """All envs sample from the policy as it is."""
        return torch.ones(len(env_id), device=env_id.device)

    def acts_at(self, version: int) -> None:
        """How an action is chosen does not depend on how far the run is."""

    def rewards(self, rollout: Rollout) -> Tensor:
        """The rollout's rewards `[T, B]`, clipped and scaled."""
        r, how = rollout.reward, self.config.reward
        if how.clip == "sign":
            r = r.sign()
        elif how.clip == "clamp":
            r = r.clamp(-1, 1)
        elif how.clip == "tanh":
            r = r.tanh()
        elif how.clip == "asymmetric":  # IMPALA, Figure D.1 (its code: 5 tanh(r / 5), and 0.3 of that below 0)
            r = r.tanh()
            r = 0.3 * r.clamp(max=0) + 5 * r.clamp(min=0)
        if how.scale != 1:
            r = r * how.scale
        return r

    def normalized_rewards(self, model: Network, rollout: Rollout) -> Tensor:
        """`rewards`, over the running deviation of the return where that is asked for."""
        reward = self.rewards(rollout)
        return (reward / model.return_norm.deviation()).clamp(-10, 10) if self.config.reward.normalize else reward

    def after_rollout(self, model: Network, rollout: Rollout) -> None:
        """Update the running normalizers, once the last batch has used the old ones."""
        mask = rollout.mask
        obs = rollout.obs
        rows = {k: x[: len(mask)] for k, x in obs.items()} if isinstance(obs, dict) else obs[: len(mask)]
        model.observe(rows, mask)
        if self.config.reward.normalize:
            returns = self.running.update(self.rewards(rollout), rollout.is_first, rollout.env_id, self.algo.gamma)
            model.return_norm.update(returns[mask])

    def prepare(self, model: Network, rollout: Rollout) -> Batch:
        """The whole rollout as one batch, advantages and value targets from the values of the acting weights."""
        mask = rollout.mask
        reward = self.normalized_rewards(model, rollout)
        advantage, target = gae(
            reward, rollout.behavior_value, rollout.terminated, mask, self.algo.gamma, self.algo.gae_lambda
        )
        t, b = mask.shape
        self.judged = (rollout.behavior_value[:t], target, mask)
        # Without a core rows are free of one another: fold time away, so that a part is a contiguous slice.
        flat = _keep if model.recurrent else _fold_time
        obs = rollout.obs
        rows = {k: flat(x[:t]) for k, x in obs.items()} if isinstance(obs, dict) else flat(obs[:t])
        return Batch(
            Inputs(rows, flat(rollout.is_first[:t]), flat(rollout.prev_action[:t]), flat(rollout.prev_reward[:t])),
            flat(rollout.action),
            flat(advantage),
            flat(target),
            flat(rollout.behavior_log_prob),
            flat(rollout.behavior_value[:t]),
            flat(mask),
            rollout.core_state,
            t * b,
            self.chunk,
        )

    def batches(self, model: Network, rollout: Rollout) -> Iterator[Batch]:
        """The rollout itself, once."""
        batch = self.prepare(model, rollout)
        if self.algo.normalize_advantage:
            batch.advantage = normalize(batch.advantage, batch.mask)
        yield batch

    def entropy_coef(self) -> float:
        factor = schedule_value(
            self.algo.entropy_schedule, self.clock.env_steps, self.config.steps, self.clock.episodes
        )
        return self.algo.entropy_coef * factor * math.exp(self.entropy_adjustment)

    def loss(self, model: Network, batch: Batch) -> Loss:
        """Policy gradient, squared value error, entropy bonus."""
        params, value, _ = model(batch.inputs, batch.core_state)
        log_prob, entropy = self.dist.evaluate(params, batch.action)
        terms = {
            "policy_loss": (1.0, policy_gradient(log_prob, batch.advantage)),
            "value_loss": (self.algo.value_coef, value_loss(value, batch.value_target)),
            "entropy": (-self.entropy_coef(), entropy),
        }
        return combine(terms, {}, batch.mask, batch.count)

    def after_step(self, model: Network, batch: Any) -> None:
        """Adapt the entropy bonus towards the target entropy, where there is one (SEED RL)."""
        target = self.algo.entropy_target
        if target and (valid := batch.valid):
            # The metric is divided by T x B, masked rows and all.
            entropy = batch.metrics.get("entropy", target) * batch.count / valid
            missing = (target - entropy) / abs(target)
            if math.isfinite(missing):  # it is not where a batch was skipped
                moved = self.entropy_adjustment + _ENTROPY_RATE * max(-1.0, min(1.0, missing))
                self.entropy_adjustment = max(-_ENTROPY_MOST, min(_ENTROPY_MOST, moved))

    def gauges(self) -> dict[str, float]:
        """How much of the value targets' variance the values explained, in the last rollout."""
        return {} if self.judged is None else {"explained_variance": float(explained_variance(*self.judged))}

    def state_dict(self) -> dict[str, Tensor]:
        adjustment = torch.tensor([self.entropy_adjustment], dtype=torch.float64)
        return {"entropy_adjustment": adjustment, **(self.running.state_dict() if self.running.carry else {})}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        if "running_env" in state:
            self.running.load_state_dict(state)
        if "entropy_adjustment" in state:
            self.entropy_adjustment = float(state["entropy_adjustment"])
