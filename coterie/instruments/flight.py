"""Notes for the flight record what a learner trains on, and check sums of what comes of it."""

from __future__ import annotations

from coterie.flight.life import Note
from coterie.flight.sums import rollout_sums, weight_sums
from coterie.learner import Observer, Progress
from coterie.models.heads import Moments
from coterie.parallel.params import FlatParams
from coterie.types import Rollout


class Schedule(Observer):
    """Notes each rollout, and the weights every `every` learner steps (docs/reference/flight.md).

    "rollout": learner step, the run's env steps, origins, the versions of each origin's weights, `rollout_sums`.
    "weights": learner step, `weight_sums`. "final": the same at the end, if not noted.
    """

    def __init__(
        self, params: FlatParams, moments: Moments, progress: Progress, poll: int, every: int, note: Note
    ) -> None:
        self.params, self.moments, self.progress, self.every, self.note = params, moments, progress, every, note
        self.poll = poll  # rows with the same weights

    def begin(self, rollout: Rollout, env_steps: int) -> None:
        version = rollout.policy_version.cpu().numpy()
        versions = version[:: self.poll, :: version.shape[1] // max(1, len(rollout.origins))].T.tolist()
        self.note("rollout", self.progress.learner_steps, env_steps, rollout.origins, versions, *rollout_sums(rollout))

    def step(self) -> None:
        if (steps := self.progress.learner_steps + 1) % self.every == 0:
            self.note("weights", steps, weight_sums(self.params, self.moments.read()))

    def end(self) -> None:
        if (steps := self.progress.learner_steps) % self.every:
            self.note("final", steps, weight_sums(self.params, self.moments.read()))
