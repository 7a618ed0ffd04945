"""Placing a run's learners and actors on this machine: in the caller's own process, or as children that are watched.

A lone learner that acts itself runs here, so that a debugger and a notebook work. Several, and actors, are processes on
cores of their own. A learner that dies is started again, alone where the others can go on without it (gossip), else all
of them from the last checkpoint; an actor that dies is started again alone, and fills the slot that it left.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from coterie.acting.table import acting_kind
from coterie.build.factory import make_model
from coterie.config import ResolvedConfig
from coterie.exchange.table import exchange_kind
from coterie.launch.chaos import Disturber
from coterie.launch.coordinator import Run
from coterie.launch.placement import Placement
from coterie.parallel.processes import Child, listen
from coterie.remote.gossip_client import Link
from coterie.remote.gossip_hub import Meeting
from coterie.roles.entry import actor_process, learner_process
from coterie.roles.learner import Learner
from coterie.roles.learner_service import Service
from coterie.runs import checkpoint
from coterie.types import ConfigError, CoterieError

_GRACE_S = 1.0  # for the learner whose end made the others fail to be found
_LEAVE_S = 5.0  # for actors to leave at the end of a run
_BACK_OFF_S = 60.0  # most that an actor waits before it is started again
_FORGOTTEN_S = 120.0  # an actor that lived as long is not one that dies again and again


def run_here(run: Run, learner: Learner) -> dict[str, Any]:
    """Train in this process."""

    def post(kind: str, content: Any) -> None:
        run.receive(0, kind, content)

    run.poll()
    stop_watching = run.exit_when_stalled()
    try:
        return run.go(Service(learner, run.folder, post).run, learner.close)
    finally:
        stop_watching()


class Crew:
    """The learners and actors of a run as processes, by their rows of the board."""

    def __init__(
        self, run: Run, config: ResolvedConfig, saved: Path | None, state: dict[str, Any] | None, link: Link | None
    ) -> None:
        self.run, self.config, self.saved, self.state = run, config, saved, state
        self.children: dict[int, Child] = {}
        self.lost: tuple[float, str] | None = None  # when a learner missed another, and what it said
        self.link = link
        self.group = self._group()
        self.due: dict[int, float] = {}  # when actors that died are started again
        self.deaths = 0  # of actors
        self.ends: dict[int, tuple[float, int]] = {}  # of each actor: when it died last, and how often in a row
        self.peers: Meeting | Link | None = self.link  # runs on other machines
        self.chaos: Disturber | None = None
        self.joins = False  # the learners begin with the weights of such a run's
        run.on_end = self._dismiss
        run.processes = self._processes

    def _group(self) -> Placement:
        """A new place for all learners, with the counts of the checkpoint that they go on from."""
        tensors = None
        if self.saved is not None:
            everything, state = checkpoint.load(self.saved)
            tensors = checkpoint.learner(everything, state["present"][0])
        group = Placement(self.config, self.run.spec, tensors, self.link.circle if self.link is not None else None)
        group.board.heartbeat[:] = time.monotonic()
        for rank in range(group.learners):
            counts = {} if self.state is None else self.state["learners"][rank]
            learned = counts.get("learned", 0)
            group.board.write(rank, {**counts, "started": learned, "produced": learned, "dropped": 0})
        return group

    def _meet(self) -> None:
        group = self.group
        if self.config.gossip.bind:
            assert group.circle is not None
            assert group.memory is not None
            self.peers = Meeting(self.config, group.circle, group.memory, group.learners, group.net)
        elif self.link is not None:
            assert group.memory is not None
            self.joins = self.link.attach(group.memory, self.saved is None, lambda: self.run.signal is not None)
            self._say(f"gossip with the run at {self.config.gossip.connect}")

    def _say(self, line: str) -> None:
        self.run.writer.log(line)
        self.run.display.note(line)

    def work(self) -> None:
        """Start everybody and see the run through."""
        run = self.run
        self._meet()
        self._start_all()
        if self.config.chaos.every:
            self.chaos = Disturber(
                self.config.chaos,
                self.group.learners,
                lambda line: run.writer.log(line),  # the writer is another one after a restart
                self._name,
                self._is_spared,
                self._cut,
            )
        where = sorted({place.cores for place in self.group.places})
        run.display.note("cores " + ", ".join("+".join(map(str, cores)) for cores in where))
        while not run.over:
            for child, kind, content in listen(self.children.values(), 0.1):
                row = next((row for row, one in self.children.items() if one is child), None)
                if row is not None:  # and not one that was replaced a moment ago
                    self._handle(row, kind, content)
            for row in [row for row, when in self.due.items() if time.monotonic() >= when]:
                self._start_actor(row)
            if self.chaos is not None:
                self.chaos.poll(self.children, calm=bool(run.idle) or run.signal is not None)
            for line in self.peers.tell() if self.peers is not None else ():
                self._say(line)
            if self.lost is not None and time.monotonic() - self.lost[0] > _GRACE_S:
                self._restart_all(self.lost[1])
            run.poll()
            if run.starved:
                self._end_at_the_last()
            elif reason := run.stalled():
                raise CoterieError(reason)

    def _is_spared(self, row: int) -> bool:
        """Whether the run could not bear that this one is killed by chaos, or by anything else right after it."""
        own, account = self.config, self.run.account
        if row >= self.group.learners:
            return self.deaths + 1 >= acting_kind(own).restarts(own)
        return account.restarts + 1 >= own.restarts or checkpoint.latest(self.run.root) is None

    def _cut(self) -> bool:
        return self.link is not None and self.link.cut()

    def close(self) -> None:
        if self.chaos is not None:
            self.chaos.close()
            self.run.more["chaos"] = dict(self.chaos.done)
        for child in self.children.values():
            child.kill()
        if self.peers is not None:
            self.peers.close(self.run.over and self.run.signal is None)
        self.group.close()

    def _name(self, row: int) -> str:
        actor = row - self.group.learners
        kind = acting_kind(self.config).child
        return f"learner {row}" if actor < 0 else f"{kind} {actor}"

    def _processes(self) -> dict[int, tuple[str, int]]:
        return {row: (self._name(row), child.process.pid or 0) for row, child in self.children.items()}

    def _handle(self, row: int, kind: str, content: Any) -> None:
        if kind == "end":
            (self._ended if row < self.group.learners else self._actor_ended)(row, content)
        elif kind == "config":
            raise ConfigError(content[0])
        elif kind == "peer":
            self.lost = self.lost or (time.monotonic(), content[0])
        elif kind == "error":
            line, trace = content
            if trace:
                self.run.writer.log(f"{self._name(row)}:\n{trace}")
            raise CoterieError(f"{self._name(row)}: {line}")
        else:
            self.run.receive(row, kind, content)

    def _ended(self, rank: int, manner: str) -> None:
        run = self.run
        self.children.pop(rank)
        if run.over or (run.ending and rank in run.saved):
            return  # it has done all that it had to
        if manner.endswith("exit code 1") and self.lost is not None:
            return  # it missed another learner, whose end is about to be known
        if not exchange_kind(self.config).rejoins:
            self._restart_all(f"learner {rank} {manner}")
            return
        rows = self.group.rows(rank)
        for row in rows:
            self._drop_actor(row)
        run.account.lose(rank, rows)
        self.group.leave(rank)
        if run.board.stopping or run.idle:  # the end is near: the others finish without it
            run.members.discard(rank)
            if not run.members:
                raise CoterieError(f"learner {rank} {manner}, while the run was ending")
            run.give_up_order()
            return
        self._count_restart(f"learner {rank} {manner}", f"learner {rank} comes back with a peer's weights")
        run.give_up_order()
        run.board.heartbeat[rank] = time.monotonic()
        if rows:
            self.group.renew(rank, run.spec, make_model(self.config, run.spec))
        # With what the others learned since, where there are others.
        self._start(rank, checkpoint.latest(run.root), run.board.read(rank), rejoin=True)
        for row in rows:
            self._start_actor(row)

    def _drop_actor(self, row: int) -> None:
        self.due.pop(row, None)
        self.run.actors.discard(row)
        if (child := self.children.pop(row, None)) is not None:
            child.kill()

    def _actor_ended(self, row: int, manner: str) -> None:
        """An actor is gone: it is started again after a while, the longer the more often that happened."""
        run = self.run
        self.children.pop(row)
        run.actors.discard(row)
        run.account.lose_actor(row, self.group.delivered(row))
        if run.over or run.board.closed:
            return
        if not acting_kind(self.config).lockstep(self.config):  # the others fill what it left
            self.group.abandon(row)
        now = time.monotonic()
        last, often = self.ends.get(row, (now, 0))
        self.ends[row] = now, often + 1 if now - last < _FORGOTTEN_S else 0
        self.deaths += 1
        if self.deaths > (most := acting_kind(self.config).restarts(self.config)):
            raise CoterieError(f"{self._name(row)} {manner}; {self.config.acting}.restarts ({most}) are used up")
        run.writer.log(f"{self._name(row)} {manner}; it is started again")
        self.due[row] = now + min(_BACK_OFF_S, 0.1 * 2 ** self.ends[row][1])

    def _start_actor(self, row: int) -> None:
        self.due.pop(row, None)
        links, number, cores = self.group.actor(row)
        life = self.run.account.life + 1000 * (self.run.account.restarts + self.deaths)
        self.run.board.heartbeat[row] = time.monotonic()
        args = (self.config, life, links, number, row)
        self.children[row] = Child(f"coterie-actor-{row - self.group.learners}", cores, actor_process, args)
        self.run.actors.add(row)

    def _dismiss(self) -> None:
        """No learner learns any more: the actors leave, and what they had counted stays."""
        self.run.board.close()
        self.due.clear()
        end = time.monotonic() + _LEAVE_S
        for row in [row for row in self.children if row >= self.group.learners]:
            child = self.children.pop(row)
            self.run.actors.discard(row)
            child.process.join(max(0.0, end - time.monotonic()))
            child.kill()

    def _restart_all(self, reason: str) -> None:
        self._end_all()
        if self.run.board.stopping:
            raise CoterieError(f"{reason}, while the run was ending")
        self._count_restart(reason, f"all learners go back to {self._go_back(reason)}")
        self._start_all(self.state)

    def _end_at_the_last(self) -> None:
        """No learner comes to a checkpoint any more: what came after the last one is lost."""
        reason = "all learners wait for rollouts that nobody makes"
        self._end_all()
        self.run.writer.log(f"{reason}; the run ends at {self._go_back(reason)}")
        self.run.join(self.group.board, [], self.state)
        self.run.over = True

    def _end_all(self) -> None:
        for child in self.children.values():
            child.kill()
        self.children.clear()
        self.due.clear()
        self.run.actors.clear()
        self.lost = None

    def _go_back(self, reason: str) -> str:
        """A new group with the state of the last checkpoint; returns that one's name."""
        self.saved = checkpoint.latest(self.run.root)
        if self.saved is None:
            raise CoterieError(f"{reason}, before there was a checkpoint")
        self.state = checkpoint.load(self.saved)[1]
        self.group.close()
        self.group = self._group()
        return self.saved.name

    def _count_restart(self, reason: str, what: str) -> None:
        run = self.run
        run.account.restarts += 1
        if run.account.restarts > self.config.restarts:
            raise CoterieError(f"{reason}; restarts ({self.config.restarts}) are used up")
        run.writer.log(f"{reason}; {what}")
        run.display.note(f"{reason}; {what}")

    def _start_all(self, back: dict[str, Any] | None = None) -> None:
        readers = self.group.readers()
        if (peers := self.peers) is not None:
            account = self.run.account
            readers.append(lambda: peers.gauges(account.env_steps - account.begin_steps))
        self.run.join(self.group.board, readers, back)
        self.run.poll()
        for rank in range(self.group.learners):
            self._start(rank, self.saved, self.run.board.read(rank), rejoin=self.joins)
            for row in self.group.rows(rank):
                self._start_actor(row)

    def _start(self, rank: int, saved: Path | None, counts: dict[str, int], rejoin: bool = False) -> None:
        run = self.run
        life = run.account.life + 1000 * run.account.restarts  # a learner that is started again sees other episodes
        links, total = self.group.links(rank, rejoin), run.board.sum("learned")
        # An order that is being carried out is for whoever starts meanwhile, too.
        done = run.board.order[0] - (run.order is not None)
        args = (self.config, run.folder, life, links, counts, total, saved, done)
        self.children[rank] = Child(f"coterie-learner-{rank}", self.group.places[rank].cores, learner_process, args)


def run_children(
    run: Run, config: ResolvedConfig, saved: Path | None, state: dict[str, Any] | None, link: Link | None = None
) -> dict[str, Any]:
    """Train with several learners, each a process. `link`: to a run elsewhere with which they gossip."""
    try:
        crew = Crew(run, config, saved, state, link)
    except BaseException:
        if link is not None:
            link.close()
        raise
    return run.go(crew.work, crew.close)
