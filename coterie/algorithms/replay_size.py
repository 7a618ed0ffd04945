"""Replay size of algorithms with a replay, and their common refusals."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from coterie.algorithms.table import algorithm_class
from coterie.config import Config, Refusal, ResolvedConfig
from coterie.envs.pool import is_atari
from coterie.envs.tasks import tasks
from coterie.exchange.table import exchange_kind
from coterie.replay.storage import Capacity
from coterie.types import ActionSpec, Spec

_DISCRETE = "needs a Discrete action space, which this env does not have; use ppo, a2c"


def bounded(action: ActionSpec) -> bool:
    """Whether it is continuous, between finite bounds."""
    return action.kind == "continuous" and all(map(math.isfinite, (*action.low, *action.high)))


def stacked_frames(config: Config) -> int:
    """Frames of a stack, of which the replay stores the newest only; 0: observations are stored whole, as a step that
    repeats actions moves the stack by several frames.
    """
    moves_by_one = all(map(is_atari, tasks(config.env.id))) and config.env.action_repeat == 1
    return config.atari.stack if moves_by_one and config.atari.stack > 1 else 0


def replay_size(config: ResolvedConfig) -> tuple[int, int]:
    """Envs and rows of one learner's replay."""
    return config.replay.envs or config.env.num_envs, config.replay.capacity // config.learners


def replay_capacity(config: ResolvedConfig, spec: Spec) -> Capacity:
    """Room in one learner's replay."""
    return Capacity(spec, *replay_size(config), stacked_frames(config), config.replay.disk)


def fits_gpu(config: ResolvedConfig, spec: Spec, device: torch.device) -> bool:
    """Whether the replays of all learners on a learner's GPU take at most half of its free memory."""
    if device.type != "cuda" or config.replay.disk or not config.replay.gpu:
        return False
    learners = math.ceil(config.learners / torch.cuda.device_count())
    need = learners * algorithm_class(config).replay_bytes(config, spec)
    return 2 * need <= torch.cuda.mem_get_info(device)[0]


def _rows(config: ResolvedConfig) -> int:
    """Rows that a replay of transitions stores of each env."""
    envs, capacity = replay_size(config)
    return capacity // envs


def _needed(config: Config) -> int:
    """Rows of an env that it needs at a time."""
    return algorithm_class(config).unroll_length(config) + config.q.n_step + config.atari.stack


def _wider(config: Config) -> float:
    """By how much other machines' envs may delay the first samples: learners in lockstep must begin together."""
    lockstep = exchange_kind(config).in_lockstep and config.learners != 1
    return max(1.0, config.replay.envs / config.env.num_envs) if lockstep else 1.0


def value_refusals(
    rows: Callable[[ResolvedConfig], int] = _rows, needed: Callable[[Config], int] = _needed
) -> tuple[Refusal, ...]:
    """Refusals of all value methods. `rows`: rows that the replay stores per env, which must be more than `needed`."""
    return (
        Refusal(lambda c, s: bounded(s.action), "algorithm", f"{_DISCRETE}, vtrace or sac"),
        Refusal(lambda c, s: s.action.kind != "categorical", "algorithm", f"{_DISCRETE} or vtrace"),
        Refusal(lambda c, s: c.q.atoms > 0 and c.q.v_min >= c.q.v_max, "q.v_min", "must be below q.v_max"),
        Refusal(
            lambda c, s: c.q.atoms > 0 and c.replay.initial == "acting",
            "replay.initial",
            "must be highest with q.atoms, whose priorities are divergences of distributions",
        ),
        *replay_refusals(rows, needed),
    )


def replay_refusals(
    rows: Callable[[ResolvedConfig], int] = _rows, needed: Callable[[Config], int] = _needed
) -> tuple[Refusal, ...]:
    """Refusals of all algorithms with a replay."""
    return (
        Refusal(
            lambda c, s: c.reward.normalize,
            "reward.normalize",
            "must be False with a replay (dqn, r2d2, sac), which stores old rewards; use reward.clip or reward.scale",
        ),
        Refusal(
            lambda c, s: c.q.learn_start < algorithm_class(c).first_rows(c) * _wider(c),
            "q.learn_start",
            "must be at least 2 x env.num_envs x (algo.unroll_length + q.n_step), for r2d2 env.num_envs x "
            "(r2d2.burn_in + length + stride + algo.unroll_length): before that the replay cannot be sampled. With "
            "exchange allreduce, replay.envs counts in place of env.num_envs",
        ),
        Refusal(
            lambda c, s: rows(c) <= needed(c),
            "replay.capacity",
            "must be larger: each env of a learner needs more than algo.unroll_length + q.n_step + atari.stack rows, "
            "for r2d2 more than r2d2.burn_in + length + max(0, stride - 2 x algo.unroll_length), rounded down to whole "
            "rollouts",
        ),
        Refusal(
            lambda c, s: c.replay.initial == "acting" and not algorithm_class(c).value_based,
            "replay.initial",
            "must be highest with an algorithm that does not act by values",
        ),
        Refusal(lambda c, s: 0 < c.replay.envs < c.env.num_envs, "replay.envs", "must not be below env.num_envs"),
        Refusal(
            lambda c, s: exchange_kind(c).spans_machines and bool(exchange_kind(c).address(c)),
            "algorithm",
            "cannot be combined with allreduce between machines: the replay of a machine that joins is empty; "
            "use exchange gossip",
        ),
    )
