"""Decoupled acting (IMPALA, https://arxiv.org/abs/1802.01561, Figure 1): actors with their own copy of the policy.

Each actor takes the newest weights at the start of an unroll, acts for T steps and leaves the rollout, with the
log-probabilities of the very policy that acted, in shared memory; the learner trains on batches of them, in the order
in which they were opened. A few batches are all there is: when the learner is slow the actors wait, and the policy that
acted is never many learner steps old. In lockstep nothing is: the learner waits for its batch, and the actors for the
weights that came of it (the paper's batched A2C with synchronous trajectories).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator

import torch

from coterie.acting.base import ActingKind, apart_refusals, envs_per_child, shares_evenly
from coterie.acting.recorder import Recorder, Stages, as_rollout
from coterie.config import Config, Refusal
from coterie.config import Decoupled as DecoupledConfig
from coterie.models.heads import Moments
from coterie.parallel.board import Board
from coterie.parallel.params import FlatParams
from coterie.parallel.slots import Slots
from coterie.parallel.upload import Uploads
from coterie.parallel.weights import Weights
from coterie.types import CoterieError, Rollout

_NAP_S, _LONG_NAP_S = 2e-4, 1e-3  # between two looks at shared memory, soon after the first and later
_SOON_S = 0.01


class Stopped(Exception):
    """The run is over: an actor leaves its rollout as it is."""


class Decoupled:
    """The learner's side: a source of rollouts that others record. `actors`: how many fill its slots."""

    def __init__(
        self, slots: Slots, weights: Weights, params: FlatParams, moments: Moments, board: Board, rank: int,
        actors: int, stages: Stages, device: torch.device, *, publish_every: int = 1, lockstep: bool = False,
        timeout: float = 900.0,
    ) -> None:  # fmt: skip
        self.slots, self.weights, self.params, self.moments = slots, weights, params, moments
        self.board, self.rank, self.actors, self.stages, self.timeout = board, rank, actors, stages, timeout
        self.publish_every, self.lockstep = publish_every, lockstep
        self.opened = deque[int]()  # batches that the actors fill, or that wait to be learned from; the oldest first
        self.waiting = 0  # batches that were full when the learner came for one
        self.device, self.uploads = device, Uploads(slots.fields, slots.memory, device)

    def close(self) -> None:
        self.uploads.close()

    def publish(self, version: int) -> None:
        """Tell the actors the weights of learner step `version`, where that is due."""
        if self.weights.version < 0 or not 0 <= version - self.weights.version < self.publish_every:
            self.weights.publish(self.params.data, self.moments.read(), version)

    def rollouts(self, refresh: Callable[[], None]) -> Iterator[Rollout]:
        free, opened = deque(range(self.slots.batches)), self.opened
        while True:
            refresh()
            while free:
                opened.append(free.popleft())
                self.slots.open(opened[-1], max(0, self.weights.version), self._holders())
            self._wait(opened[0])
            batch = opened.popleft()
            self.waiting = sum(self.slots.is_full(j) for j in opened)
            begin = time.perf_counter()
            there = self.uploads.get(batch)
            if self.waiting and self.slots.is_full(opened[0]):
                self.uploads.send(opened[0])
            self.stages.add("upload", begin)
            yield as_rollout(self.slots.fields[batch], self.device, there)
            self.uploads.free(batch)
            free.append(batch)

    def rest(self) -> int:
        """Wait until the actors have filled all that is open; returns how many batches wait. For measurements."""
        for batch in self.opened:
            self._wait(batch)
        return len(self.opened)

    def _holders(self) -> list[int] | None:
        """In lockstep each slot is always the same actor's."""
        return [s % self.actors for s in range(self.slots.per_batch)] if self.lockstep else None

    def _wait(self, batch: int) -> None:
        begin = time.perf_counter()
        with self.board.blocked(self.rank):
            while not self.slots.is_full(batch):
                time.sleep(_NAP_S)
                if time.perf_counter() - begin > self.timeout:
                    raise CoterieError(f"no batch of rollouts for {self.timeout:g} s: the actors hang")
        self.stages.add("wait", begin)

    def counts(self) -> dict[str, int]:
        """The actors tell for themselves what they produced, and what failed."""
        return {}

    def failures(self) -> list[str]:
        return []

    def gauges(self) -> dict[str, float]:
        return {"slots/waiting": self.waiting * self.slots.per_batch}


class Desk:
    """An actor's side: where it gets weights and a slot, and leaves rollouts. `number`: among its learner's actors."""

    def __init__(
        self, slots: Slots, weights: Weights, params: FlatParams, moments: Moments, board: Board, rank: int,
        learner: int, number: int, groups: list[slice], stages: Stages, timeout: float,
    ) -> None:  # fmt: skip
        self.learner = learner  # its row of the board
        self.slots, self.weights, self.params, self.moments = slots, weights, params, moments
        self.board, self.rank, self.number, self.stages, self.timeout = board, rank, number, stages, timeout
        cpu = torch.device("cpu")
        self.recorders = {
            (j, s): Recorder(slots.columns(j, s), groups, cpu)
            for j in range(slots.batches)
            for s in range(slots.per_batch)
        }
        self.at: tuple[int, int] | None = None
        self.sums = moments.read()

    @property
    def first(self) -> Recorder:
        return self.recorders[0, 0]

    def pull(self) -> int:
        """The newest weights; returns their version."""
        version = self.weights.read(self.params.data, self.sums)
        if len(self.sums):
            self.moments.write(self.sums)
        return version

    def next(self) -> Recorder:
        """Wait for a slot, and for weights as new as it needs."""
        begin = time.perf_counter()
        with self.board.blocked(self.rank):
            while (at := self.slots.take(self.number)) is None or self.weights.version < self.slots.need[at]:
                self.check()
                waited = time.perf_counter() - begin
                time.sleep(_NAP_S if waited < _SOON_S else _LONG_NAP_S)
                # It may be evaluating, which shows signs of life.
                silent = time.monotonic() - float(self.board.heartbeat[self.learner])
                if min(waited, silent) > self.timeout:
                    raise CoterieError(f"no slot for a rollout for {self.timeout:g} s: the learner hangs")
        self.stages.add("wait", begin)
        self.at = at
        return self.recorders[at]

    def check(self) -> None:
        """Show a sign of life, and leave where the run is over."""
        self.board.heartbeat[self.rank] = time.monotonic()
        if self.board.closed:
            raise Stopped

    def leave(self) -> None:
        """The rollout is whole: hand its slot over."""
        assert self.at is not None
        self.slots.promise(self.number, self.at, self.board.read(self.rank)["produced"])
        self.slots.fill(self.at)
        self.at = None


def _section(config: Config) -> DecoupledConfig:
    return config.decoupled


KIND = ActingKind(
    "actor",
    own_policy=True,
    section=_section,
    refusals=(
        *apart_refusals(_section),
        Refusal(
            lambda c, s: shares_evenly(c) and (c.decoupled.batch_size or c.env.num_envs) % envs_per_child(c) != 0,
            "decoupled.batch_size",
            "must be a multiple of the envs of an actor (env.num_envs x learners / actors)",
        ),
    ),
)
