"""A preset, a config file and the options, as they are typed, as a config; and a config as such a file."""

from __future__ import annotations

import functools
import inspect
import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from coterie import config as config_module
from coterie.cli.arguments import Parser
from coterie.config import Config
from coterie.errors import ConfigError, reason_of
from coterie.extras import needs
from coterie.types import Spec

_FILES = (".json", ".toml", ".yaml", ".yml")
# A file with all of these is a whole config, such as a run's config.json. Any other is layered on a preset.
_WHOLE = {
    "algorithm", "acting", "exchange", "launch", "learners", "steps", "seed", "precision", "out",
    "env", "atari", "reward", "model", "algo", "optim", "eval", "log",
}  # fmt: skip


def words_of(args: list[str]) -> tuple[str, str, bool, dict[str, Any]]:
    """The preset or file that is named first, the file after --config, --trust, and the options by dotted field."""
    from coterie.runs.config_io import read_options

    parser = Parser("--config FILE", add_help=False, allow_abbrev=False)
    parser.add_argument("--config", default="")
    parser.add_argument("--trust", action="store_true")
    known, rest = parser.parse_known_args(args)
    name = rest.pop(0) if rest and not rest[0].startswith("-") else ""
    if name.endswith(_FILES) and not known.config:
        name, known.config = "", name
    return name, known.config, known.trust, read_options(rest)


def config_of(args: list[str], own: Mapping[str, Spec] = {}) -> Config:
    """A preset for the env that is named, or a config file, with the options applied. `own`: the specs of the
    presets' own envs, by preset, where they are known. Raises `ConfigError`.
    """
    from coterie import presets
    from coterie.runs.config_io import from_dict, replace
    from coterie.runs.trust import check_code
    from coterie.runs.validate import validate

    name, file, trust, options = words_of(args)
    preset, path, values = str(options.pop("preset", name)), Path(file), dict[str, Any]()
    if name not in ("", preset):
        raise ConfigError(f"--preset: {preset!r} is not {name!r}, which is named before the options")
    if file:
        mine, data = {**options, "preset": preset}, _read(path)
        given = str(data.pop("preset", ""))
        if data.keys() >= _WHOLE:
            if preset not in ("", given):
                raise ConfigError(f"preset: {path} has the whole config of {given!r}, not of {preset!r}")
            with _errors_in(path):
                config = from_dict({"preset": given, **data})
        else:
            values = _values(path, data)
            config = replace(Config(preset=given), values)
        asked = replace(replace(config, options), {"preset": preset or given})
        if not trust:
            check_code(path.parent, config, asked, mine, f"{path}", "give --trust, or name it again as options")
        if data.keys() >= _WHOLE:
            return validate(asked)
        preset = asked.preset
    if not preset:
        where = f"{path} names none: " if file else ""
        raise ConfigError(f"PRESET: {where}give one of {', '.join(presets.PRESETS)}; see `coterie list presets`")
    changes = {**values, **options}
    env = presets.common.of_env(changes)  # decides which of the preset's settings apply
    spec = None if env else own.get(preset)
    return validate(replace(presets.make(preset, env.pop("env.id", ""), spec, **env), changes))


@contextmanager
def _errors_in(path: Path) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{error} (in {path})") from None


def _read(path: Path) -> dict[str, Any]:
    if path.suffix not in _FILES:
        raise ConfigError(f"--config: {path} does not end in {', '.join(_FILES)}")
    try:
        data = {".json": json.loads, ".toml": tomllib.loads}.get(path.suffix, _yaml)(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {reason_of(error)}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"config: {path} is not a table of settings")
    if (key := next(_other_keys(data), None)) is not None:
        raise ConfigError(f"{path}: the key {key!r} is not text: quote it")
    return data


def _other_keys(data: dict[Any, Any]) -> Iterator[Any]:
    """Keys that are not text, which YAML allows."""
    for key, value in data.items():
        if not isinstance(key, str):
            yield key
        elif isinstance(value, dict):
            yield from _other_keys(value)


def _yaml(text: str) -> Any:
    with needs("a YAML file", "yaml"):
        import yaml  # type: ignore[import-untyped]
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def _values(path: Path, data: dict[str, Any]) -> dict[str, Any]:
    """A file's values by dotted field."""
    from coterie.presets.common import flat
    from coterie.runs.config_io import field_name, read, replace

    with _errors_in(path):
        found = {field_name(name, value): value for name, value in flat(data).items()}
        for name, value in found.items():
            if isinstance(value, str | list):  # 1e-3 is a string in YAML
                found[name] = read(name, [value] if isinstance(value, str) else [str(one) for one in value])
        replace(Config(), found)  # refuses values of other types
    return found


@functools.cache
def comments() -> dict[str, str]:
    """The comment beside each field in config.py, by dotted name."""
    from coterie.runs.config_io import fields, get

    classes = re.findall(r"^class (\w+).*?$(.*?)(?=^\S|\Z)", inspect.getsource(config_module), re.M | re.S)
    beside = {name: dict(re.findall(r"^    (\w+): .*?  # (.+)$", body, re.M)) for name, body in classes}
    found = dict[str, str]()
    for name, _ in fields():
        section, _, field = name.rpartition(".")
        owner = get(Config(), section) if section else Config()
        found[name] = beside[type(owner).__name__].get(field, "")
    return found


def as_toml(data: dict[str, Any], section: str = "") -> Iterator[str]:
    """The lines of a TOML file, with the help of each field; `data`: a config's `to_dict`."""
    plain = {field: value for field, value in data.items() if not isinstance(value, dict)}
    if section:
        yield f"\n[{section[:-1]}]"
    for field, value in plain.items():
        yield f"{field} = {json.dumps(value, ensure_ascii=False)}  # {comments()[section + field]}"
    for field in (field for field in data if field not in plain):
        yield from as_toml(data[field], f"{section}{field}.")


def possible(config: Config) -> None:
    """Raise a one-line `ConfigError` if a run with this config would be refused."""
    from coterie.build.resources import check_device, resolve_config
    from coterie.build.validity import check
    from coterie.envs.make import make_spec

    check_device(config)
    resolved = resolve_config(config)
    check(resolved, make_spec(resolved.env, resolved.atari))
