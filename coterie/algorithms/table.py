"""All algorithms by name. A user's algorithm is added by `coterie.plugins`."""

from __future__ import annotations

from typing import Any

from coterie.algorithms.a2c import A2C
from coterie.algorithms.base import Algorithm, AlgorithmBase
from coterie.algorithms.dqn import DQN
from coterie.algorithms.ppo import PPO
from coterie.algorithms.q_base import QLearning
from coterie.algorithms.r2d2 import R2D2
from coterie.algorithms.vtrace import VTrace
from coterie.config import Config, ResolvedConfig
from coterie.plugins import named
from coterie.types import ConfigError, Spec

ALGORITHMS: dict[str, type[A2C] | type[QLearning[Any]]] = {
    "a2c": A2C,
    "ppo": PPO,
    "vtrace": VTrace,
    "dqn": DQN,
    "r2d2": R2D2,
}
_METHODS = {name for name, method in vars(Algorithm).items() if callable(method) and name[0] != "_"}


def algorithm_class(config: Config) -> type[AlgorithmBase]:
    """The class of the run's algorithm: the user's, where `plugins.algorithm` names a subclass of the built-in one, or
    of what all have in common.
    """
    built_in, path = ALGORITHMS[config.algorithm], config.plugins.algorithm
    found = named("plugins.algorithm", path) if path else built_in
    if not isinstance(found, type):
        return built_in
    if missing := _METHODS - {*dir(found)}:
        raise ConfigError(f"plugins.algorithm: {path} must define {', '.join(sorted(missing))}")
    if not issubclass(found, AlgorithmBase):
        return built_in
    if issubclass(found, tuple(ALGORITHMS.values())):
        return found if issubclass(found, built_in) else built_in
    if (found.on_policy, found.value_based) != (built_in.on_policy, built_in.value_based):
        raise ConfigError(
            f"plugins.algorithm: {path} must set on_policy = {built_in.on_policy} and value_based = "
            f"{built_in.value_based}, as {config.algorithm} does; or replace another algorithm"
        )
    return found


def is_value_based(config: Config) -> bool:
    """Whether the network outputs action values and the learner has a replay."""
    return algorithm_class(config).value_based


def unroll_length(config: Config) -> int:
    """Steps of each env in a rollout."""
    return algorithm_class(config).unroll_length(config)


def first_rows(config: Config) -> int:
    """Env steps of a learner after which it can train."""
    return algorithm_class(config).first_rows(config)


def replay_bytes(config: ResolvedConfig, spec: Spec) -> int:
    """Bytes of the full replay of all learners, in memory or on disk; 0 without a replay."""
    return algorithm_class(config).replay_bytes(config, spec) * config.learners
