"""User-defined parts (docs/guides/custom-parts.md).

`package.module:callable` names an env, a torso, an algorithm, an acting or an exchange. The last three are substitutes
for the part that the run would have otherwise: they are made with the same arguments, and the same is refused of them.
A new acting or exchange has a name of its own (choices.py).
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from coterie.config import Config
from coterie.types import ConfigError, reason_of

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
        hint = "; child processes do not run the script: move it to a file of its own" if module == "__main__" else ""
        raise ConfigError(f"{field}: cannot import {path!r}: {reason_of(error)}{hint}") from error
    if not callable(found):
        raise ConfigError(f"{field}: {path!r} is {type(found).__name__}, which cannot be called")
    return found


def check_own(config: Config) -> None:
    """Raise a one-line `ConfigError` where a user-defined part cannot be imported."""
    for part in PARTS:
        if path := getattr(config.plugins, part):
            named(f"plugins.{part}", path)


def substitute(config: Config, part: str, ours: Callable[P, T]) -> Callable[P, T]:
    """`ours`, or the user's own `part` instead, which takes what `ours` takes."""
    path: str = getattr(config.plugins, part)
    if not path:
        return ours
    theirs, place = named(f"plugins.{part}", path), getattr(ours, "__name__", str(ours))
    # The modules that are called base have protocols, and what several parts share.
    mro = [c for c in (theirs.__mro__ if isinstance(theirs, type) else ()) if not c.__module__.endswith("base")]
    base = next((c for c in mro if c.__module__.startswith("coterie.")), ours)
    if base is not ours:
        raise ConfigError(f"plugins.{part}: {path} is a subclass of {base.__name__}, but this run uses {place}")

    def make(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            inspect.signature(theirs).bind(*args, **kwargs)
        except TypeError as error:
            raise ConfigError(f"plugins.{part}: {path} must take what {place} takes: {error}") from None
        made: T = theirs(*args, **kwargs)
        return made

    return make
