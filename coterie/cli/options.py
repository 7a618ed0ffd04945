"""A preset and its options, as they are typed, as a config."""

from __future__ import annotations

from pathlib import Path

from coterie.config import Atari, Config
from coterie.types import ConfigError

_BARE = Config(atari=Atari(episodic_life=True))  # what presets begin with


def config_of(args: list[str]) -> Config:
    """The preset for the env that was named, with every other option applied. Raises `ConfigError`."""
    from coterie import presets
    from coterie.runs.config_io import fields, get, load_config, parse_cli, validate

    if not args or args[0].startswith("-"):
        raise ConfigError(f"PRESET: give one of {', '.join(presets.PRESETS)}; see `coterie list presets`")
    name, options = args[0], args[1:]
    if name.endswith(".json"):  # another run's config.json
        return validate(parse_cli(load_config(Path(name)), options))
    # The env decides which of the preset's settings apply, so its own options are read first.
    early = parse_cli(_BARE, _only(options, ("--env", "--atari")))
    changed = {
        field: get(early, field)
        for field, _ in fields()
        if field.startswith(("env.", "atari.")) and field != "env.id" and get(early, field) != get(_BARE, field)
    }
    return validate(parse_cli(presets.make(name, early.env.id if names_env(options) else None, **changed), options))


def names_env(options: list[str]) -> bool:
    return any(option.partition("=")[0] in ("--env", "--env.id") for option in options)


def _only(options: list[str], sections: tuple[str, ...]) -> list[str]:
    """The options of some sections, each with the values that follow it."""
    kept, take = [], False
    for option in options:
        if option.startswith("--"):
            take = option.partition("=")[0].partition(".")[0] in sections
        if take:
            kept.append(option)
    return kept


def possible(config: Config) -> None:
    """Raise a one-line `ConfigError` if a run with this config would be refused."""
    from coterie.build.resources import resolve_config
    from coterie.build.validity import check
    from coterie.envs.make import make_spec

    resolved = resolve_config(config)
    check(resolved, make_spec(resolved.env, resolved.atari))
