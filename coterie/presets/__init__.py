"""Presets: functions named after the paper's system that return a `Config` for an environment.

A preset has one setting for each kind of environment (Atari-like images, continuous control, small vectors); every
field can be overridden: `ppo(env="Pong-v5", optim={"lr": 1e-3}, **{"algo.gamma": 0.98})`, or `--optim.lr 1e-3`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from coterie.choices import unknown
from coterie.config import Config
from coterie.errors import ConfigError
from coterie.plugins import NameOrObject, call, label, named
from coterie.presets.actor_critic import a2c, a3c, a3c_paper, a3c_store, appo, bc, gala_a2c, gala_ppo, ppo, ppo_paper
from coterie.presets.common import Family, known_spec
from coterie.presets.value import apex_dqn, c51, c51_2048, dqn, dqn_512, dqn_async, rainbow, rainbow_512, sac, seed_r2d2
from coterie.presets.vtrace import impala, impala_deep, impala_paper, seed_football, seed_vtrace
from coterie.runs.objects import name_of
from coterie.types import Spec

__all__ = [  # noqa: RUF022 - in the order of `PRESETS`, of messages and of pages
    "a2c", "ppo", "ppo_paper", "a3c", "a3c_paper", "a3c_store", "impala", "impala_paper", "impala_deep",
    "seed_vtrace", "seed_football", "appo", "gala_a2c", "gala_ppo", "dqn", "dqn_512", "dqn_async", "c51", "c51_2048",
    "rainbow", "rainbow_512", "apex_dqn", "seed_r2d2", "sac", "bc", "make",
]  # fmt: skip

PRESETS: dict[str, Callable[..., Config]] = {n.replace("_", "-"): globals()[n] for n in __all__ if n != "make"}

# The presets that were seen to learn an environment of each family, with their defaults but for the budget
# (docs/results/league.md), and those that are one of them without images.
SHOWN: dict[Family, tuple[str, ...]] = {
    "images": ("ppo", "ppo-paper", "appo", "gala-ppo"),
    "vectors": ("a2c", "ppo", "a3c", "impala", "seed-vtrace", "gala-ppo", "dqn", "rainbow", "seed-r2d2"),
    "continuous control": ("ppo", "impala", "gala-ppo", "sac"),
}
_SAME = {"ppo-paper": "ppo", "impala-paper": "impala", "impala-deep": "impala", "seed-football": "seed-vtrace"}


def is_shown(preset: str, family: Family) -> bool:
    """Whether `preset` was seen to learn an environment of that family. What bc learns is in its data."""
    return preset == "bc" or (preset if family == "images" else _SAME.get(preset, preset)) in SHOWN[family]


if not TYPE_CHECKING:  # which would take any name for one of ours

    def __getattr__(name: str) -> Any:
        raise AttributeError(f"coterie.presets has no {name!r}; presets are {', '.join(__all__[:-1])}")


def make(name: NameOrObject, env: NameOrObject = "", spec: Spec | None = None, **overrides: Any) -> Config:
    """The preset called `name`, or the user's `package.module:function`, or the function itself, for `env`. `spec`: the
    env's, if known; otherwise the env is made to find its spaces.
    """
    name = next((known for known, preset in PRESETS.items() if preset is name), None) or name_of("preset", name)
    preset = partial(call, "preset", name) if ":" in name else PRESETS.get(name)
    if preset is None:
        raise unknown("preset", name, PRESETS, f"presets are {', '.join(PRESETS)}, or package.module:function")
    if "env.id" in overrides:
        if env != "":
            raise ConfigError("env.id: the env is given twice, as env, too")
        env = overrides.pop("env.id")
    if ":" in name and isinstance(named("preset", name), type):
        raise ConfigError(f"preset: {name} is a class, not a function that returns a Config; or --algorithm {name}?")
    before = known_spec.set(spec)
    try:
        config = preset(**({"env": env} if env != "" else {}), **overrides)
        if not isinstance(config, Config):
            raise ConfigError(f"preset: {name} returns {type(config).__name__}, not a Config")
        return replace(config, preset=label(name))
    finally:
        known_spec.reset(before)
