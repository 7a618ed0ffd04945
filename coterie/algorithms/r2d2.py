"""R2D2 (Kapturowski et al. 2019) as SEED RL has it (arXiv 1910.06591): double Q-learning with n-step returns inside
replayed sequences, a recurrent network that is warmed up by the rows before those that are trained on, rescaled values,
and priorities that mix a sequence's largest and mean error.
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
from coterie.ops.q import huber, n_step_targets, rescale, unscale
from coterie.replay.sequences import SequenceRing, Sequences
from coterie.types import Inputs, Rollout, Spec


@dataclass
class Batch:
    """Drawn sequences; a part holds at most `chunk` of their trained rows (0: all)."""

    rows: Sequences
    after: Tensor  # the target network's values from the end of the burn-in on, [length+1, n, A]
    chunk: int
    length: int
    count: int
    priority: Tensor  # [n], written by the parts' losses
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def valid(self) -> int:
        """How many of the `count` rows are learned from."""
        return int(self.rows.mask[-self.length :].sum())

    def parts(self, ways: int = 1) -> Iterator[Batch]:
        r, size = self.rows, max(1, self.chunk // self.length) if self.chunk else 0
        for at in slices(len(self.priority), size, ways):
            inputs = r.inputs.map(itemgetter((slice(None), at)))
            action, reward, terminated, mask = (x[:, at] for x in (r.action, r.reward, r.terminated, r.mask))
            part = Sequences(inputs, action, reward, terminated, mask, r.core_state[at], r.weight[at], r.picks)
            yield Batch(part, self.after[:, at], self.chunk, self.length, self.count, self.priority[at])


class R2D2:
    """Sequences, with a recurrent core."""

    def __init__(self, config: Config, spec: Spec, seed: int, means: Means) -> None:
        self.config, self.spec, self.q, self.own = config, spec, config.q, config.r2d2
        self.chunk, self.seed = means.chunk, seed
        rows = config.r2d2.length * config.q.batch_size
        self.base = base = Values(config, spec, seed, rows, self._replay, self._judge, 1, means)
        self.clock, self.explore, self.acts_at, self.sampled = base.clock, base.explore, base.acts_at, base.sampled
        self.act, self.after_step, self.after_rollout, self.gauges = (
            base.act, base.after_step, base.after_rollout, base.gauges,
        )  # fmt: skip
        self.state_dict, self.load_state_dict = base.state_dict, base.load_state_dict

    def _replay(self, rollout: Rollout) -> SequenceRing:
        own, replay, unroll = self.own, self.config.replay, self.config.algo.unroll_length
        assert rollout.core_state is not None
        return SequenceRing(
            self.spec, *size_of(self.config), unroll, (own.burn_in + own.length) // unroll, own.stride // unroll,
            tuple(rollout.core_state.shape[1:]), frames=stack_of(self.config), alpha=replay.alpha, seed=self.seed,
            disk=replay.disk, judge=self._first if replay.initial == "acting" else None,
        )  # fmt: skip

    @staticmethod
    def replay_bytes(config: Config, spec: Spec) -> int:
        """What the replay of one learner takes when it is full."""
        core = (2, config.model.core_size)
        return SequenceRing.bytes_for(spec, *size_of(config), config.algo.unroll_length, core, stack_of(config))

    def batches(self, model: Network, rollout: Rollout) -> Iterator[Batch]:
        """Keep the rollout, then draw what is due."""
        n = self.q.batch_size
        for rows, after in self.base.drawn(model, rollout):
            yield Batch(
                rows, after, self.chunk, self.own.length, self.own.length * n, torch.zeros(n, device=rows.weight.device)
            )

    @torch.no_grad()
    def _warm(self, model: Network, inputs: Inputs, state: Tensor) -> tuple[Inputs, Tensor]:
        """What follows the burn-in, and the state that it leaves behind."""
        begin = self.own.burn_in
        if not self.own.stored_state:
            state = torch.zeros_like(state)
        if begin:
            state = model(inputs.map(itemgetter(slice(0, begin))), state)[2]
            torch.clear_autocast_cache()  # older torch would train on the casts of weights that were made here
        return inputs.map(itemgetter(slice(begin, None))), state

    def _judge(self, target: Network, rows: Sequences, at: slice) -> Tensor:
        inputs = rows.inputs.map(itemgetter((slice(None), at)))
        params: Tensor = target(*self._warm(target, inputs, rows.core_state[at]))[0]
        return params

    def _first(self, reward: Tensor, value: Tensor, terminated: Tensor, mask: Tensor) -> Tensor:
        """First priorities, by the values that acted; those of the actions taken stand for the best ones."""
        begin = self.own.burn_in
        reward, value, terminated, mask = reward[begin:], value[begin:], terminated[begin:], mask[begin:]
        wanted = self._targets(reward, value, terminated, mask)
        return self._mix((value[:-1] - wanted) * mask)

    def _targets(self, reward: Tensor, after: Tensor, terminated: Tensor, mask: Tensor) -> Tensor:
        """What the values should be, `[T, n]`; `after` `[T+1, n]`: the target network's, of what is best there."""
        total, discount, row = n_step_targets(reward, after, terminated, mask, self.config.algo.gamma, self.q.n_step)
        real = unscale(after) if self.own.rescale else after
        wanted = total + discount * real.gather(0, row)
        return rescale(wanted) if self.own.rescale else wanted

    def _mix(self, error: Tensor) -> Tensor:
        size = error.abs()
        return self.own.eta * size.amax(0) + (1 - self.own.eta) * size.mean(0)

    def loss(self, model: Network, part: Batch) -> Loss:
        """Squared error of the rows after the burn-in, weighted; the sequences' priorities are left in the part."""
        rows, after, begin = part.rows, part.after, self.own.burn_in
        rest, state = self._warm(model, rows.inputs, rows.core_state)
        values = model(rest, state)[0]
        action, mask = rows.action[begin:], rows.mask[begin:]
        with torch.no_grad():
            best = (values if self.q.double else after).argmax(-1)
            then = after.gather(-1, best[..., None])[..., 0]
            wanted = self._targets(rows.reward[begin:], then, rows.terminated[begin:], mask)
        found = values[:-1].gather(-1, action[..., None])[..., 0]
        error = found - wanted
        size = (error.detach() * mask).abs()
        part.priority.copy_(self._mix(size))
        terms = {"q_loss": (1.0, rows.weight * huber(error, self.q.huber))}
        return combine(terms, {"q": found.detach(), "q_error": size}, mask, part.count)
