"""Elastic averaging SGD in `coterie plan`: elastic.py, in seconds."""

from __future__ import annotations

from coterie.tools.plan.learners import SimExchange
from tests.plugins.parts.elastic import EVERY


class SimElastic(SimExchange):
    made = 0

    def step(self):
        yield from self.update("solo")
        self.made += 1
        if self.made % EVERY == 0:
            yield self.learner.chip.work(self.extra("elastic"), "exchange")
