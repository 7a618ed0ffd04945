"""How presets are made: changes of the default config, by the kind of the environment."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace
from math import lcm
from typing import Any, Literal

from coterie.config import Atari, Config, Env, Model, Reward, RewardClip, Schedule
from coterie.envs.atari57 import game
from coterie.envs.gym import ALE
from coterie.envs.make import make_spec
from coterie.envs.pool import is_atari
from coterie.envs.tasks import tasks
from coterie.envs.vector import APART
from coterie.errors import ConfigError, one_line
from coterie.plugins import NameOrObject
from coterie.runs.config_io import of_numpy
from coterie.runs.config_io import replace as override
from coterie.runs.objects import name_of
from coterie.types import Spec

Family = Literal["images", "vectors", "continuous control"]
Changes = dict[str, Any]  # by dotted name; a whole section replaces all of its fields
_JSON = ("env.kwargs", "ray.runtime_env")  # texts that are JSON objects

LINEAR = Schedule("linear")
known_spec: ContextVar[Spec | None] = ContextVar("known_spec", default=None)  # in place of making the env
_KNOWN_IMAGES = rf"^(dmlab|pettingzoo/atari)/|\b{ALE}"  # Atari's games have names of their own, too
_CLASSIC = r"(LunarLander|CartPole|Acrobot|MountainCar)(Continuous)?-v\d"
_SMALLEST_IMAGE = 36  # pixels, what the presets' torsos need


def flat(overrides: Changes, prefix: str = "") -> Changes:
    """Overrides by dotted name: `{"optim": {"lr": 1e-3}}` becomes `{"optim.lr": 1e-3}`."""
    found: Changes = {}
    for name, value in overrides.items():
        dotted = prefix + name
        if not isinstance(value, dict):
            found[dotted] = value
        elif dotted in _JSON:
            try:
                found[dotted] = json.dumps(value, default=_of_numpy)
            except (TypeError, ValueError) as error:
                hint = "arguments of other types go into functools.partial(MyEnv, ...) as the env"
                raise ConfigError(f"{dotted}: {one_line(error)}; {hint}") from None
        else:
            found |= flat(value, f"{dotted}.")
    return found


def _of_numpy(value: Any) -> Any:
    if (found := of_numpy(value)) is value:
        raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")
    return found


def of_env(overrides: Changes) -> Changes:
    """The options that decide what the environment is."""
    return {k: v for k, v in overrides.items() if k.startswith(("env.", "atari."))}


def envs(env: NameOrObject, count: int) -> int:
    """`count` envs; for several tasks 0, which is auto: as many as can be shared out evenly."""
    return count if len(tasks(name_of("env.id", env))) == 1 else 0


def image_rewards(env: str, clip: RewardClip = "sign") -> Reward:
    """Clipped for Atari and DeepMind Lab, as in the papers; normalized for others, whose rewards have any size."""
    if is_classic(env):  # no images: it spares the import of EnvPool
        return Reward()
    known = all(re.search(_KNOWN_IMAGES, task) or game(task) or is_atari(task) for task in tasks(env))
    return Reward(clip) if known else Reward(normalize=True)


def is_classic(env: str) -> bool:
    """Whether an env of vectors is one whose rewards the presets know."""
    return all(re.fullmatch(_CLASSIC, task) for task in tasks(env))


def vector_rewards(env: str) -> Reward:
    """Times 0.01 for the classic envs, as in A3C with GAE; normalized for others, whose rewards have any size."""
    return Reward(scale=0.01) if is_classic(env) else Reward(normalize=True)


def family(spec: Spec) -> Family:
    """The kind of environment for which a preset has settings. What is too small for convolutions is a vector."""
    if any(s.is_image and sorted(s.shape)[1] >= _SMALLEST_IMAGE for s in spec.obs.values()):
        return "images"
    return "continuous control" if spec.action.kind == "continuous" else "vectors"


def make(
    preset: str, env: NameOrObject, overrides: Changes, common: Changes, *,
    image: Changes, vector: Changes, continuous: Changes,
) -> Config:  # fmt: skip
    """A preset for `env`: `common`, then `image`, or else `vector` (and `continuous` for continuous actions), then
    `overrides`. The options of the environment itself are applied first, since they decide its kind.
    """
    overrides = flat(overrides)
    if "env.id" in overrides:
        raise ConfigError("env.id: give the env as env=..., which decides the preset's settings")
    config = override(
        Config(preset=preset, env=Env(id=name_of("env.id", env)), atari=Atari(episodic_life=True)), of_env(overrides)
    )
    spec = known_spec.get() or make_spec(config.env, config.atari)
    config = replace(config, model=Model(normalize_obs=any(s.is_numeric for s in spec.obs.values())))
    changes = {"images": image, "vectors": vector, "continuous control": {**vector, **continuous}}[family(spec)]
    if config.env.backend not in APART:  # a simulator of all envs begins them together
        changes = {name: value for name, value in changes.items() if name != "env.decorrelate"}
    return whole_teams(override(override(config, {**common, **changes}), overrides), overrides)


def whole_teams(config: Config, overrides: Changes) -> Config:
    """The config with as many envs, and rollouts in a batch of actors, as make whole teams, where the preset and not
    the user gave their number.
    """
    if (agents := (known_spec.get() or make_spec(config.env, config.atari)).agents) == 1:
        return config
    envs, rollouts = config.env.num_envs, config.decoupled.batch_size
    whole = {
        "env.num_envs": envs + -envs % agents,
        "decoupled.batch_size": rollouts + -rollouts % lcm(agents, config.vtrace.minibatch or 1),
    }
    given = overrides.keys() | {"decoupled.batch_size"} if "decoupled" in overrides else overrides.keys()
    return override(config, {name: number for name, number in whole.items() if name not in given})


def derive(
    base: Callable[..., Config],
    preset: str,
    env: NameOrObject,
    overrides: Changes,
    common: Changes,
    image: Changes | None = None,
    vector: Changes | None = None,
) -> Config:
    """Another preset, changed: by `common`, then by `image` or else `vector`, then by `overrides`."""
    overrides = flat(overrides)
    config = base(env, **of_env(overrides))
    is_image = family(known_spec.get() or make_spec(config.env, config.atari)) == "images"
    changes = (image if is_image else vector) or {}
    return whole_teams(override(override(config, {"preset": preset, **common, **changes}), overrides), overrides)
