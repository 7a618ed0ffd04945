"""The child processes of a run on this machine: pinned to cores, watched, and restarted within budgets.

A learner that dies is restarted alone where the exchange lets it rejoin the others (gossip), else all go back to the
last checkpoint. An actor that dies is restarted alone.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from coterie.acting.table import acting_kind
from coterie.config import ResolvedConfig
from coterie.errors import ConfigError, CoterieError, counted
from coterie.exchange.mailboxes import Link
from coterie.exchange.table import exchange_kind
from coterie.launch.chaos import FaultInjector
from coterie.launch.coordinator import Coordinator
from coterie.launch.placement import Placement
from coterie.launch.rescue import Rescue
from coterie.launch.retries import NOT_STARTED, RestartBudget, RestartDelays, Starts
from coterie.parallel.clock import awake
from coterie.parallel.processes import Child, exited, listen
from coterie.roles.entry import Start, learner_process, worker_process
from coterie.runs import checkpoint

_GRACE_S = 1.0  # wait for a dead learner's exit message after another learner has reported it lost
_LEAVE_S = 15.0  # for actors to shut down at the end of a run
_STARVED_S = 20.0  # for which all learners may wait after a signal


class Supervisor:
    """The learners and actors of a run as child processes, by their rows of the board."""

    def __init__(self, run: Coordinator, config: ResolvedConfig, saved: Path | None, link: Link | None) -> None:
        self.run, self.config, self.saved, self.link = run, config, saved, link
        self.kind = acting_kind(config)
        self.children: dict[int, Child] = {}
        self.starts = Starts(self.children, config.log.unsaved_limit, run.log)
        self.state: dict[str, Any] | None = None  # of the checkpoint `saved`
        self.group = self._place()
        self.learner_restarts = RestartBudget("restarts", config.restarts)
        self.actor_restarts = RestartBudget(f"{config.acting}.restarts", self.kind.restarts(config))
        self.back_off = RestartDelays()  # of actors
        self.rescue: Rescue | None = None  # while a learner is gone and what was learned is being saved
        self.missed: tuple[float, str] | None = None  # when a learner could not reach another one, and its report
        self.waiting = awake(), 0  # since when all learners wait, after a signal, and the rows that were produced then
        self.joins = False  # whether the learners begin with another run's weights
        self.chaos: FaultInjector | None = None
        run.on_end = self._dismiss_actors
        run.processes = lambda: {row: (self._name(row), x.process.pid or 0) for row, x in self.children.items()}

    def _place(self) -> Placement:
        """A new place for all learners, with the weights and counts of the checkpoint `saved`."""
        tensors = None
        if self.saved is not None:
            alike, seconds = exchange_kind(self.config).in_lockstep, self.config.log.stall / 2
            tensors, self.state, *_ = checkpoint.load_part(self.saved, 0, alike, seconds)
        group = Placement(self.config, self.run.spec, tensors)
        group.board.heartbeats[:] = time.monotonic()
        for rank in range(group.learners):
            counts = {} if self.state is None else self.state["learners"][rank]
            learned = counts.get("learned", 0)
            group.board.write(rank, {**counts, "started": learned, "produced": learned, "dropped": 0, "in_flight": 0})
        return group

    def work(self) -> None:
        """Start all processes and see the run through."""
        run = self.run
        if self.link is not None:
            assert self.group.memory is not None
            self.joins = self.link.start(self.group.memory, self.saved is None, lambda: run.signal is not None)
        self._start_all()
        if self.config.chaos.every:
            cut = self.link.cut if self.link is not None else lambda: False
            self.chaos = FaultInjector(self.config.chaos, lambda line: run.writer.log(line), self._is_spared, cut)
        cores = sorted({place.cores for place in self.group.places})
        run.display.note("cores " + ", ".join("+".join(map(str, each)) for each in cores))
        while not run.over or (self.config.callbacks and 0 in self.children):  # learner 0 makes their last calls
            rows = {child: row for row, child in self.children.items()}
            for child, kind, content in listen(rows, 0.1):
                if self.children.get(rows[child]) is child:  # and has not been replaced meanwhile
                    self._receive(rows[child], kind, content)
            for row in self.starts.retry(run.board):
                self._ended(row, NOT_STARTED)
            for row in self.back_off.due():
                self._start_actor(row)
            if self.chaos is not None:
                calm = bool(run.idle) or run.board.stopping
                self.chaos.poll({self._name(row): child for row, child in self.children.items()}, calm)
            for line in self.link.lines() if self.link is not None else ():
                run.log(line)
            if self.missed is not None and self.rescue is None and awake() - self.missed[0] > _GRACE_S:
                self._restart_all(self.missed[1])
            run.poll()
            if (rescue := self.rescue) is not None and rescue.is_over:
                rescue.settle()
                self._restart_all(rescue.reason)
            if self._is_starved():
                self._end_at_last_checkpoint("all learners wait for rollouts that no process produces")
            elif not run.over and (stalled := run.stalled()):
                self._end_hung(*stalled)

    def close(self) -> None:
        if self.chaos is not None:
            self.chaos.close()
            self.run.extra_summary["chaos"] = dict(self.chaos.done)
        self._end_all()
        if self.link is not None:
            self.link.close(self.run.over and not self.run.interrupted)
        self.group.close()

    def _name(self, row: int) -> str:
        actor = row - self.group.learners
        return f"learner {row}" if actor < 0 else f"{self.kind.child} {actor}"

    def _is_spared(self, name: str) -> bool:
        """Whether chaos may not kill a process, because the run could not survive one more death after it."""
        if not name.startswith("learner "):
            return self.actor_restarts.left <= 1
        return self.learner_restarts.left <= 1 or (self.run.sealed or self.saved) is None

    def _is_starved(self) -> bool:
        """Whether all learners of a run that stops have waited too long for rollouts that no process produces."""
        run, now, produced = self.run, awake(), self.run.board.sum("produced")
        waits = run.board.stopping and not (run.over or run.idle) and run.board.all_blocked(run.members)
        if not waits or produced != self.waiting[1]:
            self.waiting = now, produced
        return now - self.waiting[0] > _STARVED_S

    def _receive(self, row: int, kind: str, content: Any) -> None:
        if kind == "end":
            self._ended(row, content)
        elif kind == "config":
            raise ConfigError(content[0])
        elif kind == "peer":
            self.missed = self.missed or (awake(), content[0])
        elif kind == "error":
            line, trace = content
            raise CoterieError(f"{self._name(row)}: {line}", trace and f"{self._name(row)}:\n{trace}")
        else:
            self.run.receive(row, kind, content)

    def _end_hung(self, row: int, silent: float) -> None:
        """Kill a process that hangs: it is restarted like one that died."""
        if (child := self.children.get(row)) is not None:  # else it died after its part of a checkpoint that failed
            child.kill()
        self._ended(row, f"hung (no rollout for {silent:.0f} s: log.stall) and was killed" if child else "is gone")

    def _ended(self, row: int, manner: str) -> None:
        self.children.pop(row, None)
        (self._learner_ended if row < self.group.learners else self._actor_ended)(row, manner)

    # Learners

    def _learner_ended(self, rank: int, manner: str) -> None:
        run, reason = self.run, f"learner {rank} {manner}"
        if run.over or (run.ending and rank in run.saved):
            return  # its work was complete
        if manner == exited(1) and self.missed is not None:
            return  # it ended because it lost another learner, whose death is reported next
        if self.group.memory is not None:
            exchange_kind(self.config).leave(self.group.memory, rank)
        if not exchange_kind(self.config).restarts_one(self.config):
            self.rescue = self.rescue or Rescue(run, reason)
            self.rescue.lose(rank, self.group.kept)
            return
        rows = self.group.rows(rank)
        self.back_off.forget(*rows)
        self.starts.forget((rank, *rows))
        for row in rows:
            if (child := self.children.pop(row, None)) is not None:
                child.kill()
        run.ledger.lose(rank, rows)
        run.give_up_order()
        if run.signal is not None or run.board.stopping or run.idle:  # the others finish without it
            run.members.discard(rank)
            if not run.members:
                return self._end_at_last_checkpoint(reason)
            return run.log(f"{reason}; the others finish without it" + " and its evaluations" * (rank == 0))
        self._count_restart(reason, f"learner {rank} rejoins with a peer's weights")
        run.board.start(rank)
        # It starts from the checkpoint, then takes a peer's newer weights if there is a peer.
        self._start_learner(rank, run.sealed or self.saved, rejoin=True, renew=bool(rows))

    def _restart_all(self, reason: str) -> None:
        self.rescue, self.run.paused = None, False
        self._end_all()
        if not self.starts.wait(lambda: self.run.signal is not None) or self.run.board.stopping:
            self._end_at_last_checkpoint(reason)
            return
        self._count_restart(reason, f"all learners go back to {self._go_back(reason)}")
        self._start_all(self.state)

    def _end_at_last_checkpoint(self, reason: str) -> None:
        """End at the last checkpoint, because no learner can reach another one; progress since then is lost. Only
        after a signal: the run can be resumed.
        """
        self._end_all()
        if self.run.signal is None:
            raise CoterieError(f"{reason}, while the run was ending")
        self.run.writer.log(f"{reason}; the run ends at {self._go_back(reason)}")
        self.run.join(self.group.board, [], self.state)
        self.run.over = True

    def _end_all(self) -> None:
        for child in self.children.values():
            child.kill()
        self.children.clear()
        self.starts.forget(rows := range(len(self.group.board.counts)))
        self.back_off.forget(*rows)
        self.missed = None

    def _go_back(self, reason: str) -> str:
        """A new place with the state of the last checkpoint; returns its name."""
        self.saved = checkpoint.latest(self.run.root, self.config.log.stall / 2)
        if self.saved is None:
            raise CoterieError(f"{reason}, before there was a checkpoint")
        self.group.close()
        self.group = self._place()
        return self.saved.name

    def _count_restart(self, reason: str, what: str) -> None:
        self.run.ledger.restarts += 1
        self.learner_restarts.restart(reason)
        self.run.log(f"{reason}; {what}")

    def _start_all(self, back: dict[str, Any] | None = None) -> None:
        """Start all learners and actors. `back`: the state that they are rolled back to, if any."""
        readers, ledger = self.group.readers(), self.run.ledger
        if (link := self.link) is not None:
            readers.append(lambda: link.gauges(ledger.env_steps - ledger.begin_steps))
        self.run.join(self.group.board, readers, back)
        self.run.poll()
        children = ("learner", self.group.learners), (self.kind.child, self.group.actors)
        self.run.display.doing(" and ".join(counted(count, name) for name, count in children if count))
        for rank in range(self.group.learners):
            self._start_learner(rank, self.saved, self.joins)

    def _start_learner(self, rank: int, saved: Path | None, rejoin: bool, renew: bool = False) -> None:
        """Start a learner and its actors. `renew`: with new memory between them."""
        self.starts.start(rank, partial(self._make_learner, rank, saved, rejoin, renew))

    def _make_learner(self, rank: int, saved: Path | None, rejoin: bool, renew: bool) -> Child:
        run = self.run
        if renew:
            self.group.renew(rank)
        life_number = run.ledger.resumes + 1000 * run.ledger.restarts  # a restarted learner sees other episodes
        # A learner that starts while an order is pending must carry out that order, too.
        done = run.board.order[0] - (run.order is not None)
        start = Start(life_number, run.board.read(rank), run.board.sum("learned"), saved, done)
        args = (self.config, run.folder, self.group.links(rank, rejoin), start)
        child = Child(f"coterie-learner-{rank}", self.group.places[rank].cores, learner_process, args)
        for row in self.group.rows(rank):
            self._start_actor(row)
        return child

    # Actors

    def _start_actor(self, row: int) -> None:
        (links, number, cores), ledger = self.group.actor(row), self.run.ledger
        life_number = ledger.resumes + 1000 * (ledger.restarts + self.actor_restarts.total)
        self.run.board.start(row)
        args = (self.config, life_number, replace(links, folder=self.run.folder), number, row)
        name = f"coterie-actor-{row - self.group.learners}"
        self.starts.start(row, partial(Child, name, cores, worker_process, args))

    def _actor_ended(self, row: int, manner: str) -> None:
        run, reason = self.run, f"{self._name(row)} {manner}"
        if not (run.board.closed and manner == exited(0)):  # else it has left, and its counts stay
            run.ledger.lose_actor(row, self.group.actor_ended(row))
        if not run.board.closed and not (run.board.stopping and manner == NOT_STARTED):
            run.ledger.actor_restarts += 1
            self.actor_restarts.restart(reason)
            run.log(f"{reason}; it is restarted")
            self.back_off.died(row)

    def _dismiss_actors(self) -> None:
        """Nothing more is learned: the actors shut down with a last report, and their counts stay."""
        if self.chaos is not None:
            self.chaos.close()  # an actor that is stopped could not leave
        self.run.board.close()
        self.starts.forget(rows := range(self.group.learners, len(self.run.board.counts)))
        self.back_off.forget(*rows)
        end = awake() + _LEAVE_S
        leaving = {child: row for row, child in self.children.items() if row >= self.group.learners}
        while leaving and awake() < end:
            for child, kind, content in listen(leaving, 0.1):
                if kind == "acted":
                    self.run.take(leaving[child], content)
                elif kind in ("error", "config"):
                    self.run.writer.log(f"{self._name(leaving[child])}: {content[0]}")
                elif kind == "end":
                    self._ended(leaving.pop(child), content)
        for child, row in leaving.items():
            child.kill()
            self._ended(row, "did not leave")
