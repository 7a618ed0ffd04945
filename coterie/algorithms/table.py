"""All algorithms by name. A user's algorithm is added by `coterie.plugins`."""

from __future__ import annotations

from coterie.algorithms.base import Algorithm, AlgorithmBase
from coterie.choices import Choices
from coterie.config import Config
from coterie.plugins import named
from coterie.types import ConfigError

ALGORITHMS: Choices[type[AlgorithmBase]] = Choices(
    a2c="coterie.algorithms.a2c:A2C",
    ppo="coterie.algorithms.ppo:PPO",
    vtrace="coterie.algorithms.vtrace:VTrace",
    dqn="coterie.algorithms.dqn:DQN",
    r2d2="coterie.algorithms.r2d2:R2D2",
)
_METHODS = {name for name, method in vars(Algorithm).items() if callable(method) and name[0] != "_"}


def algorithm_class(config: Config) -> type[AlgorithmBase]:
    """The class of the run's algorithm: the user's, where `plugins.algorithm` names a subclass of the built-in one, or
    of `AlgorithmBase`.
    """
    built_in, path = ALGORITHMS[config.algorithm], config.plugins.algorithm
    found = named("plugins.algorithm", path) if path else None
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
