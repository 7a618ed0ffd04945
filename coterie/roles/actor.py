"""Actors of decoupled acting: envs and a policy of their own, for a learner elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from coterie.acting.decoupled import Desk, Stopped
from coterie.acting.inline import Inline
from coterie.acting.recorder import Recorder, Stages
from coterie.build.factory import (
    Links,
    Policy,
    actor_env,
    envs_of,
    ids_of,
    make_algorithm,
    make_model,
    normalizers,
    patience,
    policy_of,
)
from coterie.build.resources import resolve_resources
from coterie.config import ResolvedConfig
from coterie.envs.make import make_spec
from coterie.models.build import acting_copy
from coterie.models.heads import Moments
from coterie.parallel.affinity import keep_freed_memory
from coterie.parallel.board import COUNTS
from coterie.parallel.params import FlatParams
from coterie.parallel.threads import Team
from coterie.roles.reporting import WorkerReport
from coterie.types import AgentOutput, Inputs, Spec


class Ledge(Protocol):
    """Where an actor gets weights and a recorder, and leaves rollouts: memory that it shares, or a wire."""

    @property
    def first(self) -> Recorder: ...  # any of its recorders
    def pull(self) -> int: ...  # the newest weights; their version
    def next(self) -> Recorder: ...  # waits until another rollout is wanted
    def check(self) -> None: ...  # raises `Stopped` where the run is over
    def leave(self) -> None: ...  # the rollout is whole


class Unrolls:
    """Rollouts of some envs, acted on the CPU as inline acting does it. `config`: the run's; `mine`: with this actor's
    envs; `count` is told of valid rows as they are seen.
    """

    def __init__(
        self, config: ResolvedConfig, mine: ResolvedConfig, spec: Spec, life: int, first_env: int,
        count: Callable[[int], None],
        make_ledge: Callable[[FlatParams, Moments, list[slice], Stages], Ledge],
    ) -> None:  # fmt: skip
        torch.set_num_threads(1)
        keep_freed_memory()
        layout = resolve_resources(replace(mine, device="cpu"), spec)
        self.stages, self.count = Stages(), count
        self.model = make_model(config, spec)
        params = FlatParams(self.model)  # before the copy is made, which follows these tensors
        acting, refresh = acting_copy(self.model, layout.dtype)
        self.envs, rngs = envs_of(mine, layout, life, first_env, union=mine.env.id != config.env.id)
        self.ledge = make_ledge(params, normalizers(config, self.model), self.envs.groups, self.stages)
        self.algorithm = make_algorithm(config, spec)
        policy = policy_of(self.algorithm, acting, rngs, ids_of(self.envs, first_env))
        self.acting = Inline(
            self.envs,
            partial(self._act, policy),
            self.ledge.first,
            self.model.initial_state,
            refresh,
            self.stages,
            Team(1),  # it has one core, and counts without a lock
            config.algo.poll,
            self.ledge.next,
        )
        self.calls = [0] * layout.groups
        self.report = WorkerReport("actor", self.stages, self.acting.failures)

    def run(self, delivered: Callable[[], None]) -> None:
        """Act until the run is over; `delivered` is called after each rollout."""
        with closing(self.acting):
            try:
                for _ in self.acting.rollouts(self._refresh):
                    self.ledge.leave()
                    delivered()
            except Stopped:
                pass

    def close(self) -> None:
        self.acting.close()

    def _act(self, policy: Policy, g: int, inputs: Inputs, state: Tensor | None) -> tuple[AgentOutput, Tensor | None]:
        """Every row after row 0 shows the consequence of a step: it is counted at once, whatever becomes of it."""
        if self.calls[g] % (self.acting.recorder.unroll_length + 1):
            self.count(int((~inputs.is_first).sum()))
        self.calls[g] += 1
        self.ledge.check()
        begin = time.perf_counter()
        out = policy(g, inputs, state)
        self.report.latencies.append(time.perf_counter() - begin)
        return out

    def _refresh(self) -> None:
        begin = time.perf_counter()
        version = self.ledge.pull()
        self.algorithm.acts_at(version)
        self.acting.publish(version)
        self.stages.add("pull", begin)


class Actor:
    """An actor that the run started: number `number` of its learner, with the board's row `row`."""

    def __init__(self, config: ResolvedConfig, life: int, links: Links, number: int, row: int) -> None:
        assert links.slots is not None
        assert links.weights is not None
        mine, first = actor_env(config, number, links.rank)
        self._counts = links.board.counts[row]
        self._replaced = int(self._counts[COUNTS.index("replaced")])  # by whoever was this actor before
        slots, weights, timeout = links.slots, links.weights, patience(config)

        def ledge(params: FlatParams, moments: Moments, groups: list[slice], stages: Stages) -> Desk:
            return Desk(
                slots, weights, params, moments, links.board, row, links.rank, number, groups, stages, timeout,
            )  # fmt: skip

        self.unrolls = Unrolls(config, mine, make_spec(config.env, config.atari), life, first, self._count, ledge)

    def _count(self, rows: int) -> None:
        self._counts[COUNTS.index("produced")] += rows

    def run(self, post: Callable[[str, Any], None]) -> None:
        def delivered() -> None:
            self._counts[COUNTS.index("delivered")] = self._counts[COUNTS.index("produced")]
            self._counts[COUNTS.index("replaced")] = self._replaced + self.unrolls.envs.replaced
            if self.unrolls.report.is_due():
                post("acted", self.unrolls.report.take())

        self.unrolls.run(delivered)

    def close(self) -> None:
        self.unrolls.close()
