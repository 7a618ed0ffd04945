"""All actings by name. A user's acting is added by `coterie.plugins`."""

from __future__ import annotations

from coterie.acting import central, decoupled, inline
from coterie.acting.base import ActingKind
from coterie.config import Config

ACTING: dict[str, ActingKind] = {"inline": inline.KIND, "decoupled": decoupled.KIND, "central": central.KIND}


def acting_kind(config: Config) -> ActingKind:
    return ACTING[config.acting]


def batch_size(config: Config) -> int:
    """Rollouts of one env each in a learner's batch."""
    return acting_kind(config).batch_size(config)
