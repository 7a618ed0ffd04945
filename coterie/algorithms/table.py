"""All algorithms by name. `package.module:Class` is the user's, a subclass of `AlgorithmBase` or of any of these."""

from __future__ import annotations

from typing import Any

from coterie.algorithms.base import Algorithm, AlgorithmBase
from coterie.choices import Choices, choose, register
from coterie.config import Config
from coterie.errors import ConfigError
from coterie.plugins import label, named

ALGORITHMS: Choices[type[AlgorithmBase]] = Choices(
    a2c="coterie.algorithms.a2c:A2C",
    ppo="coterie.algorithms.ppo:PPO",
    vtrace="coterie.algorithms.vtrace:VTrace",
    dqn="coterie.algorithms.dqn:DQN",
    r2d2="coterie.algorithms.r2d2:R2D2",
    sac="coterie.algorithms.sac:SAC",
    bc="coterie.algorithms.bc:BC",
)
_METHODS = {name for name, method in vars(Algorithm).items() if callable(method) and name[0] != "_"}


def register_algorithm(name: str, kind: type[AlgorithmBase]) -> None:
    """Add an algorithm: `--algorithm NAME`. `kind`: a subclass of `AlgorithmBase` with `act`, `batches` and `loss`.
    Raises `ConfigError` where it is something else, or the name is taken.
    """
    register(ALGORITHMS, "algorithm", name, _checked(name, kind), type)


def algorithm_class(config: Config) -> type[AlgorithmBase]:
    """The class of the run's algorithm. Raises `ConfigError` where it is not one."""
    if ":" not in config.algorithm:
        return choose(ALGORITHMS, "algorithm", config.algorithm, config)
    return _checked(label(config.algorithm), named("algorithm", config.algorithm))


def _checked(name: str, found: Any) -> type[AlgorithmBase]:
    if not (isinstance(found, type) and issubclass(found, AlgorithmBase)):
        raise ConfigError(f"algorithm: {name} is not a subclass of coterie.algorithms.base.AlgorithmBase")
    if missing := _METHODS - {*dir(found)}:
        raise ConfigError(f"algorithm: {name} must define {', '.join(sorted(missing))}")
    return found
