"""Central acting under the scheduler: its threads, the streams and places of its env hosts, and all that is learned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from hypothesis.stateful import invariant
from torch import Tensor

from coterie.acting.central import Central
from coterie.acting.central_stream import EnvHostService
from coterie.acting.env_host import GroupStream
from coterie.types import AgentOutput, Inputs, Rollout
from coterie.wire.codec import timestep_layout
from coterie.wire.service import Service
from tests.conftest import VECTOR
from tests.simulation.clients import HOSTS, REMOTE, UNROLL, WIDTH, Client, Clients, Learner
from tests.simulation.wire import SILENCE_S, Peer
from tests.support.central import OneWeight, learner_setup, time_step

EPISODE = 5  # steps of an env


class Host(Client):
    """An env shows its client's life and the number of the step, and rewards the action before it."""

    def check(self) -> None: ...

    def begin(self) -> None:
        self.at, self.action = 0, np.zeros(WIDTH, np.int64)
        local: bool = self.number < HOSTS
        layout = timestep_layout(VECTOR, WIDTH, shared=local)
        shared = {k: x[self.number] for k, x in self.simulation.memory.items()} if local else {}  # type: ignore[attr-defined]
        self.stream = GroupStream(self.link, layout, 0, self.check, self.check, shared)  # type: ignore[arg-type]

    def step(self) -> None:
        first = self.at % EPISODE == 0
        obs = np.tile(np.array([self.life, self.at, 0], np.float32), (WIDTH, 1))
        reward = np.zeros(WIDTH) if first else 4 * self.at + self.action
        seen = time_step(obs, reward=reward.astype(np.float32), is_first=np.full(WIDTH, first))
        self.action = self.stream.actions(seen)
        assert (self.action == self.at % 4).all(), "the actions are for another step"
        self.at += 1


class CentralLearner(Learner):
    """A policy whose action is the step's number, modulo 4, and whose value is the version of the weights."""

    def work(self) -> None:
        options = {"actors": HOSTS, "env.num_envs": HOSTS * WIDTH, "algo.unroll_length": UNROLL}
        options |= {"central.max_envs": (HOSTS + REMOTE) * WIDTH, "central.batch_size": 3, "central.queue": 0}
        how: dict[str, Any] = {"timeout": SILENCE_S * 100, "is_over": lambda: self.over}
        self.central = acting = Central(learner_setup(self._policy, model := OneWeight(), options, **how))
        self.local = {"Infer": EnvHostService(acting, self.simulation.memory)}  # type: ignore[attr-defined]
        self.services = {"Infer": EnvHostService(acting)}

        def refresh() -> None:
            model.weight.add_(1)
            acting.publish(int(model.weight))

        for rollout in acting.rollouts(refresh):
            self._check(rollout)
            self.scheduler.pause(0.2)
            if self.over:
                break
        acting.close()

    def _policy(self, model: Any, inputs: Inputs, state: Tensor | None, *_: Any) -> tuple[AgentOutput, Tensor]:
        assert isinstance(inputs.obs, Tensor)
        assert state is not None
        weight, number = model.weight.clone(), inputs.obs[:, 1]
        self.scheduler.pause(0.05)  # streams end and weights are published meanwhile
        assert torch.equal(weight, model.weight), "the weights change while they are used"
        rows = len(number)
        after = torch.where(inputs.is_first[:, None], 0.0, state) + 1
        return AgentOutput(number.long() % 4, torch.zeros(rows), weight.repeat(rows)), after

    def _check(self, rollout: Rollout) -> None:
        assert isinstance(rollout.obs, Tensor)
        lives, at = rollout.obs[..., 0], rollout.obs[..., 1]
        assert (lives == lives[0]).all(), "a rollout is of two clients"
        assert (at.diff(dim=0) == 1).all(), "a rollout skips a step, or repeats one"
        assert (rollout.is_first[1:] == (at[1:] % EPISODE == 0)).all()
        assert (rollout.action == at[:-1] % 4).all(), "an action is not of its step"
        reward = torch.where(rollout.is_first[1:], torch.zeros(()), 4 * at[1:] + rollout.action)
        assert torch.equal(rollout.reward, reward), "a reward is not of its action"
        assert torch.equal(rollout.behavior_value[:-1], rollout.policy_version.float()), "not the weights' version"
        for life, first, env in zip(lives[0].tolist(), at[0].tolist(), rollout.env_id.tolist(), strict=True):
            self.learn(int(life), int(first), env)
        self.rows += int(rollout.mask.sum())


class EnvHosts(Clients):
    """Env hosts of the run's own, and remote ones, which must leave those their places."""

    client, learner_kind, numbers = Host, CentralLearner, range(HOSTS + REMOTE)

    def begin(self) -> None:
        self.memory = {"obs/": np.zeros((HOSTS, WIDTH, 3), np.float32)}  # shared with the run's own hosts
        super().begin()

    def serving(self, local: bool) -> tuple[Peer | None, Mapping[str, Service]]:
        learner: Any = self.learner
        return (learner, learner.local if local else learner.services) if learner.services else (None, {})

    @invariant()
    def no_place_is_given_twice(self) -> None:
        if not getattr(getattr(self, "learner", None), "services", None):
            return
        acting = self.learner.central  # type: ignore[attr-defined]
        assert acting.envs == sum(stream.width for stream in acting.streams.values()) <= acting.max_envs

    def account(self) -> None:
        acting = self.learner.central  # type: ignore[attr-defined]
        counts = acting.counts()
        missing = counts["produced"] - self.learner.rows - counts["dropped"] - counts["in_flight"]
        assert missing == 0, f"{missing} rows are not accounted for: {counts}, {self.learner.rows} learned"
