"""Placing a run's learners on this machine: in the caller's own process, or as children that are watched over.

A lone learner runs here, so that a debugger and a notebook work. Several are processes on cores of their own. One that
dies is started again, alone where the others can go on without it (gossip), else all of them from the last checkpoint.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from coterie.config import Config
from coterie.exchange.central import fill
from coterie.parallel.affinity import available_cores, place
from coterie.parallel.board import Board
from coterie.parallel.params import FlatParams
from coterie.parallel.processes import Child, Post, listen
from coterie.parallel.shm import SharedArrays
from coterie.roles import InlineLearner, Links, exchange_memory, make_model, normalizers
from coterie.run import Run
from coterie.runs import checkpoint
from coterie.serve import Service
from coterie.types import ConfigError, CoterieError

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
) -> None:  # fmt: skip
    """A child: one learner, from the beginning or from its part of a checkpoint."""
    learner = InlineLearner(config, life, links)
    try:
        if saved is not None and (mine := checkpoint.learner(checkpoint.load(saved)[0], links.rank)):
            learner.load(mine)
        learner.start(counts, total)
        Service(learner, folder, post, _REPORT_S).run()
    finally:
        learner.close()


class Crew:
    """The learners of a run as processes."""

    def __init__(self, run: Run, config: Config, saved: Path | None, state: dict[str, Any] | None) -> None:
        self.run, self.config = run, config
        self.children: dict[int, Child] = {}
        gpus = 0 if config.device == "cpu" or config.exchange == "hogwild" else torch.cuda.device_count()
        self.places = place(run.learners, available_cores(), gpus)
        self.memory: SharedArrays | None = None
        self.meeting = Path(tempfile.mkdtemp(prefix="coterie-"))
        self.epoch = 0
        self.lost: tuple[float, str] | None = None  # when a learner missed another, and what it said
        self.saved, self.state = saved, state

    def work(self) -> None:
        """Start everybody and see the run through."""
        run = self.run
        self._start_all()
        where = sorted({place.cores for place in self.places})
        run.display.note("cores " + ", ".join("+".join(map(str, cores)) for cores in where))
        while not run.over:
            for child, kind, content in listen(self.children.values(), 0.1):
                self._handle(int(child.name.rsplit("-", 1)[1]), kind, content)
            if self.lost is not None and time.monotonic() - self.lost[0] > _GRACE_S:
                self._restart_all(self.lost[1])
            run.poll()
            if reason := run.stalled():
                raise CoterieError(reason)

    def close(self) -> None:
        for child in self.children.values():
            child.kill()
        shutil.rmtree(self.meeting, ignore_errors=True)
        if self.memory is not None:
            self.memory.close()

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
        if run.over:
            return
        if manner.endswith("exit code 1") and self.lost is not None:
            return  # it missed another learner, whose end is about to be known
        if self.config.exchange != "gossip":
            self._restart_all(f"learner {rank} {manner}")
            return
        run.lose(rank)
        if run.board.stopping or run.idle:  # the end is near: the others finish without it
            run.members.discard(rank)
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
        run.roll_back(self.state, Board(run.learners))
        self._start_all()

    def _count_restart(self, reason: str, what: str) -> None:
        run = self.run
        run.restarts += 1
        if run.restarts > self.config.restarts:
            raise CoterieError(f"{reason}; restarts ({self.config.restarts}) are used up")
        run.writer.log(f"{reason}; {what}")
        run.display.note(f"{reason}; {what}")

    def _start_all(self) -> None:
        """All learners, with new memory to share, from the checkpoint if there is one."""
        run, spec, tensors = self.run, self.run.spec, None
        if self.memory is not None:
            self.memory.close()
        model = make_model(self.config, spec)
        if self.saved is not None:
            tensors = checkpoint.learner(checkpoint.load(self.saved)[0], 0)
            model.load_state_dict(tensors["model"])
        params, moments = FlatParams(model), normalizers(self.config, model)
        self.memory = exchange_memory(self.config, params, moments, run.learners)
        if tensors is not None and self.config.exchange in ("hogwild", "store") and self.memory is not None:
            fill(self.memory, tensors["exchange"], moments.read())
        self.epoch += 1
        run.board.here[:] = 1
        for rank in range(run.learners):
            counts = {} if self.state is None else self.state["learners"][rank]
            run.board.write(rank, counts)
            run.board.write(rank, {"started": counts.get("learned", 0), "produced": counts.get("learned", 0)})
        run.poll()
        for rank in range(run.learners):
            self._start(rank, self.saved, run.board.read(rank))

    def _start(self, rank: int, saved: Path | None, counts: dict[str, int], rejoin: bool = False) -> None:
        run, place = self.run, self.places[rank]
        links = Links(
            rank, run.board, self.memory, self.meeting / f"epoch{self.epoch}", rejoin, max(place.gpu, 0),
        )  # fmt: skip
        life = run.life + 1000 * run.restarts  # a learner that is started again sees other episodes
        total = run.board.sum("learned")
        args = (self.config, run.folder, life, links, counts, total, saved)
        self.children[rank] = Child(f"coterie-learner-{rank}", place.cores, learner_process, args)


def run_children(run: Run, config: Config, saved: Path | None, state: dict[str, Any] | None) -> dict[str, Any]:
    """Train with several learners, each a process."""
    crew = Crew(run, config, saved, state)
    return run.go(crew.work, crew.close)
