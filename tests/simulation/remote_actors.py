"""The service of remote actors under the scheduler: their places, the slots of their rollouts, and what is learned."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis.stateful import invariant
from torch import Tensor

from coterie.acting.recorder import local_fields, rollout_layout, valid_rows
from coterie.build.resources import resolve_config
from coterie.parallel.slots import Slots
from coterie.parallel.stages import Stages
from coterie.parallel.weights import Weights
from coterie.remote.rollout_service import RolloutService, rollout_tensors
from coterie.roles.remote_worker import RemoteSink
from tests.conftest import VECTOR, make_config
from tests.simulation.clients import HOSTS, PACE_S, REMOTE, UNROLL, WIDTH, Client, Clients, Learner

SIZE = 4  # weights
CPU = torch.device("cpu")


class Actor(Client):
    """Its rollouts show its life and their number."""

    def begin(self) -> None:
        self.fields, self.delivered = local_fields(VECTOR, UNROLL, WIDTH, CPU), 0
        for name, x in self.fields.items():
            if not name.startswith("episode_"):
                x.zero_()
        worker: Any = SimpleNamespace(leave=lambda: None, finish_s=10.0)
        session: Any = SimpleNamespace(connection=self.link)
        moments = SimpleNamespace(size=0)
        agent: Any = SimpleNamespace(params=SimpleNamespace(data=torch.zeros(SIZE)), moments=moments)
        self.sink = RemoteSink(session, worker, rollout_tensors(self.fields))
        self.sink.attach(self.fields, agent, [slice(0, WIDTH)], Stages())

    def step(self) -> None:
        version = self.sink.pull()
        self.scheduler.pause(PACE_S)  # it acts
        self.fields["obs/"][..., 0], self.fields["obs/"][..., 1] = self.life, self.delivered
        self.fields["version"].fill_(version)
        self.delivered += 1
        self.sink.deliver()


class SlotLearner(Learner):
    simulation: RemoteActors

    def work(self) -> None:
        simulation, slots, weights = self.simulation, self.simulation.slots, self.simulation.weights
        settings = {"acting": "decoupled", "actors": 1, "env.num_envs": WIDTH, "algo.unroll_length": UNROLL}
        config = resolve_config(make_config(**settings))
        simulation.version = max(0, simulation.version - 3)  # that of its checkpoint
        for batch in range(slots.batches):
            slots.open(batch, 0)
        self._publish()
        self.service = service = RolloutService(config, VECTOR, 0, slots, weights, (SIZE, 0), WIDTH * (1 + REMOTE))
        self.services = {"PushRollouts": service.push, "PullParameters": service.pull}
        batch = 0
        while not self.over:
            if slots.is_full(batch):
                self._check(slots.fields[batch])
                self.scheduler.pause(0.2)
                slots.open(batch, 0)
                simulation.version += 1
                self._publish()
                batch = (batch + 1) % slots.batches
            self.scheduler.pause(0.1)
        service.close()

    def _publish(self) -> None:
        version = self.simulation.version
        self.simulation.weights.publish(torch.full((SIZE,), float(version)), torch.zeros(0), version)

    def _check(self, fields: Mapping[str, Tensor]) -> None:
        lives, numbers = fields["obs/"][..., 0], fields["obs/"][..., 1]
        assert (lives == lives[0]).all(), "a rollout is of two clients"
        assert (numbers == numbers[0]).all(), "a rollout is half another one"
        for life, number, env in zip(lives[0].tolist(), numbers[0].tolist(), fields["env_id"].tolist(), strict=True):
            self.learn(int(life), int(number), env)
        self.rows += valid_rows(fields)


class RemoteActors(Clients):
    """Remote actors, for as many of which there is room."""

    client, learner_kind, numbers = Actor, SlotLearner, range(HOSTS, HOSTS + REMOTE)

    def begin(self) -> None:
        self.slots = Slots(rollout_layout(VECTOR, UNROLL, 2 * WIDTH), 3, 2 * WIDTH, WIDTH)
        self.weights, self.version = Weights(SIZE, 0), 0
        super().begin()

    @invariant()
    def there_is_no_more_than_the_room(self) -> None:
        if (service := getattr(getattr(self, "learner", None), "service", None)) is not None:
            assert len(service.streams) * WIDTH <= service.room
            assert all(count > 0 for count in service.streams.values())

    def account(self) -> None:
        learner: Any = self.learner
        slots = [(j, s) for j in range(self.slots.batches) for s in range(self.slots.per_batch)]
        left = sum(valid_rows(self.slots.columns(*at)) for at in slots if self.slots.is_full(*at))
        missing = learner.service.produced - learner.rows - left
        assert missing == 0, f"{missing} rows are not accounted for"
