"""All actings by name."""

from __future__ import annotations

from typing import Any

from coterie.acting import central, decoupled, inline
from coterie.acting.base import ActingKind
from coterie.config import Config
from coterie.plugins import choose, register

ACTING: dict[str, ActingKind[Any]] = {"inline": inline.KIND, "decoupled": decoupled.KIND, "central": central.KIND}


def register_acting(name: str, kind: ActingKind[Any]) -> None:
    """Add an acting: `--acting NAME`."""
    register(ACTING, name, kind)


def acting_kind(config: Config) -> ActingKind[Any]:
    return choose(ACTING, "acting", config.acting, config)


def batch_size(config: Config) -> int:
    """Rollouts of one env each in a learner's batch."""
    return acting_kind(config).batch_size(config)
