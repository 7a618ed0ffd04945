"""R2D2 (Kapturowski et al. 2019) as SEED RL has it (arXiv 1910.06591): double Q-learning with n-step returns inside
replayed sequences, a recurrent network that is warmed up by the rows before those that are trained on, rescaled values,
and priorities that mix a sequence's largest and mean error.
"""

from __future__ import annotations

from dataclasses import replace
from operator import itemgetter

import torch
from torch import Tensor

from coterie.acting.base import core_shape
from coterie.algorithms.base import Loss, combine
from coterie.algorithms.q_base import QLearning
from coterie.algorithms.replay_base import ReplayBatch
from coterie.algorithms.replay_size import replay_capacity, replay_size, value_refusals
from coterie.algorithms.table import algorithm_class
from coterie.config import Config, Refusal, ResolvedConfig
from coterie.models.base import Model
from coterie.models.build import Network
from coterie.models.cores import is_recurrent
from coterie.ops.q import huber, n_step_targets, rescale, unscale
from coterie.parallel.threads import making
from coterie.replay.sequences import Blocks, SequenceReplay, Sequences
from coterie.replay.storage import Capacity
from coterie.types import Inputs, Spec


def _unroll(config: Config) -> int:
    return algorithm_class(config).unroll_length(config)


def _whole_rollouts(name: str) -> Refusal:
    return Refusal(
        lambda c, s: getattr(c.r2d2, name) % _unroll(c) != 0,
        f"r2d2.{name}",
        "must be a multiple of algo.unroll_length: recurrent states are stored once per rollout",
    )


def _whole_rows(config: ResolvedConfig) -> int:
    """Rows that the replay stores of each env: whole rollouts."""
    (envs, capacity), unroll = replay_size(config), _unroll(config)
    return capacity // envs // unroll * unroll


def _needed(config: Config) -> int:
    """The replay must hold more than this many rows of an env, so that a sequence stays until the next one is whole."""
    r2d2 = config.r2d2
    return r2d2.burn_in + r2d2.length + max(0, r2d2.stride - 2 * _unroll(config))


def _blocks(config: Config, spec: Spec) -> Blocks:
    r2d2, unroll = config.r2d2, _unroll(config)
    own = ":" in config.model.core + config.model.torso + config.model.network  # it may read what it makes
    with making(), torch.device("cpu" if own else "meta"):  # meta: 3 ms for Pong, not 0.4 s
        core = core_shape(Network(spec, config.model))
    return Blocks(unroll, (r2d2.burn_in + r2d2.length) // unroll, r2d2.stride // unroll, core)


class R2D2(QLearning[Sequences]):
    """Sequences, with a recurrent core."""

    batch_axis = 1
    refusals = (
        *value_refusals(_whole_rows, _needed),
        Refusal(
            lambda c, s: not is_recurrent(c.model),
            "MEMORY",
            "must have a memory with r2d2, which trains it on sequences: model.core lstm, gru or gtrxl, or a network's "
            "own initial_state; or use algorithm dqn",
        ),
        *map(_whole_rollouts, ("length", "burn_in", "stride")),
        Refusal(lambda c, s: c.q.atoms > 0, "q.atoms", "must be 0 with r2d2, which learns values on sequences"),
    )

    @staticmethod
    def rows_per_sample(config: Config) -> int:
        return config.r2d2.length

    @classmethod
    def first_rows(cls, config: Config) -> int:
        r2d2 = config.r2d2
        return config.env.num_envs * (r2d2.length + r2d2.burn_in + r2d2.stride + cls.unroll_length(config))

    def make_replay(self, room: Capacity) -> SequenceReplay:
        replay = self.config.replay
        first = self._first_priorities if replay.initial == "acting" else None
        return SequenceReplay(room, _blocks(self.config, self.spec), replay.alpha, self.seed, first)

    @staticmethod
    def replay_bytes(config: ResolvedConfig, spec: Spec) -> int:
        return SequenceReplay.bytes_for(replay_capacity(config, spec), _blocks(config, spec))

    def trained(self, rows: Sequences) -> Tensor:
        return rows.mask[self.config.r2d2.burn_in :]

    @torch.no_grad()
    def _warm(self, model: Model, inputs: Inputs, state: Tensor) -> tuple[Inputs, Tensor]:
        """The inputs after the burn-in, and the recurrent state at its end."""
        begin = self.config.r2d2.burn_in
        if not self.config.r2d2.stored_state:
            state = torch.zeros_like(state)
        if begin:
            _, _, after = model(inputs.map(itemgetter(slice(0, begin))), state)
            state = state if after is None else after
            torch.clear_autocast_cache()  # older torch would train on the casts of weights that were made here
        return inputs.map(itemgetter(slice(begin, None))), state

    def look_ahead(self, target: Model, rows: Sequences, at: slice) -> Tensor:
        inputs = rows.inputs.map(itemgetter((slice(None), at)))
        params: Tensor = target(*self._warm(target, inputs, rows.core_state[at]))[0]
        return params

    def _first_priorities(self, reward: Tensor, value: Tensor, terminated: Tensor, mask: Tensor) -> Tensor:
        """Initial priorities from the acting values; those of the chosen actions stand for the greedy ones."""
        begin = self.config.r2d2.burn_in
        reward, value, terminated, mask = reward[begin:], value[begin:], terminated[begin:], mask[begin:]
        wanted = self._targets(reward, value, terminated, mask)
        return self._mix((value[:-1] - wanted) * mask)

    def _targets(self, reward: Tensor, after: Tensor, terminated: Tensor, mask: Tensor) -> Tensor:
        """Value targets `[T, n]`; `after` `[T+1, n]`: the target network's values of the greedy actions."""
        total, discount, row = n_step_targets(reward, terminated, mask, self.config.algo.gamma, self.q.n_step)
        real = unscale(after) if self.config.r2d2.rescale else after
        wanted = total + discount * real.gather(0, row)
        return rescale(wanted) if self.config.r2d2.rescale else wanted

    def _mix(self, error: Tensor) -> Tensor:
        size, eta = error.abs(), self.config.r2d2.eta
        return eta * size.amax(0) + (1 - eta) * size.mean(0)

    def loss(self, model: Model, batch: ReplayBatch[Sequences]) -> Loss:
        """The weighted error of the rows after the burn-in, and the sequences' priorities."""
        rows, after, begin = batch.rows, batch.ahead, self.config.r2d2.burn_in
        rest, state = self._warm(model, rows.inputs, rows.core_state)
        values = model(rest, state)[0]
        action, mask = rows.action[begin:], batch.mask
        with torch.no_grad():
            best = (values if self.q.double else after).argmax(-1)
            then = after.gather(-1, best[..., None])[..., 0]
            wanted = self._targets(rows.reward[begin:], then, rows.terminated[begin:], mask)
        found = values[:-1].gather(-1, action[..., None])[..., 0]
        error = found - wanted
        size = (error.detach() * mask).abs()
        terms = {"q_loss": (1.0, rows.weight * huber(error, self.q.huber))}
        loss = combine(terms, {"q": found.detach(), "q_error": size}, mask, batch.count)
        return replace(loss, priority=self._mix(size))
