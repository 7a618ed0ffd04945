"""The config's options in `coterie train PRESET --help` and in completion scripts."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Literal, get_args, get_origin

from coterie import presets
from coterie.choices import SECTIONS, uses
from coterie.cli.arguments import COMMANDS, OF_PRESET, Parser, tree
from coterie.cli.listing import presets as described
from coterie.cli.options import comments, config_of, words_of
from coterie.config import Config
from coterie.plugins import named
from coterie.types import ActionSpec, ObsSpec, Spec

# What the presets' own envs give and take. Help does not wait for EnvPool to say so.
_IMAGE = Spec("Pong-v5", {"": ObsSpec((4, 84, 84), "uint8")}, ActionSpec("categorical", (6,)))
_LANDER = Spec("LunarLander-v3", {"": ObsSpec((8,), "float32")}, ActionSpec("categorical", (4,)))
_HOPPER = Spec("Hopper-v5", {"": ObsSpec((11,), "float32")}, ActionSpec("continuous", (), (-1.0,) * 3, (1.0,) * 3))
OWN_ENVS = dict.fromkeys(presets.PRESETS, _IMAGE) | {
    "a3c": _LANDER,
    "a3c-paper": _LANDER,
    "sac": _HOPPER,
    "bc": _HOPPER,
}
_KINDS = {int: "N", float: "X", str: "TEXT"}
_PRESETS = """
A preset is needed, and `coterie train PRESET --help` lists its options and their defaults:

{presets}

In its place, FILE.toml, FILE.yaml or FILE.json: the name of a preset as `preset`, and the fields to change.
"""


def settings_help(name: str, words: list[str]) -> str:
    """The help of a command that takes the config's options. `train PRESET` lists them, with the preset's defaults."""
    parser = tree()[1][name]
    if name != "train":
        _add_config(name, parser)
        return parser.format_help()
    at = next(k for k, word in enumerate(words) if word in ("-h", "--help"))
    everything = words[at + 1 : at + 2] == ["all"]
    _, rest = parser.parse_known_args(words[:at] + words[at + 1 + everything :])
    _add_config(name, parser)  # not before: a file decides the defaults that are shown
    if not rest:
        lines = [f"  {preset:12} {about}" for rows in described().values() for preset, about in rows]
        return parser.format_help() + _PRESETS.format(presets="\n".join(lines))
    config = config_of(rest, OWN_ENVS)
    hidden = [] if everything else [section for section in SECTIONS if not uses(section, config)]
    parser.epilog = f"Defaults are those of {config.preset} for {config.env.id}; --env ID shows those for another env."
    if hidden:
        parser.epilog += f" Not used by this run: {', '.join(hidden)}; `--help all` lists them, too."
    if ":" in config.algorithm and (own := named("algorithm", config.algorithm).Settings):
        listed = ", ".join(map(str, inspect.signature(own, eval_str=True).parameters.values()))
        parser.epilog += f" Each of the algorithm's own is --settings.NAME: {listed}."
    _add_settings(parser, config, hidden, {})
    return parser.format_help()


def full_tree() -> tuple[Parser, dict[str, Parser]]:
    """`tree` with the names of the presets and the config's options, for completion."""
    from coterie.acting.table import ACTING
    from coterie.exchange.table import EXCHANGES

    root, parsers = tree()
    for name, command in COMMANDS.items():
        _add_config(name, parsers[name])
        if command.settings == "preset":
            parsers[name].add_argument("preset", choices=list(presets.PRESETS), help="see `coterie list presets`")
        if command.settings:
            choices = {"acting": tuple(ACTING), "exchange": ("auto", *EXCHANGES)}
            _add_settings(parsers[name], Config(), [], choices)
    return root, parsers


def _add_config(name: str, parser: Parser) -> None:
    if COMMANDS[name].settings == "preset":
        for names, about in OF_PRESET:
            parser.add_argument(*names, **about)


def warned(args: list[str], config: Config, show: Callable[[Callable[[], None]], None] = lambda say: say()) -> Config:
    """`config`, which `args` give, after a line for what a user may not expect of it. `show` calls what prints it."""
    _, file, _, options = words_of(args)
    if config.preset and not file and "env.id" not in options and "env" not in options:
        show(partial(print, f"coterie: no --env is given: {config.preset} takes {config.env.id}", file=sys.stderr))
    for line in _surprises(options, config):
        show(partial(print, f"coterie: {line}", file=sys.stderr))
    return config


def _surprises(options: Iterable[str], config: Config) -> Iterator[str]:
    """A line if the preset needs more env steps than a small machine makes, or was not seen to learn such an env, and
    one for each of these fields that the run does not use.
    """
    from coterie.build.unused import unused
    from coterie.envs.make import make_spec
    from coterie.presets.common import family

    spec = make_spec(config.env, config.atari)
    if config.preset in presets.PRESETS:
        millions, kind = presets.make(config.preset, config.env.id, spec).steps // 1_000_000, family(spec)
        about = [f"is set up for {millions:,} million env steps or more"] if millions >= 10 else []
        if not presets.is_shown(config.preset, kind):
            what = "continuous control (such as MuJoCo's)" if kind == "continuous control" else f"from {kind}"
            about.append(f"has not been shown to learn {what} with its defaults")
        if about:
            yield f"{config.preset} {' and '.join(about)}; try ppo first"
    for name, needs in unused(options, config, spec):
        yield f"--{name.replace('_', '-')} has no effect in this run: it needs {needs}"


def _add_settings(parser: Parser, config: Config, hidden: list[str], choices: dict[str, Any]) -> None:
    """Add the options of a config but for `hidden` sections. `choices`: of fields that are texts."""
    from coterie.runs.config_io import fields, get, plain

    groups = {"": parser.add_argument_group("the run")}
    for name, annotated in fields():
        kind, section = plain(annotated), name.rpartition(".")[0]
        if section.partition(".")[0] in hidden:
            continue
        if section not in groups:
            groups[section] = parser.add_argument_group(section, get(config, section).__doc__)
        names = ["--env", "--env.id"] if name == "env.id" else [f"--{name.replace('_', '-')}"]
        if names[0] in parser._option_string_actions:  # the command has an option of that name
            continue
        values = choices.get(name) or (get_args(kind) if get_origin(kind) is Literal else None)
        values = ("true", "false") if kind is bool else values
        listed = f"{_KINDS[get_args(kind)[0]]} ..." if get_origin(kind) is tuple else ""
        auto = "X|auto" if float in get_args(kind) else "N|auto"
        shown = "|".join(values) if values else listed or _KINDS.get(kind, auto)
        groups[section].add_argument(*names, choices=values, metavar=shown, help=_text(name, get(config, name)))


def _text(name: str, default: Any) -> str:
    shown = " ".join(map(str, default)) if isinstance(default, tuple) else str(default)
    shown = shown.lower() if isinstance(default, bool) else shown
    return (comments()[name] + (f" [{shown}]" if shown else "")).replace("%", "%%")
