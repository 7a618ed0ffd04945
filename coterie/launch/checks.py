"""What is refused, or said, before a run writes anything."""

from __future__ import annotations

from dataclasses import replace

from coterie.acting.table import acting_kind
from coterie.algorithms.table import algorithm_class
from coterie.build.resources import gpus_of, resolve_resources
from coterie.build.validity import check
from coterie.config import ResolvedConfig
from coterie.envs.make import make_spec
from coterie.envs.vector import APART
from coterie.errors import counted
from coterie.exchange.table import exchange_kind
from coterie.parallel.hardware import available_cores
from coterie.replay.storage import require_room
from coterie.runs.config_io import TYPES, get
from coterie.types import Spec
from coterie.wire.auth import check_free, check_pair, offset


def beyond_its_steps(config: ResolvedConfig) -> str:
    """A line where a new run ends before it trains, or after more env steps than it was given."""
    kind, first = algorithm_class(config), config.q.learn_start * config.learners
    if kind.has_replay and config.steps <= first:
        return f"q.learn_start: training begins after {first:,} env steps, and the run has {config.steps:,}"
    rows = kind.unroll_length(config) * acting_kind(config).batch_size(config) * config.learners
    if rows <= config.steps:
        return ""
    return f"steps: {config.steps:,} is less than one batch of rollouts: the run ends after about {rows:,}"


def crowded(config: ResolvedConfig) -> str:
    """A line where far more processes than cores are asked for."""
    cores, most = len(available_cores()), max(config.learners, config.actors)
    if gpus_of(config) or exchange_kind(config).shared_weights or most <= 4 * cores:
        return ""
    what = "learners" if config.learners == most else "actors"
    return f"{what}: {most} share {counted(cores, 'core')}: no faster than fewer, and each has its own memory"


def check_run(config: ResolvedConfig, spec: Spec) -> None:
    """Raise a `ConfigError` where the run is not possible here."""
    check(config, spec)
    if config.eval.every and config.eval.max_episode_steps and config.env.backend not in APART:  # which may not take it
        make_spec(replace(config.env, max_episode_steps=config.eval.max_episode_steps), config.atari)
    for rank in range(config.learners if config.wire.bind else 0):
        check_free(offset(config.wire.bind, rank), "wire.bind")
    if (field := f"{config.exchange}.bind") in TYPES and (address := get(config, field)):
        check_free(address, field)
    if config.wire.cert and config.wire.key:
        check_pair(config.wire.cert, config.wire.key)
    resolve_resources(config, spec)  # refuses a device, and measures bf16 once for all processes
    algorithm_class(config).check_data(config, spec)
    unroll = algorithm_class(config).unroll_length(config)
    rows = (unroll + 1) * config.env.num_envs * config.learners
    field = "ppo.batch_size" if config.ppo.batch_size and unroll != config.algo.unroll_length else "algo.unroll_length"
    require_room(field, rows * spec.obs_bytes, f"rollouts of {rows:,} observations")
    if need := algorithm_class(config).replay_bytes(config, spec) * config.learners:
        require_room("replay.capacity", need, f"{config.replay.capacity:,} env steps", config.replay.disk)
