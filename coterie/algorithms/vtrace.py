"""V-trace actor-critic: learning from rollouts of an older policy (IMPALA, arXiv 1802.01561, section 4).

Log-probabilities and values are the learner's own, from one pass over the whole rollout; what the rollout tells of the
policy that acted is `behavior_log_prob`. Acting, rewards and normalizers are A2C's. `correction` has the variants that
the paper compares (section 5.2.2): `none`, `epsilon`, `one-step`. With replay a part of each batch are older rollouts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from coterie.algorithms.a2c import A2C, Loss, combine, slices
from coterie.config import Config
from coterie.models.build import Network
from coterie.ops.policy import policy_gradient, value_loss
from coterie.ops.returns import gae
from coterie.ops.vtrace import vtrace
from coterie.replay.trajectories import Fifo
from coterie.types import Inputs, Rollout, Spec

_SPREAD_RATE = 0.01  # at which the deviation follows: not this batch's own, which its parts do not know
_EPSILON = 1e-6  # what the variant `epsilon` adds to a probability before its logarithm


@dataclass
class Sequences:
    """Whole rollouts of some envs, `[T+1, b]`: what V-trace looks at together."""

    inputs: Inputs  # row T is there for its value only
    action: Tensor
    reward: Tensor
    terminated: Tensor
    behavior_log_prob: Tensor
    mask: Tensor
    core_state: Tensor | None
    count: int  # T x B of the whole batch

    def columns(self, at: slice | Tensor) -> Sequences:
        return Sequences(
            self.inputs.map(lambda x: x[:, at]),
            self.action[:, at],
            self.reward[:, at],
            self.terminated[:, at],
            self.behavior_log_prob[:, at],
            self.mask[:, at],
            self.core_state[at] if self.core_state is not None else None,
            self.count,
        )


@dataclass
class Batch:
    """New rollouts and replayed ones. A part holds at most `chunk` steps (0: all of either kind)."""

    rollouts: list[Sequences]
    chunk: int
    count: int
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def valid(self) -> int:
        """How many of the `count` rows are learned from."""
        return sum(int(whole.mask.sum()) for whole in self.rollouts)

    def parts(self, ways: int = 1) -> Iterator[Sequences]:
        for whole in self.rollouts:
            rows, width = whole.inputs.is_first.shape
            size = max(1, self.chunk // (rows - 1)) if self.chunk else 0  # row T is there for its value only
            for at in slices(width, size, ways):
                yield whole.columns(at)


class VTrace:
    """A2C's parts with targets that are corrected for the policy that acted."""

    def __init__(self, config: Config, spec: Spec, chunk: int = 0, seed: int = 0) -> None:
        self.base = base = A2C(config, spec)
        self.clock, self.act, self.after_rollout = base.clock, base.act, base.after_rollout
        self.explore, self.acts_at, self.sampled = base.explore, base.acts_at, base.sampled
        self.config, self.algo, self.own, self.chunk = config, config.algo, config.vtrace, chunk
        self.gauges = base.gauges
        self.spread = 0.0  # running mean of the squared advantage, where that is normalised
        self.replay = Fifo(self.own.replay_capacity, seed) if self.own.replay_capacity else None

    def batches(self, model: Network, rollout: Rollout) -> Iterator[Batch]:
        """The rollout once, whole or a few columns at a time, with older ones beside them where there is replay."""
        width = len(rollout.env_id)
        size = self.own.minibatch or width
        new = self._sequences(model, rollout)
        old = round(size * self.own.replay_share / (1 - self.own.replay_share)) if self.replay is not None else 0
        for i in range(width // size):
            # Every so manieth column: neighbours are of one actor.
            whole = [new if size == width else new.columns(torch.arange(i, width, width // size))]
            if self.replay is not None and old and self.replay.size >= old:
                whole.append(self._sequences(model, self.replay.sample(old, rollout)))
            count = sum(part.action.shape[0] * part.action.shape[1] for part in whole)
            for part in whole:
                part.count = count
            yield Batch(whole, self.chunk, count)
        if self.replay is not None:
            self.replay.add(rollout)

    def _sequences(self, model: Network, rollout: Rollout) -> Sequences:
        reward = self.base.normalized_rewards(model, rollout)
        return Sequences(
            Inputs(rollout.obs, rollout.is_first, rollout.prev_action, rollout.prev_reward),
            rollout.action, reward, rollout.terminated, rollout.behavior_log_prob, rollout.mask, rollout.core_state,
            rollout.reward.numel(),
        )  # fmt: skip

    def loss(self, model: Network, part: Sequences) -> Loss:
        """Policy gradient and squared value error towards the corrected targets, entropy bonus."""
        params, value, last = _judge(model, part)
        log_prob, entropy = self.base.dist.evaluate(params, part.action)
        log_ratio = (log_prob - part.behavior_log_prob).detach()
        target, advantage = self._targets(log_ratio, torch.cat((value.detach(), last[None])), part)
        squares = advantage**2
        if self.spread:
            advantage = advantage / (math.sqrt(self.spread) + 1e-6)
        if self.own.correction == "epsilon":
            log_prob = (log_prob.exp() + _EPSILON).log()
        terms = {
            "policy_loss": (1.0, policy_gradient(log_prob, advantage)),
            "value_loss": (self.algo.value_coef, value_loss(value, target)),
            "entropy": (-self.base.entropy_coef(), entropy),
        }
        watched = {"rho": log_ratio.clamp(max=math.log(1e3)).exp()}
        if self.algo.normalize_advantage:
            watched["advantage_square"] = squares
        loss = combine(terms, watched, part.mask, part.count)
        if self.own.loss == "sum":
            loss.total = loss.total * part.count
        return loss

    def after_step(self, model: Network, batch: Batch) -> None:
        self.base.after_step(model, batch)
        if (
            (found := batch.metrics.get("advantage_square", 0.0)) > 0
            and math.isfinite(found)
            and (valid := batch.valid)
        ):
            found *= batch.count / valid
            self.spread = found if not self.spread else self.spread + _SPREAD_RATE * (found - self.spread)

    def _targets(self, log_ratio: Tensor, value: Tensor, part: Sequences) -> tuple[Tensor, Tensor]:
        """Value targets and advantages `[T, b]`."""
        how, gamma, lam = self.own, self.algo.gamma, self.algo.gae_lambda
        if how.correction == "vtrace":
            return vtrace(
                log_ratio, part.reward, value, part.terminated, part.mask, gamma,
                rho_bar=how.rho_bar or math.inf, c_bar=how.c_bar or math.inf, pg_rho_bar=how.pg_rho_bar or math.inf,
                lam=lam, q_from=how.q_from,
            )  # fmt: skip
        # As if the policy that acted were the learner's, but for the weight of each policy gradient in `one-step`.
        advantage, target = gae(part.reward, value, part.terminated, part.mask, gamma, lam)
        if how.correction == "one-step":
            advantage = advantage * log_ratio.clamp(max=math.log(how.pg_rho_bar or 1e3)).exp()
        return target, advantage

    def state_dict(self) -> dict[str, Tensor]:
        """The replayed rollouts are not in it: after a resume they are gathered anew."""
        rng = {} if self.replay is None else {"replay_rng": self.replay.rng.get_state()}
        spread = {"spread": torch.tensor([self.spread], dtype=torch.float64)} if self.spread else {}
        return {**self.base.state_dict(), **rng, **spread}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.base.load_state_dict(state)
        if "spread" in state:
            self.spread = float(state["spread"])
        if self.replay is not None and "replay_rng" in state:
            self.replay.rng.set_state(state["replay_rng"])


def _judge(model: Network, part: Sequences) -> tuple[Tensor, Tensor, Tensor]:
    """Policy parameters `[T, b, P]` and values `[T, b]` of what is learned from, and the value `[b]` of row T.
    No gradient goes into the last: without a core it needs no backward pass either, a twentieth of the work.
    """
    if model.recurrent:
        params, value, _ = model(part.inputs, part.core_state)
        return params[:-1], value[:-1], value[-1].detach()
    params, value, _ = model(part.inputs.map(lambda x: x[:-1]))
    with torch.no_grad():
        last = model(part.inputs.map(lambda x: x[-1]))[1]
    return params, value, last
