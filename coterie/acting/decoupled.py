"""Decoupled acting (IMPALA, https://arxiv.org/abs/1802.01561, Figure 1): actors with their own copy of the policy.

Each actor takes the newest weights at the start of an unroll, acts for T steps and writes the rollout, with the
log-probabilities of the policy that acted, to shared memory. The learner trains on batches of rollouts, in the order
in which it opened them. There are only a few batches: when the learner is slow the actors wait, so that the policy lag
is bounded. In lockstep there is no lag: the learner waits for its batch, and the actors for the weights trained on it
(the paper's batched A2C with synchronous trajectories).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

from coterie.acting.actor import Actor, ActorMemory, batches_of
from coterie.acting.base import Acting, ActingKind, LearnerSetup
from coterie.acting.child_processes import child_process_refusals, shares_evenly
from coterie.acting.recorder import as_rollout, valid_rows
from coterie.config import Refusal, ResolvedConfig
from coterie.envs.tasks import envs_per_child
from coterie.errors import ConfigError, CoterieError, counted
from coterie.parallel.clock import awake
from coterie.parallel.gpu import Uploads
from coterie.plugins import substitute
from coterie.remote.rollout_service import RolloutService
from coterie.types import Rollout
from coterie.wire.auth import offset

_POLL_S = 2e-4  # between polls of shared memory


class Decoupled(Acting):
    """The learner's side: a source of rollouts from actors."""

    def __init__(self, setup: LearnerSetup, memory: ActorMemory) -> None:
        self.setup, self.config, self.device = setup, setup.config.decoupled, setup.envs.device
        self.memory, self.slots, self.weights = memory, memory.slots, memory.weights
        self.opened = deque[int]()  # batches that are being filled, or are full; the oldest first
        self.closed = False
        self.waiting = 0  # full batches that wait behind the one in training
        self.uploads = Uploads(self.slots.fields, self.slots.memory, self.device)
        self.remote: RolloutService | None = None  # receives the rollouts of remote actors

    def close(self) -> None:
        self.closed = True
        if self.remote is not None:
            self.remote.close()
        self.uploads.close()

    def publish(self, version: int) -> None:
        """Publish the weights of learner step `version`, if at least `publish_every` steps newer than the last."""
        published, agent = self.weights.version, self.setup.agent
        if published < 0 or not 0 <= version - published < self.config.publish_every:
            self.weights.publish(agent.params.data, agent.moments.read(), version)

    def rollouts(self, refresh: Callable[[], None]) -> Iterator[Rollout]:
        free, opened = deque(range(self.slots.batches)), self.opened
        while True:
            refresh()
            while free:
                opened.append(free.popleft())
                self.slots.open(opened[-1], max(0, self.weights.version), self._holders())
            if not self._wait(opened[0]):
                return
            batch = opened.popleft()
            self.waiting = sum(self.slots.is_full(j) for j in opened)
            copies = self.uploads.get(batch)
            if self.waiting and self.slots.is_full(opened[0]):
                self.uploads.send(opened[0])
            self.setup.stages.lap("upload")
            yield replace(as_rollout(self.slots.fields[batch], self.device, copies), origins=self.slots.origins(batch))
            self.uploads.free(batch)
            free.append(batch)

    def rest(self) -> int:
        """Wait until the actors have filled all open batches; returns their number. For measurements."""
        for batch in self.opened:
            self._wait(batch)
        return len(self.opened)

    def _holders(self) -> list[int] | None:
        """In lockstep each slot always belongs to the same actor."""
        actors = self.memory.actors
        return [s % actors for s in range(self.slots.per_batch)] if self.config.lockstep else None

    def _wait(self, batch: int) -> bool:
        """Wait until a batch is full; False if the run ends before."""
        setup, begin = self.setup, awake()
        setup.stages.start()
        with setup.board.blocked(setup.rank):
            while not self._is_full(batch):
                if setup.is_over():
                    return False
                time.sleep(_POLL_S)
                if awake() - begin > setup.timeout:
                    raise CoterieError(f"no batch of rollouts for {setup.timeout:g} s: the actors hang")
        setup.stages.lap("wait")
        return True

    def _is_full(self, batch: int) -> bool:
        if self.remote is not None and self.remote.error is not None:
            raise self.remote.error
        return self.slots.is_full(batch)

    def counts(self) -> dict[str, int]:
        """Rows of remote actors, and those left in the slots. Local actors write their counts to the board."""
        found = {} if self.remote is None else {"produced": self.remote.produced}
        if self.closed:
            left = [(j, s) for j in self.opened for s in range(self.slots.per_batch) if self.slots.is_full(j, s)]
            found["in_flight"] = sum(valid_rows(self.slots.columns(*at)) for at in left)
        return found

    def gauges(self) -> dict[str, float]:
        envs = {} if self.remote is None else {"slots/remote_envs": self.remote.envs}
        return {"slots/waiting": self.waiting * self.slots.per_batch, **envs}


def connect(setup: LearnerSetup, memory: ActorMemory) -> Acting:
    config, agent = setup.config, setup.agent
    acting = substitute(config, "acting", Decoupled)(setup, memory)
    with ExitStack() as made:
        made.callback(acting.close)
        if config.wire.bind:
            sizes = len(agent.params.data), agent.moments.size
            acting.remote = remote = RolloutService(
                config, setup.envs.spec, setup.rank, acting.slots, acting.weights, sizes, setup.max_envs
            )
            remote.on_produced = setup.on_produced
            if (need := -(-remote.reads.most // 2**20)) > config.wire.max_message_mb:
                raise ConfigError(f"wire.max_message_mb: must be at least {need} for a remote actor's rollout")
            services = {"PushRollouts": remote.push, "PullParameters": remote.pull}
            setup.servers.serve(offset(config.wire.bind, setup.rank), services, "wire.bind")
        made.pop_all()
    return acting


def worst_lag(config: ResolvedConfig, updates: int) -> int | None:
    """A batch waits for those that were opened before it. Remote actors take weights before they have a slot."""
    lag = (batches_of(config, updates) - 1) * updates + config.decoupled.publish_every - 1
    return None if config.wire.bind else lag


def describe(config: ResolvedConfig, groups: int, threads: int) -> str:
    width, actors = envs_per_child(config), counted(config.actors // config.learners, "actor")
    batch = f"batches of {KIND.batch_size(config) // width} x {width} rollouts"
    return f"{config.env.num_envs} envs in {actors}, {batch}"


KIND = ActingKind(
    connect,
    describe,
    ActorMemory,
    Actor,
    child="actor",
    own_policy=True,
    niceness=5,
    section=lambda config: config.decoupled,
    batch_settings=lambda lockstep, size: {"decoupled.lockstep": lockstep, "decoupled.batch_size": size},
    publish_every=lambda config: config.decoupled.publish_every,
    worst_lag=worst_lag,
    least_lag=lambda config, updates: config.decoupled.publish_every - 1,
    refusals=(
        *child_process_refusals(lambda config: config.decoupled),
        Refusal(
            lambda c, s: c.max_lag > 0 and bool(c.wire.bind),
            "max_lag",
            "must be 0 with wire.bind and decoupled acting: remote actors take weights before they have a slot",
        ),
        Refusal(
            lambda c, s: shares_evenly(c) and (c.decoupled.batch_size or c.env.num_envs) % envs_per_child(c) != 0,
            "decoupled.batch_size",
            "must be a multiple of the envs of an actor (env.num_envs x learners / actors), or 0 for all of a learner",
        ),
    ),
    needs=lambda config: {"decoupled.queue": (not config.decoupled.lockstep, "decoupled.lockstep False")},
    replay="coterie.acting.recorded_actors:RecordedActors",
    simulation="coterie.tools.plan.acting:SimDecoupled",
)
