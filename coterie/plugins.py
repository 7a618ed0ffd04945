"""Parts of your own: `package.module:callable` names an env, a torso, an algorithm, an acting or an exchange.

An algorithm, acting or exchange takes the place of the one that the run would have without it: it is made with the same
arguments, in every process that has one, and whatever is refused of that one is refused of it (docs/extend.md).
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from coterie.config import Config
from coterie.types import ConfigError

PARTS = ("algorithm", "acting", "exchange")
P = ParamSpec("P")
T = TypeVar("T")


def named(field: str, path: str) -> Any:
    """What `path` names. Raises a `ConfigError` about `field` where there is no such thing, or it cannot be called."""
    module, _, name = path.partition(":")
    try:
        if not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
            raise ImportError("it is not package.module:callable")
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{field}: cannot import {path!r}: {' '.join(str(error).split())}") from error
    if not callable(found):
        raise ConfigError(f"{field}: {path!r} is {type(found).__name__}, which cannot be called")
    return found


def check_own(config: Config) -> None:
    """Raise a one-line `ConfigError` where a part of the user's cannot be imported."""
    for part in PARTS:
        if path := getattr(config.own, part):
            named(f"own.{part}", path)


def in_place_of(config: Config, part: str, ours: Callable[P, T]) -> Callable[P, T]:
    """`ours`, or the user's own `part` instead, which takes what `ours` takes."""
    path: str = getattr(config.own, part)
    if not path:
        return ours
    theirs, place = named(f"own.{part}", path), getattr(ours, "__name__", str(ours))
    # A protocol is no kind of anything: it only says what there has to be.
    mro = [c for c in getattr(theirs, "__mro__", ()) if not getattr(c, "_is_protocol", False)]
    base = next((c for c in mro if c.__module__.startswith("coterie.")), ours)
    if base is not ours:
        raise ConfigError(f"own.{part}: {path} is a kind of {base.__name__}, and this run has {place} in that place")

    def make(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            inspect.signature(theirs).bind(*args, **kwargs)
        except TypeError as error:
            raise ConfigError(f"own.{part}: {path} must take what {place} takes: {error}") from None
        made: T = theirs(*args, **kwargs)
        return made

    return make
