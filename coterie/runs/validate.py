"""The check of a config's values. Every error is a `ConfigError` of one line that names the field."""

from __future__ import annotations

import math

from coterie.config import Config, Schedule
from coterie.errors import ConfigError, json_object
from coterie.runs.config_io import RANGES, TYPES, from_dict, get, shown, to_dict


def validate(config: Config) -> Config:
    """`config` with every field converted to its type and checked. Raises `ConfigError`."""
    config = from_dict(to_dict(config))
    for name in TYPES:
        value = get(config, name)
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{name}: {value} is not a finite number")
        for limit in RANGES[name]:
            if not limit.accepts(value):
                raise ConfigError(f"{name}: {shown(value)} {limit.text}")
    if config.env.groups == 2 and config.env.num_envs % 2:
        raise ConfigError(f"env.num_envs: {config.env.num_envs} must be even where env.groups is 2")
    for name in ("algo.entropy_schedule", "ppo.clip_schedule", "optim.schedule"):
        _check_schedule(name, get(config, name))
    for name in ("env.kwargs", "settings"):
        json_object(name, get(config, name))
    return config


def _check_schedule(name: str, schedule: Schedule) -> None:
    at, factors = list(schedule.at), list(schedule.factors)
    if len(at) != len(factors):
        raise ConfigError(
            f"{name}.at: has {len(at)} entries, {name}.factors {len(factors)}; they must have the same length"
        )
    if at != sorted(set(at)) or any(step < 0 for step in at):
        raise ConfigError(f"{name}.at: {shown(at)} must be increasing env steps")
    if not all(math.isfinite(x) and x >= 0 for x in factors):
        raise ConfigError(f"{name}.factors: {shown(factors)} must be finite and not negative")
    if schedule.by == "episodes" and name != "algo.entropy_schedule":
        raise ConfigError(f"{name}.by: only algo.entropy_schedule can go by episodes")
    if (schedule.kind == "steps") != bool(at):
        if not at:
            raise ConfigError(f"{name}.kind: steps requires {name}.at and {name}.factors")
        hint = f"--{name}.at and --{name}.factors without values remove them".replace("_", "-")
        raise ConfigError(f"{name}.kind: {schedule.kind} takes no {name}.at or {name}.factors; {hint}")
