"""A preset and its options, as they are typed, as a config."""

from __future__ import annotations

from pathlib import Path

from coterie.config import Atari, Config
from coterie.types import ConfigError


def config_of(args: list[str]) -> Config:
    """The preset for the env that was named, with every other option applied. Raises `ConfigError`."""
    from coterie import presets
    from coterie.runs.config_io import cli_help, load_config, parse_cli, validate

    if args and args[0] in ("-h", "--help"):
        args = ["ppo", "--help"]
    if not args or args[0].startswith("-"):
        raise ConfigError(f"PRESET: give one of {', '.join(presets.PRESETS)}; see `coterie list presets`")
    name = args[0]
    if name.endswith(".json"):  # another run's config.json
        return validate(parse_cli(load_config(Path(name)), args[1:]))
    options = args[1:]
    # The env decides which of the preset's settings apply, so its own options are read first.
    early = parse_cli(Config(atari=Atari(episodic_life=True)), _only(options, ("--env", "--atari")))
    named = any(option.partition("=")[0] in ("--env", "--env.id") for option in options)
    sections = {"env": early.env, "atari": early.atari}
    own = {
        f"{section}.{key}": value
        for section, values in sections.items()
        for key, value in vars(values).items()
        if key != "id" and value != getattr(getattr(Config(atari=Atari(episodic_life=True)), section), key)
    }
    default = presets.make(name, early.env.id if named else None, **own)
    if "--help" in options or "-h" in options:
        print(cli_help(default))
        raise SystemExit(0)
    return validate(parse_cli(default, options))


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
    """Raise a one-line `ConfigError` where a run of it would be refused, by the machine, the env or the matrix."""
    from coterie.build.resources import resolve_config
    from coterie.build.validity import check
    from coterie.envs.make import make_spec

    resolved = resolve_config(config)
    check(resolved, make_spec(resolved.env, resolved.atari))
