"""Decoupled acting along a flight record: a learner's actors act again, in its own process.

A batch names its rollouts, and each rollout the versions of the weights that chose its actions. An actor has its own
envs and random numbers, and repeats its rollouts in their order. Weights are kept for as long as a rollout needs them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from coterie.acting.actor import RolloutLoop
from coterie.acting.base import Acting, Agent, LearnerSetup, core_shape
from coterie.acting.recorder import Fields, Recorder, as_rollout, local_fields
from coterie.errors import CoterieError
from coterie.flight.life import RecordedLife, RecordEnds
from coterie.parallel.slots import columns_of
from coterie.parallel.stages import Stages
from coterie.remote.rollout_service import REMOTE_PRODUCER
from coterie.types import Rollout


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


class RecordedActor:
    """One life of an actor. `versions`: of the weights of each rollout, by its number."""

    def __init__(self, setup: LearnerSetup, key: tuple[int, int], history: History, versions: dict[int, list[int]]):
        work, core = setup.worker(*key), core_shape(setup.agent.model)
        envs = work.envs.config.env.num_envs
        self.fields = local_fields(work.envs.spec, setup.unroll_length, envs, torch.device("cpu"), core)
        self.history, self.versions = history, versions
        self.done, self.left = 0, list[int]()  # rollouts; versions that the present one will still ask for
        self.ahead: dict[int, Fields] = {}  # rollouts of later batches
        self.loop = RolloutLoop(work.envs, work.make_agent(), lambda rows: None, self._open)
        self.rollouts = self.loop.rollouts()

    def rollout(self, number: int) -> Fields:
        """The arrays of a rollout, valid until the next call."""
        if number in self.ahead:
            return self.ahead.pop(number)
        while True:
            if self.done not in self.versions:
                raise RecordEnds(f"no further: rollout {self.done} of an actor was trained on after the record's end")
            self.left = list(self.versions[self.done])
            next(self.rollouts)
            self.done += 1
            if self.done > number:
                return self.fields
            self.ahead[self.done - 1] = {name: x.clone() for name, x in self.fields.items()}

    # The sink of its rollouts.

    def _open(self, agent: Agent, groups: list[slice], stages: Stages) -> RecordedActor:
        self.agent, self.first = agent, Recorder(self.fields, groups, torch.device("cpu"))
        return self

    def pull(self) -> int:
        self.history.load(version := self.left.pop(0), self.agent)
        return version

    def next(self) -> Recorder:
        return self.first

    def check(self) -> None:
        """A replay is not stopped here."""

    def deliver(self) -> None:
        """The learner copies the rollout."""


class RecordedActors(Acting):
    """A source of the rollouts of a learner's life, as `Decoupled` is one."""

    def __init__(self, setup: LearnerSetup, memory: None) -> None:
        self.setup, config, life = setup, setup.config, cast(RecordedLife, setup.recorded_life)
        self.batches = [[(*origin,) for origin in event[2]] for event in life.of("rollout")]
        self.steps = iter([event[0] for event in life.of("rollout")])  # recorded versions, edited or not
        self.versions: dict[tuple[int, int], dict[int, list[int]]] = {}  # by actor and life, then by number
        uses = Counter[int]()
        for _, _, origins, versions, *_ in life.of("rollout"):
            for (actor, start, number), each in zip(origins, versions, strict=True):
                self.versions.setdefault((actor, start), {})[number] = each
                uses.update(each)
        self.history, self.actors = History(uses), dict[tuple[int, int], RecordedActor]()
        size, core = config.decoupled.batch_size or config.env.num_envs, core_shape(setup.agent.model)
        self.fields = local_fields(setup.envs.spec, setup.unroll_length, size, setup.envs.device, core)

    def publish(self, version: int) -> None:
        self.history.publish(next(self.steps), self.setup.agent)

    def rollouts(self, refresh: Callable[[], None]) -> Iterator[Rollout]:
        for origins in self.batches:
            refresh()
            at = 0
            for origin in origins:
                found = self._actor(origin[:2]).rollout(origin[2])
                width = len(found["env_id"])
                for name, x in columns_of(self.fields, at, width).items():
                    x.copy_(found[name])
                at += width
            yield replace(as_rollout(self.fields, self.setup.envs.device), origins=origins)

    def _actor(self, key: tuple[int, int]) -> RecordedActor:
        if key[0] >= REMOTE_PRODUCER:
            raise RecordEnds("no further: the next batch has a remote actor's rollout, and those actors have no record")
        if key not in self.actors:
            self.actors[key] = RecordedActor(self.setup, key, self.history, self.versions[key])
        return self.actors[key]

    def counts(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        for actor in self.actors.values():
            actor.loop.close()
