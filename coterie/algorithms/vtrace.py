"""V-trace actor-critic: learning from rollouts of an older policy (IMPALA, arXiv 1802.01561, section 4).

Log-probabilities and values are the learner's own, from one pass over the whole rollout; what the rollout tells of the
policy that acted is `behavior_log_prob`. Acting, rewards and normalizers are A2C's. `correction` has the variants that
the paper compares (section 5.2.2): `none`, `epsilon`, `one-step`. With replay a share of each batch are older rollouts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from coterie.acting.recorder import rollout_layout
from coterie.acting.table import acting_kind
from coterie.algorithms.a2c import A2C
from coterie.algorithms.base import ON_CPU, Batch, Compute, Loss, Terms, combine, slices
from coterie.config import Config, Refusal
from coterie.models.base import Model
from coterie.ops.policy import policy_gradient, value_loss
from coterie.ops.returns import gae
from coterie.ops.vtrace import Clips, vtrace
from coterie.parallel.graphs import recordable
from coterie.replay.storage import require_room
from coterie.replay.trajectories import TrajectoryReplay
from coterie.types import Inputs, Rollout, Spec, map_tensors

_ADVANTAGE_RATE = 0.01  # of the running mean square: a part of a batch does not have the whole batch's
_EPSILON = 1e-6  # what the variant `epsilon` adds to a probability before its logarithm


@dataclass
class Sequences:
    """Whole rollouts of some envs, `[T+1, b]`."""

    inputs: Inputs  # row T is used only for its value
    action: Tensor
    reward: Tensor
    terminated: Tensor
    behavior_log_prob: Tensor
    mask: Tensor
    core_state: Tensor | None
    count: int  # T x B of the whole batch

    def columns(self, at: slice | Tensor) -> Sequences:
        state = None if self.core_state is None else self.core_state[at]
        return map_tensors(lambda x: x[:, at], self, core_state=state)


@dataclass
class TrajectoryBatch:
    """New and replayed rollouts. A part holds at most `chunk` steps (0: all of either kind)."""

    rollouts: list[Sequences]
    chunk: int
    count: int
    metrics: dict[str, float] = field(default_factory=dict)
    priority: Tensor | None = None

    @cached_property
    def valid(self) -> int:
        """How many of the `count` rows are learned from."""
        return sum(int(whole.mask.sum()) for whole in self.rollouts)

    def half(self) -> TrajectoryBatch:
        halves = [whole.columns(slice(0, max(1, whole.mask.shape[1] // 2))) for whole in self.rollouts]
        return TrajectoryBatch(halves, self.chunk, self.count)

    def parts(self, ways: int = 1) -> Iterator[Sequences]:
        for whole in self.rollouts:
            rows, width = whole.inputs.is_first.shape
            size = max(1, self.chunk // (rows - 1)) if self.chunk else 0  # row T is used only for its value
            for at in slices(width, size, ways):
                yield whole.columns(at)


class VTrace(A2C):
    """A2C with targets that correct for the acting policy."""

    on_policy = False
    refusals = (
        Refusal(
            lambda c, s: 0 < c.vtrace.replay_capacity < max(_rollouts(c), _shares(c, _rollouts(c))[1]),
            "vtrace.replay_capacity",
            "must hold the new and the replayed rollouts of a batch; set it higher, or to 0",
        ),
        Refusal(
            lambda c, s: c.vtrace.replay_capacity * c.vtrace.replay_share > 0 == _shares(c, _rollouts(c))[1],
            "vtrace.replay_share",
            "must be 0 or large enough for one replayed rollout in an optimizer step: set it higher, or "
            "vtrace.minibatch (if that is 0: env.num_envs, or the acting's batch_size)",
        ),
        Refusal(
            lambda c, s: _rollouts(c) % max(1, _shares(c, _rollouts(c))[0]) != 0,
            "vtrace.minibatch",
            "must divide, after its replayed rollouts are taken off, the rollouts of a batch (env.num_envs, or the "
            "acting's batch_size)",
        ),
        Refusal(
            lambda c, s: c.vtrace.correction == "vtrace" and 0 < c.vtrace.rho_bar < (c.vtrace.c_bar or math.inf),
            "vtrace.rho_bar",
            "must not be below vtrace.c_bar (0: no clip): V-trace would not converge",
        ),
    )

    def __init__(self, config: Config, spec: Spec, compute: Compute = ON_CPU, seed: int = 0) -> None:
        super().__init__(config, spec, compute, seed)
        self.vtrace = config.vtrace
        self.mean_square = 0.0  # of advantages, a running mean, to normalize them
        self.replay = TrajectoryReplay(self.vtrace.replay_capacity, seed) if self.vtrace.replay_capacity else None

    @staticmethod
    def check_data(config: Config, spec: Spec) -> None:
        rollouts, arrays = config.vtrace.replay_capacity, rollout_layout(spec, config.algo.unroll_length, 1).values()
        each = sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in arrays)
        need = rollouts * each * int(config.learners)
        require_room("vtrace.replay_capacity", need, f"{rollouts:,} rollouts of each learner")

    @staticmethod
    def lockstep_settings(config: Config) -> tuple[object, ...]:
        return (config.vtrace, _rollouts(config) if config.vtrace.minibatch or config.vtrace.replay_capacity else 0)

    @staticmethod
    def replays_rollouts(config: Config) -> bool:
        return config.vtrace.replay_capacity > 0

    @staticmethod
    def updates(config: Config, columns: int, unroll: int) -> tuple[float, float]:
        new, old = _shares(config, columns)
        return columns // new, (new + old) * unroll

    def batches(self, model: Model, rollout: Rollout) -> Iterator[TrajectoryBatch]:  # type: ignore[override]  # its parts are of another type
        """The rollout once, whole or in minibatches of columns, with replayed rollouts beside them."""
        width = len(rollout.env_id)
        size, old = _shares(self.config, width)
        new = self._sequences(model, rollout)
        for i in range(width // size):
            # Every k-th column: neighboring columns come from the same actor.
            whole = [new if size == width else new.columns(torch.arange(i, width, width // size))]
            if self.replay is not None and old and self.replay.size >= old:
                whole.append(self._sequences(model, self.replay.sample(old, rollout)))
            count = sum(part.action.shape[0] * part.action.shape[1] for part in whole)
            for part in whole:
                part.count = count
            yield TrajectoryBatch(whole, self.chunk, count)
        if self.replay is not None:
            self.replay.add(rollout)

    def _sequences(self, model: Model, rollout: Rollout) -> Sequences:
        reward = self.rewards.normalized(model, rollout)
        return Sequences(
            rollout.inputs, rollout.action, reward, rollout.terminated, rollout.behavior_log_prob, rollout.mask,
            rollout.core_state, rollout.reward.numel(),
        )  # fmt: skip

    def changing(self) -> dict[str, float]:
        deviation = math.sqrt(self.mean_square) + 1e-6 if self.mean_square else 1.0
        return {**super().changing(), "deviation": deviation}

    @recordable
    def loss(self, model: Model, batch: Sequences) -> Loss:  # type: ignore[override]
        """Policy gradient and squared value error towards the corrected targets, entropy bonus."""
        params, value, last = _forward(model, batch)
        log_prob, entropy = self.dist.evaluate(params, batch.action)
        log_ratio = (log_prob - batch.behavior_log_prob).detach()
        target, advantage = self._targets(log_ratio, torch.cat((value.detach(), last[None])), batch)
        squares = advantage**2
        if self.algo.normalize_advantage:
            advantage = advantage / self.factor("deviation")
        if self.vtrace.correction == "epsilon":
            log_prob = (log_prob.exp() + _EPSILON).log()
        terms: Terms = {
            "policy_loss": (1.0, policy_gradient(log_prob, advantage)),
            "value_loss": (self.algo.value_coef, value_loss(value, target)),
            "entropy": (self.factor("entropy"), entropy),
        }
        watched = self.off_policy.diagnostics(log_ratio, self.vtrace.rho_bar)
        watched["c_clipped"] = (log_ratio > math.log(self.vtrace.c_bar or math.inf)).float()
        if self.algo.normalize_advantage:
            watched["advantage_square"] = squares
        loss = combine(terms, watched, batch.mask, batch.count)
        if self.vtrace.loss == "sum":
            loss.total = loss.total * batch.count
        return loss

    def after_step(self, model: Model, batch: Batch[object]) -> None:
        super().after_step(model, batch)
        found = batch.metrics.get("advantage_square", 0.0)
        if found > 0 and math.isfinite(found):
            before = self.mean_square or found
            self.mean_square = before + _ADVANTAGE_RATE * (found - before)

    def _targets(self, log_ratio: Tensor, value: Tensor, part: Sequences) -> tuple[Tensor, Tensor]:
        """Value targets and advantages `[T, b]`."""
        how, gamma, lam = self.vtrace, self.algo.gamma, self.algo.gae_lambda
        if how.correction == "vtrace":
            inf = math.inf
            clips = Clips(how.rho_bar or inf, how.c_bar or inf, how.pg_rho_bar or inf, lam, how.q_from)
            return vtrace(log_ratio, part.reward, value, part.terminated, part.mask, gamma, clips)
        # On-policy targets; `one-step` weights each policy gradient by its importance ratio: the paper's has no clip,
        # which is `pg_rho_bar` 0 (then 1e3, against overflow).
        advantage, target = gae(part.reward, value, part.terminated, part.mask, gamma, lam)
        if how.correction == "one-step":
            advantage = advantage * log_ratio.clamp(max=math.log(how.pg_rho_bar or 1e3)).exp()
        return target, advantage

    def state_dict(self) -> dict[str, Tensor]:
        """Without the replayed rollouts: a resumed run refills its replay."""
        rng = {} if self.replay is None else {"replay_rng": self.replay.rng.get_state()}
        spread = {"spread": torch.tensor([self.mean_square], dtype=torch.float64)} if self.mean_square else {}
        return {**super().state_dict(), **rng, **spread}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        super().load_state_dict(state)
        if "spread" in state:
            self.mean_square = float(state["spread"])
        if self.replay is not None and "replay_rng" in state:
            self.replay.rng.set_state(state["replay_rng"])


def _rollouts(config: Config) -> int:
    return acting_kind(config).batch_size(config)


def _shares(config: Config, width: int) -> tuple[int, int]:
    """New and replayed rollouts of an optimizer step, where acting delivers `width` rollouts at a time."""
    size = config.vtrace.minibatch or width
    old = min(size - 1, round(size * config.vtrace.replay_share)) if config.vtrace.replay_capacity else 0
    return size - old, old


def _forward(model: Model, part: Sequences) -> tuple[Tensor, Tensor, Tensor]:
    """Policy parameters `[T, b, P]`, values `[T, b]`, and the bootstrap value `[b]` of row T.

    No gradient flows into the bootstrap value; without a core it skips the backward pass, a twentieth of the work.
    """
    if model.recurrent:
        params, value, _ = model(part.inputs, part.core_state)
        return params[:-1], value[:-1], value[-1].detach()
    params, value, _ = model(part.inputs.map(lambda x: x[:-1]))
    with torch.no_grad():
        last = model(part.inputs.map(lambda x: x[-1]))[1]
    return params, value, last
