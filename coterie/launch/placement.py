"""Where the processes of a run on one machine run, and the memory that they share."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from coterie.acting.base import Memory
from coterie.acting.table import acting_kind
from coterie.build.factory import ProcessContext, exchange_setup, make_model, memory_setup, normalizers
from coterie.build.resources import gpus_of
from coterie.build.warm_start import first_model
from coterie.config import ResolvedConfig
from coterie.exchange.table import exchange_kind
from coterie.instruments.consensus import Consensus, Cosines, change_memory, cosine_memory
from coterie.parallel.board import Board
from coterie.parallel.hardware import assign_cores, available_cores
from coterie.parallel.params import FlatParams
from coterie.parallel.processes import scratch_folder
from coterie.parallel.weights import Weights
from coterie.runs import checkpoint
from coterie.types import Spec


class Placement:
    """Where the learners and actors of a run run, and what they share; made again when all of them restart."""

    def __init__(self, config: ResolvedConfig, spec: Spec, tensors: checkpoint.Tensors | None = None) -> None:
        self.config, self.learners = config, config.learners
        self.places = assign_cores(self.learners, available_cores(), gpus_of(config))
        self.actors = config.actors
        self.board = Board(self.learners, self.actors)
        kind = exchange_kind(config)
        self.meeting = scratch_folder() if kind.in_lockstep and gpus_of(config) > 1 else None
        self.mixing = kind.mixing(config, self.learners)
        model = make_model(config, spec) if tensors else first_model(config, spec)
        if tensors:
            model.load_state_dict(tensors["model"])
        params, moments = FlatParams(model), normalizers(config, model)
        rendezvous = self.meeting / "allreduce" if self.meeting is not None else None
        context = ProcessContext(board=self.board, rendezvous=rendezvous, mixing=self.mixing)
        self.memory = kind.memory(exchange_setup(config, params, moments, context))
        if tensors and self.memory is not None:
            kind.restore(self.memory, tensors["exchange"], moments.read())
        self.gradients = cosine_memory(self.learners, len(params.data)) if config.log.cosines else None
        self.changes = change_memory(self.learners) if config.log.consensus and self.mixing is not None else None
        # Several learners need none: those that are left save what all have learned.
        rescued = self.learners == 1 and not kind.restarts_one(config)
        self.kept = Weights(len(params.data), moments.size) if rescued else None
        context = replace(context, memory=self.memory, kept=self.kept)
        self.context = replace(context, gradients=self.gradients, changes=self.changes)
        self._memory_setup = memory_setup(config, spec, model, params)
        self.acting: dict[int, Memory | None] = {}
        for rank in range(self.learners):
            self.renew(rank)

    def renew(self, rank: int) -> None:
        """Make new memory between a learner and its child processes, none of which is running."""
        if (old := self.acting.pop(rank, None)) is not None:
            old.close()
        self.acting[rank] = acting_kind(self.config).memory(self._memory_setup)

    def rows(self, rank: int) -> list[int]:
        """The board's rows of a learner's actors: actor i is learner i mod L's."""
        return [self.learners + i for i in range(rank, self.actors, self.learners)]

    def actor_ended(self, row: int) -> int:
        """An actor is dead. Others may take over its work, except in lockstep. Returns the rows that its learner has
        received, as far as the memory shows.
        """
        number, rank = divmod(row - self.learners, self.learners)
        if (memory := self.acting[rank]) is None:
            return 0
        delivered = memory.delivered(number)
        if not acting_kind(self.config).lockstep(self.config):
            memory.abandon(number)
        return delivered

    def actor(self, row: int) -> tuple[ProcessContext, int, tuple[int, ...]]:
        """An actor's links, its number among its learner's, and its core."""
        number, rank = divmod(row - self.learners, self.learners)
        cores = self.places[rank].cores
        stepping = cores[1:] if self.places[rank].gpu >= 0 and len(cores) > 1 else cores
        alone = acting_kind(self.config).own_policy
        return self.links(rank), number, (stepping[number % len(stepping)],) if alone else tuple(stepping)

    def links(self, rank: int, rejoin: bool = False) -> ProcessContext:
        place = self.places[rank]
        # A learner with `env.delay` sleeps, and one with actors or env hosts waits, so it does not hold its core.
        waits = self.config.env.delay or acting_kind(self.config).has_children
        shared = place.gpu < 0 and self.places.count(place) > 1 and not waits
        return replace(
            self.context,
            rank=rank,
            rejoin=rejoin,
            gpu=max(place.gpu, 0),
            core=place.cores[0] if shared else -1,
            acting=self.acting[rank],
        )

    def readers(self) -> list[Callable[[], dict[str, float]]]:
        """Metrics of how far the learners agree."""
        config, found = self.config, list[Callable[[], dict[str, float]]]()
        if self.changes is not None and self.memory is not None and self.mixing is not None:
            found.append(Consensus(self.memory, self.changes, self.mixing, config).read)
        if self.gradients is not None:
            peers = np.ones((self.learners, self.learners)) if self.mixing is None else np.sum(self.mixing, 0)
            found.append(Cosines(self.gradients, peers).read)
        return found

    def close(self) -> None:
        self.board.release()
        if self.kept is not None:
            self.kept.release()
        if self.meeting is not None:
            shutil.rmtree(self.meeting, ignore_errors=True)
        for memory in (self.memory, self.gradients, self.changes, *self.acting.values()):
            if memory is not None:
                memory.close()
