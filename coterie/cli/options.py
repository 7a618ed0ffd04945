"""A preset and its options, as they are typed, as a config."""

from __future__ import annotations

from pathlib import Path

from coterie.config import Config
from coterie.types import ConfigError


def config_of(args: list[str]) -> Config:
    """The preset for the env that was named, with every other option applied. Raises `ConfigError`."""
    from coterie import presets
    from coterie.runs.config_io import load_config, read_options, replace, validate

    if not args or args[0].startswith("-"):
        raise ConfigError(f"PRESET: give one of {', '.join(presets.PRESETS)}; see `coterie list presets`")
    name, options = args[0], read_options(args[1:])
    if name.endswith(".json"):  # another run's config.json
        return validate(replace(load_config(Path(name)), options))
    # The env decides which of the preset's settings apply.
    env = {field: value for field, value in options.items() if field.startswith(("env.", "atari."))}
    return validate(replace(presets.make(name, env.pop("env.id", None), **env), options))


def possible(config: Config) -> None:
    """Raise a one-line `ConfigError` if a run with this config would be refused."""
    from coterie.build.resources import resolve_config
    from coterie.build.validity import check
    from coterie.envs.make import make_spec

    resolved = resolve_config(config)
    check(resolved, make_spec(resolved.env, resolved.atari))
