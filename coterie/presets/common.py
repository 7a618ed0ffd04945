"""What presets are made of: the kind of an environment, and what all of its presets begin with."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import replace
from typing import Any

from coterie.config import Atari, Config, Env, Model, Schedule
from coterie.envs.make import make_spec
from coterie.envs.tasks import tasks
from coterie.runs.config_io import replace as override
from coterie.types import Spec

__all__ = ["LINEAR", "known_spec", "of_env", "override", "shared", "start"]

LINEAR = Schedule("linear")
known_spec: ContextVar[Spec | None] = ContextVar("known_spec", default=None)  # in place of making the env
_SMALLEST_IMAGE = 36  # pixels, what the presets' torsos need


def _kind(spec: Spec) -> str:
    # An image that no stack of convolutions fits is a vector of bytes.
    if any(s.is_image and sorted(s.shape)[1] >= _SMALLEST_IMAGE for s in spec.obs.values()):
        return "image"
    return "continuous" if spec.action.kind == "continuous" else "vector"


def of_env(overrides: dict[str, Any]) -> dict[str, Any]:
    """The options that decide what the environment is, which a preset must know first."""
    return {k: v for k, v in overrides.items() if k.startswith(("env.", "atari."))}


def shared(env: str, num_envs: int) -> int:
    """So many simulators; of several tasks as many as are shared out evenly (0, which is auto)."""
    return num_envs if len(tasks(env)) == 1 else 0


def start(preset: str, env: str, overrides: dict[str, Any]) -> tuple[Config, str]:
    """The common beginning, with the model of what is no image; and the kind of environment, which its own options may
    decide.
    """
    config = Config(preset=preset, env=Env(id=env), atari=Atari(episodic_life=True))
    own = of_env(overrides)
    config = override(config, own)
    spec = known_spec.get() or make_spec(config.env, config.atari)
    config = replace(config, model=Model(normalize_obs=any(s.is_numeric for s in spec.obs.values())))
    return config, _kind(spec)
