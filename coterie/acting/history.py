"""A learner's weights of earlier versions, for a replay."""

from __future__ import annotations

from collections import Counter

from torch import Tensor

from coterie.acting.base import Agent
from coterie.types import CoterieError


class History:
    """Weights and normalizers by version, or by another number that grows with each publication, kept as long as they
    are needed. `uses`: how often each will be.
    """

    def __init__(self, uses: Counter[int]) -> None:
        self.uses = uses
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def publish(self, version: int, agent: Agent) -> None:
        """Keep these weights, unless some of this version are kept: the first ones are those that acted."""
        if self.uses[version] and version not in self.kept:
            self.kept[version] = agent.params.data.clone(), agent.moments.read()

    def load(self, version: int, agent: Agent) -> None:
        """Give these weights to an agent."""
        if version not in self.kept:
            raise CoterieError(f"the record asks for the weights of learner step {version}, which were not published")
        weights, moments = self.kept[version]
        agent.params.data.copy_(weights)
        if len(moments):
            agent.moments.write(moments)
        self.uses[version] -= 1
        if not self.uses[version]:
            del self.kept[version]
