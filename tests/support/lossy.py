"""Actings with a fault that the accounts of a run must show."""

from __future__ import annotations

from coterie.acting.central import Central
from coterie.acting.decoupled import Decoupled
from coterie.acting.inline import Inline


class LosingDecoupled(Decoupled):
    """Its third rollout never reaches the learner."""

    def rollouts(self, refresh):
        yield from (rollout for i, rollout in enumerate(super().rollouts(refresh)) if i != 2)


class _Repeats:
    """The learner gets its third rollout twice."""

    def rollouts(self, refresh):
        for i, rollout in enumerate(super().rollouts(refresh)):
            yield from [rollout] * (1 + (i == 2))


class RepeatingInline(_Repeats, Inline):
    pass


class RepeatingCentral(_Repeats, Central):
    pass
