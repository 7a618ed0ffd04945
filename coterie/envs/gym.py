"""Makes gymnasium environments by id or `package.module:callable`, in the caller and in its workers alike."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Mapping
from typing import Any

import gymnasium
from gymnasium.wrappers import TimeLimit

from coterie.types import ConfigError

GymEnv = gymnasium.Env[Any, Any]


def make_gym(env_id: str, kwargs: Mapping[str, Any], max_episode_steps: int) -> GymEnv:
    """One environment; `max_episode_steps` > 0 truncates its episodes, 0 leaves them as they are."""
    if ":" not in env_id:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # gymnasium on older versions and on the precision of bounds
            return gymnasium.make(
                env_id, max_episode_steps=max_episode_steps or None, disable_env_checker=True, **kwargs
            )
    module, _, name = env_id.partition(":")
    try:
        target: Any = importlib.import_module(module)
        for part in name.split("."):
            target = getattr(target, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"env.id {env_id!r}: {error}") from error
    env: GymEnv = target(**kwargs)
    if not (hasattr(env, "observation_space") and hasattr(env, "action_space") and hasattr(env, "step")):
        raise ConfigError(f"env.id {env_id!r} returned {type(env).__name__}, which is no gymnasium environment")
    return TimeLimit(env, max_episode_steps) if max_episode_steps else env


def one_line(error: BaseException) -> str:
    """Type and message of an exception, on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
