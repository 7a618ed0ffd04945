"""Config to JSON and back, dotted overrides, and the command line's options.

Every error is a `ConfigError` of one line that names the field and what it accepts. No torch here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import json
import math
import numbers
import re
import sys
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from coterie.config import Config, Env, Range
from coterie.errors import ConfigError, json_object, reason_of
from coterie.plugins import FIELDS, GIVEN, PARTS, label
from coterie.runs.files import write_whole
from coterie.runs.objects import name_of
from coterie.runs.old_names import OLD, PEERS

_WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "a string", NoneType: "null"}
_BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
SETTINGS = "settings."  # before the name of a custom algorithm's setting
_ALIASES = {"env": "env.id", "token_file": "wire.token_file", "cert": "wire.cert", "key": "wire.key"}  # for a string


@functools.cache  # resolving the names of a module takes a millisecond
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls, include_extras=True)


def fields(cls: type = Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, type) of every field, with its range as `Annotated`."""
    for name, kind in _hints(cls).items():
        if dataclasses.is_dataclass(kind):
            yield from fields(cast(type, kind), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", kind


def plain(kind: Any) -> Any:
    """A field's type without its range."""
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


TYPES: dict[str, Any] = {name: plain(kind) for name, kind in fields()}
RANGES: dict[str, tuple[Range, ...]] = {name: getattr(kind, "__metadata__", ()) for name, kind in fields()}


def _nearest(name: str) -> str:
    inside = [f for f in TYPES if f.startswith(name + ".")]
    if inside:
        return f"; the fields of {name} are {', '.join(inside)}"
    tail = [f for f in TYPES if f.rsplit(".", 1)[-1] == name.rsplit(".", 1)[-1]]
    peers = PEERS.get(name.rsplit(".", 1)[-1])
    first = [peers, *tail] if peers and peers not in tail else tail
    found = (first + [f for f in difflib.get_close_matches(name, TYPES, 3, 0.6) if f not in first])[:3]
    are = "is" if len(found) == 1 else "are"
    return f"; the nearest {are} {', '.join(found)}" if found else "; `coterie train PRESET --help` lists them"


def _name(name: str) -> str:
    return name if name.isprintable() else repr(name)


def shown(value: Any) -> str:
    """A bad value, fit for a message of one line."""
    text = " ".join(repr(label(value) if isinstance(value, str) else value).split())
    return text if len(text) <= 60 else text[:57] + "..."


def _expected(kind: Any) -> str:
    """What a field takes, in words."""
    if get_origin(kind) is Literal:
        return f"{'one of ' * (len(get_args(kind)) > 1)}{', '.join(map(str, get_args(kind)))}"
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(_expected(k) for k in get_args(kind))
    if get_origin(kind) is tuple:
        return f"a list of {({int: 'integers', float: 'numbers', str: 'texts'})[get_args(kind)[0]]}"
    return _WORDS[kind]


def of_numpy(value: Any) -> Any:
    """A number or an array of NumPy as Python's; anything else as it is."""
    return value.tolist() if type(value).__module__ == "numpy" else value


def _coerce(name: str, kind: Any, value: Any) -> Any:
    """`value` as `kind`, or a ConfigError. A number that loses nothing may change its type: 1e6 is an integer."""
    if name == "env.num_envs" and value == "auto":
        return 0
    value = of_numpy(value)
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if get_origin(kind) in (Union, UnionType):
        for one in get_args(kind):
            with contextlib.suppress(ConfigError):
                return _coerce(name, one, value)
    if get_origin(kind) is Literal and isinstance(value, str) and value in get_args(kind):
        return value
    if kind == tuple[str, ...] and isinstance(value, str):
        value = [value]
    if get_origin(kind) is tuple and isinstance(value, list | tuple):
        return tuple(_coerce(name, get_args(kind)[0], v) for v in value)
    if kind is int and real and math.isfinite(value) and value == int(value):
        return int(value)
    if kind is float and (isinstance(value, float) or (real and abs(value) <= sys.float_info.max)):
        return float(value)
    if kind in (str, bool, NoneType) and type(value) is kind:
        return value
    if kind not in _WORDS and get_origin(kind) not in (Union, UnionType, Literal, tuple):
        return value  # a custom algorithm's setting, of a type that is no field's
    if name in FIELDS:
        return name_of(name, value)
    if kind is str and isinstance(value, Path):
        return str(value)
    hint = "; give objects to coterie.train(config, callbacks=...)" * (name == "callbacks")
    raise ConfigError(f"{name}: {shown(value)} is not {_expected(kind)}{hint}")


def to_dict(config: Config) -> dict[str, Any]:
    return dataclasses.asdict(config)


def from_dict(data: dict[str, Any]) -> Config:
    """A Config from `to_dict`'s JSON; missing fields keep their defaults. Raises `ConfigError`."""
    return cast(Config, _build(Config, data, ""))


def _build(cls: type, data: Any, prefix: str) -> Any:
    if not isinstance(data, dict):
        raise ConfigError(f"{prefix.rstrip('.') or 'config'}: {shown(data)} is not a table of settings")
    hints = _hints(cls)
    values = {}
    for name, value in data.items():
        dotted = prefix + name
        if name not in hints:
            if _is_old_default(dotted, value):
                continue
            raise ConfigError(f"{_name(dotted)}: no such field{_nearest(dotted)}")
        kind = plain(hints[name])
        values[name] = (
            _build(cast(type, kind), value, dotted + ".")
            if dataclasses.is_dataclass(kind)
            else _coerce(dotted, kind, value)
        )
    return cls(**values)


def _is_old_default(name: str, value: Any) -> bool:
    """Whether an unknown field is an option of an older version, or a section of such, at its default. Raises a
    `ConfigError` that names the new option where it has another value.
    """
    if isinstance(value, dict) and any(old.startswith(f"{name}.") for old in OLD):
        return all(_is_old_default(f"{name}.{field}", one) for field, one in value.items())
    if name not in OLD:
        return False
    default, reason = OLD[name]
    if default is not None and value != default:
        raise ConfigError(f"{name}: {reason}")
    return True


def save_config(path: Path, config: Config) -> None:
    write_whole(path, json.dumps(to_dict(config), indent=1) + "\n")


def load_config(path: Path) -> Config:
    """A run's config.json. Raises `ConfigError`."""
    try:
        return from_dict(json.loads(path.read_text()))
    except ConfigError as error:
        raise ConfigError(f"{error} (in {path})") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {reason_of(error)}") from None


def field_name(given: str, value: Any, dashes: str = "") -> str:
    """The dotted field, or section, that a name stands for, where it gets `value`. `env` with a string means `env.id`;
    `exchange` or `acting` with `package.module:callable` means `plugins.exchange` or `plugins.acting`. What is in
    `settings` is known to the custom algorithm only.
    """
    name = given.replace("-", "_")
    if name.startswith(SETTINGS):
        return name
    name = _ALIASES.get(name, name) if isinstance(value, str) else name
    name = f"plugins.{name}" if name in PARTS and isinstance(value, str) and ":" in value else name
    if name in OLD:
        raise ConfigError(f"{dashes}{_name(given)}: {OLD[name][1]}")
    if name not in TYPES and not (dataclasses.is_dataclass(value) and any(f.startswith(f"{name}.") for f in TYPES)):
        raise ConfigError(f"{dashes}{_name(given)}: no such {'option' if dashes else 'field'}{_nearest(name)}")
    return name


def replace(config: Config, overrides: dict[str, Any]) -> Config:
    """`config` with fields replaced, types checked: `{"env.id": "Pong-v5", "optim": Optim(), "learners": 2}`.
    `env` and custom parts may have their short names (`field_name`) and be objects (`name_of`). Raises `ConfigError`.
    """
    data = to_dict(config)
    for given, value in overrides.items():
        if given in GIVEN and not isinstance(value, Env):
            value = name_of(_ALIASES.get(given, given), value)
        *sections, last = (name := field_name(given, value)).split(".")
        if name.startswith(SETTINGS):
            own = json_object("settings", data["settings"]) | {name.removeprefix(SETTINGS): of_numpy(value)}
            data["settings"] = json.dumps(own)
            continue
        at = data
        for section in sections:
            at = at[section]
        at[last] = dataclasses.asdict(cast(Any, value)) if dataclasses.is_dataclass(value) else value
    return from_dict(data)


def read_options(args: list[str]) -> dict[str, Any]:
    """Command-line options by dotted field: `--a.b-c V`, `--a.b_c V`, `--a.b=V`, lists as `--a.b V W X`.

    A boolean needs no value; integers may be written 1e6; for short names see `field_name`. Raises `ConfigError`.
    """
    return {name: read(name, texts, "--") for name, texts in _options(args).items()}


def read(name: str, texts: list[str], dashes: str = "") -> Any:
    """The texts given for a field, as its type. Raises `ConfigError`."""
    if name.startswith(SETTINGS):
        own = [_json_value(text) for text in texts or ["true"]]  # of types that `typed_settings` knows
        return own[0] if len(own) == 1 else own
    kind = TYPES[name]
    listed = get_origin(kind) is tuple
    texts = texts or ["true"] * (kind is bool)
    if not listed and len(texts) != 1:
        wrong = f"takes one value, not {shown(' '.join(texts))}" if texts else "needs a value"
        raise ConfigError(f"{dashes}{name}: {wrong}; it takes {_expected(kind)}")
    words = texts
    if listed and get_args(kind)[0] is not str:  # 64 64, and as Python and TOML have it: [64, 64]
        words = re.sub(r"^\[(.*)\]$", r"\1", " ".join(texts)).replace(",", " ").split()
    try:
        values = tuple(_read(name, get_args(kind)[0] if listed else kind, word) for word in words)
    except ConfigError:
        raise ConfigError(f"{dashes}{name}: {shown(' '.join(texts))} is not {_expected(kind)}") from None
    return values if listed else values[0]


def _json_value(text: str) -> Any:
    with contextlib.suppress(ValueError):
        return json.loads(text)
    return text


def _read(name: str, kind: Any, given: Any) -> Any:
    """A text, or a value of JSON, as a field's kind. Raises `ConfigError`."""
    values = [given, text := str(given), *(x for word, x in _BOOLEANS.items() if word == text.lower()), [given]]
    with contextlib.suppress(ValueError):
        values.append(int(text) if re.fullmatch(r"[+-]?\d+", text) else float(text))
    for value in values:
        with contextlib.suppress(ConfigError):
            return _coerce(name, kind, value)
    raise ConfigError(f"{name}: {shown(given)} is not {_expected(kind)}")


def typed_settings(config: Config, cls: type) -> str:
    """`config.settings`, each as the type of its field in the dataclass `cls`. Raises `ConfigError`."""
    own, kinds = json_object("settings", config.settings), _hints(cls)
    for name in (k for k in own if k not in kinds):
        near = difflib.get_close_matches(name, kinds, 1)
        found = f"the nearest is {SETTINGS}{near[0]}" if near else f"there are {', '.join(kinds) or 'none'}"
        raise ConfigError(f"{SETTINGS}{name}: the algorithm has no such setting; {found}")
    return json.dumps({k: _read(SETTINGS + k, plain(kinds[k]), x) for k, x in own.items()})


def _options(args: list[str]) -> dict[str, list[str]]:
    """The values of each option by dotted field, names checked; a repeated option overrides earlier ones."""
    options: dict[str, list[str]] = {}
    values: list[str] | None = None
    for arg, after in zip(args, [*args[1:], ""], strict=False):
        if arg.startswith("--"):
            given, equals, value = arg[2:].partition("=")
            name = field_name(given, value if equals else after, "--")
            values = options[name] = [value] if equals else []
        elif values is None or (re.match(r"-[A-Za-z]", arg) and arg not in ("-inf", "-nan")):
            raise ConfigError(f"{shown(arg)} is not an option; options are --SECTION.FIELD VALUE, and envs --env ID")
        else:
            values.append(arg)
    return options


def get(config: Config, name: str) -> Any:
    """The value of a dotted field."""
    return attrgetter(name)(config)
