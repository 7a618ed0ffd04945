"""Config to JSON and back, dotted overrides, the command line's options, and the check of every value.

Whatever is wrong becomes a `ConfigError` of one line that names the field and what it may be. No torch here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

from coterie.config import Config, Schedule
from coterie.types import ConfigError, CoterieError


def fields(cls: type = Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, type) of every field."""
    for name, kind in get_type_hints(cls).items():
        if dataclasses.is_dataclass(kind):
            yield from fields(cast(type, kind), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", kind


_TYPES: dict[str, Any] = dict(fields())


def _nearest(name: str) -> str:
    near = difflib.get_close_matches(name, _TYPES, 3, 0.5)
    tail = [f for f in _TYPES if f.rsplit(".", 1)[-1] == name.rsplit(".", 1)[-1]]
    found = list(dict.fromkeys([*tail, *near]))[:3]
    return f"; the nearest are {', '.join(found)}" if found else "; `coterie train PRESET --help` lists them"


def _coerce(name: str, kind: Any, value: Any) -> Any:
    """`value` as `kind`, or a ConfigError."""
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise ConfigError(f"{name}: {value!r} is not one of {', '.join(map(str, get_args(kind)))}")
        return value
    if get_origin(kind) is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{name}: {value!r} is not a list")
        return tuple(_coerce(name, get_args(kind)[0], v) for v in value)
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if type(value) is not kind:
        raise ConfigError(f"{name}: {value!r} is not of type {kind.__name__}")
    return value


def to_dict(config: Config) -> dict[str, Any]:
    return dataclasses.asdict(config)


def from_dict(data: dict[str, Any]) -> Config:
    """A Config from `to_dict`'s JSON; missing fields keep their defaults."""
    return cast(Config, _build(Config, data, ""))


def _build(cls: type, data: Any, prefix: str) -> Any:
    if not isinstance(data, dict):
        raise ConfigError(f"{prefix.rstrip('.') or 'config'}: {data!r} is not an object")
    hints = get_type_hints(cls)
    values = {}
    for name, value in data.items():
        if name not in hints:
            raise ConfigError(f"{prefix}{name}: no such field{_nearest(prefix + name)}")
        kind = hints[name]
        dotted = prefix + name
        values[name] = (
            _build(cast(type, kind), value, dotted + ".")
            if dataclasses.is_dataclass(kind)
            else _coerce(dotted, kind, value)
        )
    return cls(**values)


def save_config(path: Path, config: Config) -> None:
    path.write_text(json.dumps(to_dict(config), indent=1) + "\n")


def load_config(path: Path) -> Config:
    try:
        return from_dict(json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise CoterieError(f"{path}: cannot be read: {' '.join(str(error).split())}") from None


def replace(config: Config, overrides: dict[str, Any]) -> Config:
    """`config` with dotted fields replaced: `{"env.id": "Pong-v5", "learners": 2}`. `env` alone means `env.id`."""
    data = to_dict(config)
    for given, value in overrides.items():
        name = "env.id" if given == "env" and isinstance(value, str) else given.replace("-", "_")
        if name not in _TYPES:
            if name in data and dataclasses.is_dataclass(value) and not isinstance(value, type):
                data[name] = dataclasses.asdict(value)  # a whole section
                continue
            raise ConfigError(f"{given}: no such field{_nearest(name)}")
        *sections, last = name.split(".")
        at = data
        for section in sections:
            at = at[section]
        at[last] = value
    return from_dict(data)


def parse_cli(default: Config, args: list[str]) -> Config:
    """Apply command-line options (`--a.b-c V`, `--a.b_c V`, `--a.b=V`; booleans take True or False) to `default`."""
    import tyro

    args = [re.sub(r"^--env(?==|$)", "--env.id", arg) for arg in args]
    for arg in args:
        if arg.startswith("--"):
            name = arg[2:].partition("=")[0].replace("-", "_")
            if name not in _TYPES:
                raise ConfigError(f"--{arg[2:].partition('=')[0]}: no such option{_nearest(name)}")
    caught = io.StringIO()
    try:
        with contextlib.redirect_stderr(caught), contextlib.redirect_stdout(caught):
            return tyro.cli(Config, default=default, args=args, config=(tyro.conf.FlagConversionOff,))
    except SystemExit:
        raise ConfigError(_condense(caught.getvalue())) from None


def _condense(box: str) -> str:
    """The first paragraph of tyro's framed complaint, on one line."""
    text: list[str] = []
    for row in box.splitlines()[1:]:  # the first is the frame's title
        inner = row.strip("│╭╰╮╯ ")
        if re.match(r"[─-]{3}", inner):
            if text:
                break
        elif inner:
            text.append(inner)
    line = " ".join(text)
    found = re.search(r"--[\w.-]+", line)
    name = found.group(0) if found else ""
    if match := re.match(r"invalid choice (.+?) for argument .*Expected one of \((.*)\)", line):
        return f"{name}: {match[1]} is not one of {match[2].replace(chr(39), '').rstrip(',')}"
    if match := re.match(r"Error parsing (--[\w.-]+)[^:]*: (.*)", line):
        kind = _TYPES.get(match[1][2:].replace("-", "_"))
        value = re.search(r"'[^']*'", match[2])
        shown = value.group(0) if value else match[2]
        return f"{match[1]}: {shown} is not of type {kind.__name__ if isinstance(kind, type) else kind}"
    if line.startswith("Missing value"):
        return f"{name}: needs a value"
    if line.startswith("Unrecognized options"):
        return f"{line.partition(': ')[2]}: is not an option; options start with --"
    return line or "bad usage"


def cli_help(default: Config) -> str:
    """Every option with its type, default and comment."""
    import tyro

    caught = io.StringIO()
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(caught):
        tyro.cli(
            Config,
            default=default,
            args=["--help"],
            prog=f"coterie train {default.preset or 'PRESET'}",
            config=(tyro.conf.FlagConversionOff,),
        )
    return caught.getvalue()


# What a number must be: (fields, predicate, what it says).
_RULES: tuple[tuple[str, Any, str], ...] = (
    (
        "learners env.num_envs algo.unroll_length steps ppo.epochs ppo.minibatch_size atari.frame_skip atari.height "
        "atari.width atari.stack model.core_size eval.episodes eval.max_steps log.keep",
        lambda x: x >= 1,
        "must be at least 1",
    ),
    (
        "seed env.threads env.max_episode_steps env.reserve env.decorrelate env.replace_budget atari.noop_max "
        "algo.poll ppo.clip_value ppo.target_kl ppo.batch_size optim.max_grad_norm optim.sqrt_scaling_from "
        "optim.chunk eval.every eval.max_episode_steps torch_threads algo.value_coef algo.entropy_coef "
        "log.checkpoint_every log.every",
        lambda x: x >= 0,
        "must not be negative",
    ),
    (
        "atari.sticky_actions algo.gamma algo.gae_lambda",
        lambda x: 0 <= x <= 1,
        "must be between 0 and 1",
    ),
    ("optim.alpha optim.beta1 optim.beta2", lambda x: 0 <= x < 1, "must be at least 0 and below 1"),
    ("optim.lr optim.eps ppo.clip env.timeout reward.scale", lambda x: x > 0, "must be above 0"),
    ("env.groups", lambda x: x in (0, 1, 2), "must be 0 (auto), 1 or 2"),
    ("model.hidden", lambda x: all(n >= 1 for n in x), "sizes must be at least 1"),
)


def get(config: Config, name: str) -> Any:
    """The value of a dotted field."""
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def validate(config: Config) -> None:
    """Refuse values that cannot work."""
    for name, kind in _TYPES.items():
        value = get(config, name)
        if kind is float and not math.isfinite(value):
            raise ConfigError(f"{name}: {value} is not a finite number")
    for names, holds, text in _RULES:
        for name in names.split():
            if not holds(get(config, name)):
                raise ConfigError(f"{name}: {get(config, name)} {text}")
    for name in ("algo.entropy_schedule", "ppo.clip_schedule", "optim.schedule"):
        _check_schedule(name, get(config, name))
    try:
        kwargs = json.loads(config.env.kwargs)
    except ValueError:
        kwargs = None
    if not isinstance(kwargs, dict):
        raise ConfigError(f"env.kwargs: {config.env.kwargs!r} is not a JSON object")


def _check_schedule(name: str, schedule: Schedule) -> None:
    if len(schedule.at) != len(schedule.factors):
        raise ConfigError(f"{name}.at: needs as many entries as {name}.factors")
    if list(schedule.at) != sorted(set(schedule.at)):
        raise ConfigError(f"{name}.at: {list(schedule.at)} is not increasing")
    if schedule.kind == "steps" and not schedule.at:
        raise ConfigError(f"{name}.at: a schedule of steps needs at least one")
    if schedule.warmup < 0:
        raise ConfigError(f"{name}.warmup: {schedule.warmup} must not be negative")
