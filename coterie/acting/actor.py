"""Actor processes of decoupled acting: envs and a copy of the policy, for a learner in another process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Protocol, cast

import torch
from torch import Tensor

from coterie.acting.base import Agent, EnvShare, MemorySetup, Stopped, WorkerSetup, group_policy
from coterie.acting.child_processes import Reporter, check, reported, sender
from coterie.acting.inline import Inline
from coterie.acting.recorder import Recorder, rollout_layout
from coterie.config import ResolvedConfig
from coterie.envs.tasks import envs_per_child
from coterie.errors import CoterieError
from coterie.models.build import Network, acting_copy
from coterie.parallel.clock import awake
from coterie.parallel.hardware import keep_freed_memory
from coterie.parallel.slots import Slots
from coterie.parallel.stages import Stages
from coterie.parallel.threads import Team
from coterie.parallel.weights import Weights
from coterie.types import AgentOutput, Inputs, Post

_POLL_S, _SLOW_POLL_S = 2e-4, 1e-3  # between polls of shared memory: at first, and later
_SOON_S = 0.01


def batches_of(config: ResolvedConfig, updates: int) -> int:
    """Batches that a learner has memory for: one in training, `queue` that wait, and a slot for each actor to fill; no
    more than `max_lag` allows. They are trained in the order in which they were opened, with the weights of that time
    or newer ones.
    """
    section = config.decoupled
    most = 1 + section.queue + -(-config.env.num_envs // (section.batch_size or config.env.num_envs))
    if config.max_lag:
        most = min(most, 1 + max(0, config.max_lag - section.publish_every + 1) // updates)
    return 1 if section.lockstep else most


class ActorMemory:
    """Shared memory between a learner and its actors: weights, and slots for rollouts."""

    def __init__(self, setup: MemorySetup) -> None:
        config = setup.config
        section, width = config.decoupled, envs_per_child(config)
        batch_size = section.batch_size or config.env.num_envs
        layout = rollout_layout(setup.spec, setup.unroll_length, batch_size, setup.core)
        self.actors = max(1, config.actors // config.learners)
        self.slots = Slots(layout, batches_of(config, setup.updates), batch_size, width, self.actors)
        self.weights = Weights(setup.weights, setup.moments)

    def abandon(self, child: int) -> None:
        self.slots.abandon(child)

    def delivered(self, child: int) -> int:
        return self.slots.delivered(child)

    def close(self) -> None:
        self.slots.release()
        self.weights.release()


class RolloutSink(Protocol):
    """Where an actor takes weights and memory for rollouts, and delivers rollouts: shared memory, or a wire."""

    @property
    def first(self) -> Recorder: ...  # any of its recorders
    def pull(self) -> int: ...  # take the newest weights; returns their version
    def next(self) -> Recorder: ...  # waits until another rollout is wanted
    def check(self) -> None: ...  # raises `Stopped` when the run has ended
    def deliver(self) -> None: ...  # the rollout is complete


class RolloutLoop:
    """Acts for some envs on the CPU, as inline acting does, and delivers the rollouts.

    `count` is called with the number of valid rows as they are seen. `make_sink`: for these groups of envs.
    """

    def __init__(
        self, share: EnvShare, agent: Agent, count: Callable[[int], None],
        make_sink: Callable[[Agent, list[slice], Stages], RolloutSink],
    ) -> None:  # fmt: skip
        torch.set_num_threads(1)
        keep_freed_memory()
        self.stages, self.count, self.acts_at = Stages(), count, agent.acts_at
        model, refresh = acting_copy(cast(Network, agent.model), share.dtype)
        self.envs = share.make(0)
        self.sink = make_sink(agent, self.envs.groups, self.stages)
        policy = group_policy(share, self.envs, agent, model, refresh)
        self.act, self.calls = policy.act, [0] * len(self.envs.groups)
        self.acting = Inline(
            self.envs,
            replace(policy, act=self._act),
            self.sink.first,
            self.stages,
            Team(1),  # it has one core, and counts without a lock
            share.config.algo.poll,
            self.sink.next,
        )
        self.report = Reporter("actor", self.stages, self.acting.news)

    def rollouts(self) -> Iterator[None]:
        """Act for one rollout after another, and deliver it."""
        for _ in self.acting.rollouts(self._refresh):
            self.sink.deliver()
            yield

    def run(self, on_delivered: Callable[[], None]) -> None:
        """Act until the run has ended; `on_delivered` is called after each rollout."""
        with suppress(Stopped):
            for _ in self.rollouts():
                on_delivered()

    def close(self) -> None:
        self.acting.close()

    def _act(self, g: int, inputs: Inputs, state: Tensor | None) -> tuple[AgentOutput, Tensor | None]:
        """Count the rows: each row after row 0 shows the consequence of a step, delivered later or not."""
        if self.calls[g] % (self.acting.recorder.unroll_length + 1):
            self.count(int((~inputs.is_first).sum()))
        self.calls[g] += 1
        self.sink.check()
        begin = time.perf_counter()
        out = self.act(g, inputs, state)
        self.report.latencies.append(time.perf_counter() - begin)
        return out

    def _refresh(self) -> None:
        self.stages.start()
        version = self.sink.pull()
        self.acts_at(version)
        self.acting.publish(version)
        self.stages.lap("pull")


class ActorMailbox:
    """An actor's end of the shared memory."""

    def __init__(
        self, memory: ActorMemory, setup: WorkerSetup, agent: Agent, groups: list[slice], stages: Stages
    ) -> None:
        self.slots, self.weights, self.agent, self.stages = memory.slots, memory.weights, agent, stages
        self.board, self.row, self.number = setup.board, setup.row, setup.number
        self.check = partial(check, setup)
        self.timeout = setup.timeout
        cpu = torch.device("cpu")
        self.recorders = {
            (j, s): Recorder(self.slots.columns(j, s), groups, cpu)
            for j in range(self.slots.batches)
            for s in range(self.slots.per_batch)
        }
        self.slot = (0, 0)  # the one that is being filled
        self.life_number, self.filled = setup.life_number, 0
        self.sums = agent.moments.read()

    @property
    def first(self) -> Recorder:
        return self.recorders[0, 0]

    def pull(self) -> int:
        """Take the newest weights; returns their version."""
        version = self.weights.read(self.agent.params.data, self.sums)
        if len(self.sums):
            self.agent.moments.write(self.sums)
        return version

    def next(self) -> Recorder:
        """Wait for a slot, and for weights as new as it needs."""
        begin = awake()
        self.stages.start()
        with self.board.blocked(self.row):
            while (slot := self.slots.take(self.number)) is None or self.weights.version < self.slots.need[slot]:
                self.check()
                waited = awake() - begin
                time.sleep(_POLL_S if waited < _SOON_S else _SLOW_POLL_S)
                # A learner may be evaluating, which shows in its heartbeat, and this actor's may wait for that one.
                silent = time.monotonic() - float(self.board.heartbeats[: self.board.learners].max())
                if min(waited, silent) > self.timeout:
                    raise CoterieError(f"no slot for a rollout for {self.timeout:g} s: the learner hangs")
        self.stages.lap("wait")
        self.slot = slot
        return self.recorders[slot]

    def deliver(self) -> None:
        self.slots.promise(self.number, self.slot, self.board.read(self.row)["produced"])
        self.slots.fill(self.slot, (self.number, self.life_number, self.filled))
        self.filled += 1


class Actor:
    """The work of an actor process that the run started."""

    def __init__(self, setup: WorkerSetup, memory: ActorMemory) -> None:
        self.setup, self._counts = setup, setup.board.counts[setup.row]

        def make_sink(agent: Agent, groups: list[slice], stages: Stages) -> ActorMailbox:
            return ActorMailbox(memory, setup, agent, groups, stages)

        self.loop = RolloutLoop(setup.envs, setup.make_agent(), self._count, make_sink)

    def _count(self, rows: int) -> None:
        self._counts["produced"] += rows

    def run(self, post: Post) -> None:
        def report() -> None:
            send(self.loop.report.take())

        def delivered() -> None:
            self._counts["delivered"] = self._counts["produced"]
            if self.loop.report.is_due():
                report()

        send = sender(self.setup, self.loop.envs, post)
        with reported(report):
            self.loop.run(delivered)

    def close(self) -> None:
        self.loop.close()
