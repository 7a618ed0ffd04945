"""`coterie completion bash|zsh|fish`: a script that completes commands, presets, options and their values.

Everything in it is read from where it is defined: the commands' own parsers, the presets, the fields of the config.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NoReturn, get_args, get_origin

from coterie.types import ConfigError

_ASK = "\0"  # instead of a command's arguments
_CONFIGURED = {
    "train": True,
    "bench": True,
    "plan": True,
    "envs": False,
    "actor": False,
}  # whether a preset comes first


class _Described(Exception):
    """A command's parser, in place of what it would do."""


class Parser(argparse.ArgumentParser):
    """argparse whose complaints are one line and exit code 2, and that can be asked what a command takes."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}")

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        if args == [_ASK]:
            raise _Described(self)
        return super().parse_known_args(args, namespace)


def _takes(command: Callable[[list[str]], int]) -> list[argparse.ArgumentParser]:
    """The command's parser."""
    try:
        command([_ASK])
    except _Described as found:
        return [found.args[0]]
    return []


def _add_config(parser: argparse.ArgumentParser, with_preset: bool) -> None:
    from coterie.presets import PRESETS
    from coterie.runs.config_io import fields

    if with_preset:
        parser.add_argument("preset", choices=list(PRESETS))
    for name, kind in [("env", str), *fields()]:
        values = get_args(kind) if get_origin(kind) is Literal else ("True", "False") if kind is bool else None
        option = f"--{name.replace('_', '-')}"
        if option not in parser._option_string_actions:
            parser.add_argument(option, choices=values, metavar=name.rpartition(".")[2])


def completion(args: list[str], commands: Mapping[str, Callable[[list[str]], int]], told: str) -> int:
    """`told`: the command line's help, which has a line on each command."""
    import shtab

    own = Parser("coterie completion")
    own.add_argument("shell", choices=("bash", "zsh", "fish"))
    options = own.parse_args(args)
    said = dict(re.findall(r"^  coterie (\w+)\b.*?  +(\S.*)$", told, re.M))
    whole = argparse.ArgumentParser("coterie")
    several = whole.add_subparsers()
    for name, command in commands.items():
        parser = several.add_parser(
            name, help=said.get(name, f"coterie {name}"), parents=_takes(command), conflict_handler="resolve"
        )
        if name in _CONFIGURED:
            _add_config(parser, _CONFIGURED[name])
        for action in parser._actions:
            if action.dest in ("run", "runs", "folder", "out"):
                action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    print(shtab.complete(whole, options.shell))
    return 0
