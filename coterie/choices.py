"""Tables of algorithms, acting modes and exchanges by name. Modules in `plugins.modules` register new ones."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pkgutil import resolve_name
from typing import TypeVar

from coterie.config import Config
from coterie.errors import ConfigError
from coterie.plugins import importing, label, prepare_import

T = TypeVar("T")
C = TypeVar("C", bound=Config)
# The algorithms, acting modes, exchanges and launches that a section is about. Other sections are about every run.
_ALGORITHMS = ("ppo", "vtrace", "r2d2", "sac", "bc")
_NAMESAKES = (*_ALGORITHMS, "decoupled", "central", "ray", "hogwild", "store", "allreduce", "gossip")
_VALUE = {"dqn", "r2d2", "sac"}
SECTIONS = {
    **{name: {name} for name in _NAMESAKES}, "q": _VALUE, "replay": _VALUE,
    "wire": {"decoupled", "central", "gossip", "allreduce"},
}  # fmt: skip
_MODULES: dict[tuple[str, str], str] = {}  # by part and the name it was registered under: the module that did so


class Choices(Mapping[str, T]):
    """The choices of one part by name. A `package.module:NAME` is imported when it is first asked for."""

    def __init__(self, **kinds: T | str) -> None:
        self.kinds = kinds

    def __getitem__(self, name: str) -> T:
        kind = self.kinds[name]
        if isinstance(kind, str):
            kind = self.kinds[name] = resolve_name(kind)
        return kind

    def __iter__(self) -> Iterator[str]:
        return iter(self.kinds)

    def __len__(self) -> int:
        return len(self.kinds)


def register(table: Choices[T], part: str, name: str, kind: T, type_: type) -> None:
    """Add a choice to a part's table, for `register_algorithm`, `register_acting` and `register_exchange`."""
    module = sys._getframe(2).f_globals["__name__"]
    if not name or ":" in name or not isinstance(kind, type_):
        raise ConfigError(f"{part}: it needs a name without a colon and a {type_.__name__}, not {name!r}, {kind!r:.60}")
    before = _MODULES.get((part, name), "" if name in table else module)
    if before not in (module, "__main__"):  # the script itself may be that module, imported again
        raise ConfigError(f"{part}: {name!r} is registered already")
    _MODULES[part, name] = module
    table.kinds[name] = kind


def choose(table: Choices[T], part: str, name: str, config: Config) -> T:
    """The choice that a config names, after the modules were imported that may have registered it."""
    for module in config.plugins.modules:
        with importing("plugins.modules", module):
            prepare_import("plugins.modules", module)
            importlib.import_module(module)
    if name not in table:
        own = "; one of your own is package.module:Class, or a module of plugins.modules registers it"
        raise ConfigError(f"{part}: {name!r} is not one of {', '.join(table)}{own}")
    return table[name]


def resolve_exchange(config: Config) -> str:
    """The exchange's name; `auto` is solo for a learner without others, and allreduce for several."""
    if config.exchange != "auto":
        return config.exchange
    alone = config.learners == 1 and not (config.allreduce.bind or config.allreduce.connect)
    return "solo" if alone else "allreduce"


def _name_of(part: str, config: Config) -> str:
    return getattr(config.plugins, part, "") or str(getattr(config, part))


def title(config: Config) -> str:
    """What a run is, in one line."""
    first = config.preset or config.algorithm, config.env.id
    return " x ".join(map(label, (*first, _name_of("acting", config), _name_of("exchange", config))))


def is_own(part: str, config: Config) -> bool:
    """Whether the choice of a part is one of the user's, which may read any setting."""
    name = _name_of(part, config)
    return ":" in name or (part, name) in _MODULES


def uses(section: str, config: Config) -> bool:
    """Whether a run uses one of `SECTIONS`."""
    choices = (config.algorithm, config.acting, resolve_exchange(config), config.launch)
    if is_own("algorithm", config) and section in (*_ALGORITHMS, "q", "replay"):
        return True
    return not SECTIONS[section].isdisjoint(choices)


def with_modules(config: C) -> C:
    """The config with the modules that registered its parts, for other processes to import."""
    found = [module for (part, name), module in _MODULES.items() if getattr(config, part) == name]
    modules = dict.fromkeys([*config.plugins.modules, *(m for m in found if m != "__main__")])
    return replace(config, plugins=replace(config.plugins, modules=tuple(modules)))


def unknown(what: str, name: str, known: Collection[str], hint: str) -> ConfigError:
    """The error about a name that is none of the known ones. `hint`: where all of them are."""
    near = difflib.get_close_matches(name, known, 1)
    return ConfigError(f"{what}: {name!r} is unknown; {f'did you mean {near[0]!r}? ' if near else ''}{hint}")
