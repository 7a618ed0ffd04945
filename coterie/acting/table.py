"""All acting modes by name."""

from __future__ import annotations

from typing import Any

from coterie.acting.base import ActingKind
from coterie.choices import Choices, choose, register
from coterie.config import Config

ACTING: Choices[ActingKind[Any]] = Choices(
    inline="coterie.acting.inline:KIND",
    decoupled="coterie.acting.decoupled:KIND",
    central="coterie.acting.central:KIND",
)


def register_acting(name: str, kind: ActingKind[Any]) -> None:
    """Add an acting mode: `--acting NAME`. `kind`: as `KIND` in acting/inline.py. Raises `ConfigError` for others."""
    register(ACTING, "acting", name, kind, ActingKind)


def acting_kind(config: Config) -> ActingKind[Any]:
    return choose(ACTING, "acting", config.acting, config)
