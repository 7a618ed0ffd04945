"""Makes environments by gymnasium id, `dmlab/LEVEL` or `package.module:callable`, in the caller and in its workers."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import gymnasium
from gymnasium.wrappers import TimeLimit

from coterie.envs.dmlab import PREFIX, DMLab
from coterie.plugins import named
from coterie.types import ConfigError

GymEnv = gymnasium.Env[Any, Any]


def make_gym(env_id: str, kwargs: Mapping[str, Any], max_episode_steps: int) -> GymEnv:
    """One environment; `max_episode_steps` > 0 truncates its episodes, 0 leaves them as they are."""
    if env_id.startswith(PREFIX):
        return _limited(DMLab(env_id.removeprefix(PREFIX), **kwargs), max_episode_steps)
    if ":" not in env_id:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # gymnasium on older versions and on the precision of bounds
            return gymnasium.make(
                env_id, max_episode_steps=max_episode_steps or None, disable_env_checker=True, **kwargs
            )
    env: GymEnv = named("env.id", env_id)(**kwargs)
    if not (hasattr(env, "observation_space") and hasattr(env, "action_space") and hasattr(env, "step")):
        raise ConfigError(f"env.id {env_id!r} returned {type(env).__name__}, which is no gymnasium environment")
    return _limited(env, max_episode_steps)


def _limited(env: GymEnv, max_episode_steps: int) -> GymEnv:
    return TimeLimit(env, max_episode_steps) if max_episode_steps else env


def frames_per_step(env: GymEnv) -> int:
    """Emulator frames per env step: the env's own `action_repeat`; 1 where it has none."""
    found = getattr(env.unwrapped, "action_repeat", 1)
    return found if isinstance(found, int) and found > 0 else 1


def one_line(error: BaseException) -> str:
    """Type and message of an exception, on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
