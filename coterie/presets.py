"""Presets: functions named after the paper's system that return a `Config` for an environment.

A preset has one setting for each kind of environment (Atari-like images, continuous control, small vectors); every
field can be overridden: `ppo(env="Pong-v5", **{"optim.lr": 1e-3})`, or `--optim.lr 1e-3`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from coterie.config import PPO, Algo, Atari, Config, Env, Model, Optim, Reward, Schedule
from coterie.envs.make import make_spec
from coterie.runs.config_io import replace as override
from coterie.types import ConfigError, Spec

_LINEAR = Schedule("linear")


def _kind(spec: Spec) -> str:
    if any(s.is_image for s in spec.obs.values()):
        return "image"
    return "continuous" if spec.action.kind == "continuous" else "vector"


def _start(preset: str, env: str, overrides: dict[str, Any]) -> tuple[Config, str]:
    """The common beginning, and the kind of environment, which its own options may decide."""
    config = Config(preset=preset, env=Env(id=env), atari=Atari(episodic_life=True))
    own = {k: v for k, v in overrides.items() if k.startswith(("env.", "atari."))}
    config = override(config, own)
    return config, _kind(make_spec(config.env, config.atari))


def a2c(env: str = "Pong-v5", **overrides: Any) -> Config:
    """Synchronous A2C. Images: Accelerated Methods 4.3 (n = 5, RMSProp 7e-4 at 16 simulators times the root of their
    number, decay 0.9, eps 1e-6 inside the root, value coefficient 0.25), on 84x84 frames instead of 104x80.
    """
    config, kind = _start("a2c", env, overrides)
    config = replace(config, algorithm="a2c")
    if kind == "image":
        config = replace(
            config,
            steps=10_000_000,
            env=replace(config.env, num_envs=128, decorrelate=200),
            reward=Reward(clip="sign"),
            model=Model(torso="a3c"),
            algo=Algo(unroll_length=5, value_coef=0.25),
            optim=Optim("rmsprop_tf", lr=7e-4, alpha=0.9, eps=1e-6, sqrt_scaling_from=16),
        )
    else:
        config = replace(
            config,
            steps=1_000_000,
            reward=Reward(normalize=kind == "continuous"),
            model=Model(normalize_obs=True),
            algo=Algo(unroll_length=8, gae_lambda=0.95, entropy_coef=0.0 if kind == "continuous" else 0.01),
            optim=Optim("rmsprop", lr=2e-3, schedule=_LINEAR),
        )
    return override(config, overrides)


def ppo(env: str = "Pong-v5", **overrides: Any) -> Config:
    """PPO. Images: after Accelerated Methods 4.3 (4 epochs, clip 0.2, lambda 0.95, entropy 0.01), on 84x84 frames, with
    batches half as large (1024 in minibatches of 256) and Adam at 7e-4, which learn faster from few samples. Vectors
    and continuous control: our own settings.
    """
    config, kind = _start("ppo", env, overrides)
    config = replace(config, algorithm="ppo")
    if kind == "image":
        config = replace(
            config,
            steps=4_000_000,
            env=replace(config.env, num_envs=32, decorrelate=200),
            reward=Reward(clip="sign"),
            model=Model(torso="a3c"),
            algo=Algo(gae_lambda=0.95, normalize_advantage=True),
            ppo=PPO(epochs=4, minibatch_size=256, clip=0.2, batch_size=1024),
            optim=Optim("adam", lr=7e-4, eps=1e-5, schedule=_LINEAR),
        )
    elif kind == "continuous":
        config = replace(
            config,
            steps=1_000_000,
            env=replace(config.env, num_envs=16),
            reward=Reward(normalize=True),
            model=Model(normalize_obs=True),
            algo=Algo(128, gae_lambda=0.95, entropy_coef=0.0, normalize_advantage=True),
            ppo=PPO(epochs=10, minibatch_size=128),
            optim=Optim("adam", lr=3e-4, eps=1e-5, schedule=_LINEAR),
        )
    else:
        config = replace(
            config,
            steps=1_000_000,
            env=replace(config.env, num_envs=16),
            model=Model(normalize_obs=True),
            algo=Algo(128, gamma=0.999, gae_lambda=0.98, entropy_coef=0.01, normalize_advantage=True),
            ppo=PPO(epochs=4, minibatch_size=128),
            optim=Optim("adam", lr=1e-3, eps=1e-5, schedule=_LINEAR),
        )
    return override(config, overrides)


PRESETS: dict[str, Callable[..., Config]] = {"a2c": a2c, "ppo": ppo}


def make(name: str, env: str | None = None, **overrides: Any) -> Config:
    """The preset called `name` for `env`."""
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"preset: {name!r} is unknown; {hint}presets are {', '.join(PRESETS)}")
    return PRESETS[name](**({"env": env} if env else {}), **overrides)
