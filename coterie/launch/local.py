"""Placing a run's learners on this machine: in the caller's own process, or as children that are watched over.

A lone learner runs here, so that a debugger and a notebook work. Several are processes on cores of their own. One that
dies is started again, alone where the others can go on without it (gossip), else all of them from the last checkpoint.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coterie.config import Config
from coterie.exchange.central import fill
from coterie.exchange.diagnostics import Consensus, Cosines, cosine_memory
from coterie.exchange.topology import matrices
from coterie.parallel.affinity import available_cores, place
from coterie.parallel.board import Board
from coterie.parallel.params import FlatParams
from coterie.parallel.processes import Child, Post, listen
from coterie.roles import InlineLearner, Links, exchange_memory, make_model, normalizers
from coterie.run import Run
from coterie.runs import checkpoint
from coterie.serve import Service
from coterie.types import ConfigError, CoterieError, Spec

_REPORT_S = 0.25  # between two reports of a child
_GRACE_S = 1.0  # for the learner whose end made the others fail to be found


def run_here(run: Run, learner: InlineLearner) -> dict[str, Any]:
    """Train in this process."""

    def post(kind: str, content: Any) -> None:
        run.receive(0, kind, content)

    run.poll()
    stop_watching = run.exit_when_stalled()
    try:
        return run.go(Service(learner, run.folder, post).run, learner.close)
    finally:
        stop_watching()


def learner_process(
    post: Post, config: Config, folder: Path, life: int, links: Links, counts: dict[str, int], total: int,
    saved: Path | None,
    done: int,
) -> None:  # fmt: skip
    """A child: one learner, from the beginning or from its part of a checkpoint."""
    learner = InlineLearner(config, life, links)
    try:
        if saved is not None:
            tensors, state = checkpoint.load(saved)
            if links.rank in state["present"]:
                learner.load(checkpoint.learner(tensors, links.rank))
            else:  # it was gone at the end: it goes on from what another had learned
                learner.model.load_state_dict(checkpoint.learner(tensors, state["present"][0])["model"])
        learner.start(counts, total)
        Service(learner, folder, post, _REPORT_S, done).run()
    finally:
        learner.close()


class Placement:
    """Where the learners of a run sit and what they share; made anew when all of them start again."""

    def __init__(self, config: Config, spec: Spec, tensors: checkpoint.Tensors | None = None) -> None:
        assert isinstance(config.learners, int)
        self.config, self.learners = config, config.learners
        gpus = 0 if config.device == "cpu" or config.exchange == "hogwild" else torch.cuda.device_count()
        self.places = place(self.learners, available_cores(), gpus)
        self.board = Board(self.learners)
        self.board.here[:] = 1
        self.meeting = Path(tempfile.mkdtemp(prefix="coterie-")) if config.exchange == "allreduce" else None
        model = make_model(config, spec)
        if tensors:
            model.load_state_dict(tensors["model"])
        params, moments = FlatParams(model), normalizers(config, model)
        self.memory = exchange_memory(config, params, moments, self.learners)
        if tensors and self.memory is not None and config.exchange in ("hogwild", "store"):
            fill(self.memory, tensors["exchange"], moments.read())
        self.gradients = cosine_memory(self.learners, len(params.data)) if config.log.cosines else None

    def links(self, rank: int, rejoin: bool = False) -> Links:
        place = self.places[rank]
        # A learner that sleeps on purpose leaves its core to the others.
        shared = place.gpu < 0 and self.places.count(place) > 1 and not self.config.env.delay
        return Links(
            rank=rank,
            board=self.board,
            memory=self.memory,
            rendezvous=self.meeting / "allreduce" if self.meeting is not None else None,
            gradients=self.gradients,
            rejoin=rejoin,
            gpu=max(place.gpu, 0),
            core=place.cores[0] if shared else -1,
        )

    def readers(self) -> list[Callable[[], dict[str, float]]]:
        """What the lines of metrics tell of the learners' agreement."""
        config, found = self.config, list[Callable[[], dict[str, float]]]()
        gossip = config.exchange == "gossip"
        sequence = matrices(config.gossip.topology, self.learners, config.gossip.peers) if gossip else []
        if gossip and self.memory is not None:
            found.append(Consensus(self.memory, sequence, config.gossip.tau).read)
        if self.gradients is not None:
            peers = np.sum(sequence, 0) if gossip else np.ones((self.learners, self.learners))
            found.append(Cosines(self.gradients, peers).read)
        return found

    def close(self) -> None:
        if self.meeting is not None:
            shutil.rmtree(self.meeting, ignore_errors=True)
        for memory in (self.memory, self.gradients):
            if memory is not None:
                memory.close()


class Crew:
    """The learners of a run as processes."""

    def __init__(self, run: Run, config: Config, saved: Path | None, state: dict[str, Any] | None) -> None:
        self.run, self.config, self.saved, self.state = run, config, saved, state
        self.children: dict[int, Child] = {}
        self.lost: tuple[float, str] | None = None  # when a learner missed another, and what it said
        self.group = self._group()

    def _group(self) -> Placement:
        """A new place for all learners, with the counts of the checkpoint that they go on from."""
        tensors = None
        if self.saved is not None:
            everything, state = checkpoint.load(self.saved)
            tensors = checkpoint.learner(everything, state["present"][0])
        group = Placement(self.config, self.run.spec, tensors)
        for rank in range(group.learners):
            counts = {} if self.state is None else self.state["learners"][rank]
            learned = counts.get("learned", 0)
            group.board.write(rank, {**counts, "started": learned, "produced": learned})
        return group

    def work(self) -> None:
        """Start everybody and see the run through."""
        run = self.run
        self._start_all()
        where = sorted({place.cores for place in self.group.places})
        run.display.note("cores " + ", ".join("+".join(map(str, cores)) for cores in where))
        while not run.over:
            for child, kind, content in listen(self.children.values(), 0.1):
                rank = int(child.name.rsplit("-", 1)[1])
                if self.children.get(rank) is child:  # and not one that was replaced a moment ago
                    self._handle(rank, kind, content)
            if self.lost is not None and time.monotonic() - self.lost[0] > _GRACE_S:
                self._restart_all(self.lost[1])
            run.poll()
            if reason := run.stalled():
                raise CoterieError(reason)

    def close(self) -> None:
        for child in self.children.values():
            child.kill()
        self.group.close()

    def _handle(self, rank: int, kind: str, content: Any) -> None:
        if kind == "end":
            self._ended(rank, content)
        elif kind == "config":
            raise ConfigError(content[0])
        elif kind == "peer":
            self.lost = self.lost or (time.monotonic(), content[0])
        elif kind == "error":
            line, trace = content
            if trace:
                self.run.writer.log(f"learner {rank}:\n{trace}")
            raise CoterieError(f"learner {rank}: {line}")
        else:
            self.run.receive(rank, kind, content)

    def _ended(self, rank: int, manner: str) -> None:
        run = self.run
        self.children.pop(rank)
        if run.over or (run.ending and rank in run.saved):
            return  # it has done all that it had to
        if manner.endswith("exit code 1") and self.lost is not None:
            return  # it missed another learner, whose end is about to be known
        if self.config.exchange != "gossip":
            self._restart_all(f"learner {rank} {manner}")
            return
        run.account.lose(rank)
        if run.board.stopping or run.idle:  # the end is near: the others finish without it
            run.members.discard(rank)
            if not run.members:
                raise CoterieError(f"learner {rank} {manner}, while the run was ending")
            run.give_up_order()
            return
        self._count_restart(f"learner {rank} {manner}", f"learner {rank} comes back with a peer's weights")
        run.give_up_order()
        run.board.beat[rank] = time.monotonic()
        self._start(rank, None, run.board.read(rank), rejoin=True)

    def _restart_all(self, reason: str) -> None:
        run = self.run
        for child in self.children.values():
            child.kill()
        self.children.clear()
        self.lost = None
        if run.board.stopping:
            raise CoterieError(f"{reason}, while the run was ending")
        self.saved = checkpoint.latest(run.root)
        if self.saved is None:
            raise CoterieError(f"{reason}, before there was a checkpoint")
        self._count_restart(reason, f"all learners go back to {self.saved.name}")
        self.state = checkpoint.load(self.saved)[1]
        self.group.close()
        self.group = self._group()
        self._start_all(self.state)

    def _count_restart(self, reason: str, what: str) -> None:
        run = self.run
        run.account.restarts += 1
        if run.account.restarts > self.config.restarts:
            raise CoterieError(f"{reason}; restarts ({self.config.restarts}) are used up")
        run.writer.log(f"{reason}; {what}")
        run.display.note(f"{reason}; {what}")

    def _start_all(self, back: dict[str, Any] | None = None) -> None:
        self.run.join(self.group.board, self.group.readers(), back)
        self.run.poll()
        for rank in range(self.group.learners):
            self._start(rank, self.saved, self.run.board.read(rank))

    def _start(self, rank: int, saved: Path | None, counts: dict[str, int], rejoin: bool = False) -> None:
        run = self.run
        life = run.account.life + 1000 * run.account.restarts  # a learner that is started again sees other episodes
        links, total = self.group.links(rank, rejoin), run.board.sum("learned")
        # An order that is being carried out is for whoever starts meanwhile, too.
        done = run.board.order[0] - (run.order is not None)
        args = (self.config, run.folder, life, links, counts, total, saved, done)
        self.children[rank] = Child(f"coterie-learner-{rank}", self.group.places[rank].cores, learner_process, args)


def run_children(run: Run, config: Config, saved: Path | None, state: dict[str, Any] | None) -> dict[str, Any]:
    """Train with several learners, each a process."""
    crew = Crew(run, config, saved, state)
    return run.go(crew.work, crew.close)
