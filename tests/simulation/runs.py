"""A run with the real supervisor, coordinator, ledger, services, board, slots and checkpoints. Its processes have turns
of a scheduler; what its learners learn, and what its actors act, is only counted.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule
from torch import Tensor

from coterie.build.evaluate import Scores
from coterie.build.factory import ProcessContext
from coterie.build.resources import resolve_config
from coterie.exchange import gossip
from coterie.launch import rescue, supervisor
from coterie.launch.coordinator import Coordinator
from coterie.parallel import seqlock
from coterie.parallel.board import Board
from coterie.roles import entry
from coterie.roles.entry import LearnerService
from coterie.runs import checkpoint
from tests.conftest import VECTOR, make_config
from tests.simulation.processes import HOUR_S, STALL_S, Child, Learner, World
from tests.simulation.scheduler import Simulation

MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # files that need no disk
END_S = 400.0  # within which a run ends that nothing disturbs any more
GARBLED = ("report", "saved", "unsaved", "scores", "idle", "scores saved unsaved")  # these are lost, late, or double


class RunSimulation(Simulation):
    """A subclass says what kind of run it is."""

    settings: ClassVar[dict[str, Any]] = {}
    limits: ClassVar[dict[str, int]] = {}  # restarts in an hour
    cost: ClassVar[int] = 10**9  # rows that are rolled back when a learner dies

    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="coterie-simulation-", dir=MEMORY))
        self.world = world = World(self.scheduler)
        changes = {
            "steps": 240, "env.num_envs": 2, "model.hidden": (2,), "log.tensorboard": False, "log.every": 1e9,
            "log.stall": STALL_S, "log.checkpoint_every": 2.0, "eval.every": 100, "device": "cpu",
        }  # fmt: skip
        self.config = resolve_config(make_config(**{**changes, **self.settings}), cores=1)
        self.sealed = dict[int, Path]()
        world.rejoins, self.alone = self.config.exchange == "gossip", self.config.actors + self.config.learners == 1
        self.runs = list[Coordinator]()
        self._replace_processes(self.patch.setattr)
        self.lives, self.lost = 0, False
        self.start(None)

    def _replace_processes(self, put: Callable[..., None]) -> None:
        world, scheduler = self.world, self.scheduler
        world.replace_processes(put)
        put(supervisor, "listen", self.listen)
        put(entry, "rss_mb", lambda: 1.0)
        put(rescue, "answered", lambda call, seconds: call())  # all threads are the scheduler's
        put(entry, "evaluate", self.evaluate)
        for module in (seqlock, gossip):
            put(module, "fence", scheduler.pause)
        save, seal = checkpoint.save_file, checkpoint.seal

        def save_file(tensors: dict[str, Tensor], file: Path) -> None:
            scheduler.pause()
            if world.full:
                raise OSError(errno.ENOSPC, "No space left on device", str(file))
            save(tensors, file)

        def seal_once(root: Path, draft: Path, step: int, state: dict[str, Any], seconds: float) -> Path:
            number = int(draft.name.removeprefix(".draft-order_"))
            path = seal(root, draft, step, state, seconds)
            assert number not in self.sealed, f"order {number} was sealed twice"
            self.sealed[number] = path
            self.check_checkpoint(path)
            return path

        put(checkpoint, "save_file", save_file)
        put(checkpoint, "seal", seal_once)

    def start(self, state: dict[str, Any] | None) -> None:
        """Start the run, or resume it."""
        saved = None if state is None else checkpoint.latest(self.folder / "checkpoints")
        self.over: dict[str, Any] | None = None
        config, memory = self.config, Board(self.config.learners)
        self.run = run = Coordinator(config, self.folder, VECTOR, memory, state=state, quiet=True)
        self.runs.append(run)

        def main() -> None:
            if self.alone:
                learner = Learner(self.world, self.config, self.lives, ProcessContext(board=run.board))
                if saved is not None and state is not None:
                    learner.load(checkpoint.learner(checkpoint.load(saved)[0], 0))
                    learner.start(state["learners"][0], state["env_steps"])
                    learner.write_counts()
                service = LearnerService(learner, self.folder, lambda *x: self.world.post(*x, partial(run.receive, 0)))
                run.poll()
                self.over = run.go(service.run, learner.close)
            else:
                over = supervisor.Supervisor(run, self.config, saved, None)
                self.over = run.go(over.work, over.close)

        self.main = self.scheduler.start("run", main)

    def listen(self, children: Iterable[Child], seconds: float) -> Iterator[tuple[Child, str, Any]]:
        """Stands for `processes.listen`."""
        children, end = list(children), self.scheduler.now + seconds
        while not any(child.speaks for child in children) and self.scheduler.now < end:
            self.scheduler.pause(0.05)
        for child in [child for child in children if child.speaks]:
            for kind, content in child.messages():
                yield child, kind, content

    def evaluate(self, algorithm: Any, model: Any, config: Any, trial: Any) -> Scores:
        for _ in range(6):
            time.sleep(0.5)
            if trial.stop():
                break
        return Scores("made-up", [1.0])

    # Disturbances

    @property
    def victims(self) -> list[Child]:
        return [child for child in self.world.children.values() if child.thread.alive]

    @rule(who=st.integers(0, 5), times=st.integers(1, 3))
    def kill(self, who: int, times: int) -> None:
        """Kill a process, and those that take its place."""
        for _ in range(times):
            if victims := self.victims:
                victims[who % len(victims)].thread.kill()
                self.scheduler.wait(0.5)

    @rule(who=st.integers(0, 5), shows=st.booleans())
    def hang(self, who: int, shows: bool) -> None:
        """One does nothing more until it is killed. `shows`: it was stopped (SIGSTOP). One that waits for others can
        only hang with all of its threads.
        """
        if victims := self.victims:
            child = victims[who % len(victims)]
            child.thread.frozen = True
            rows = [row for row, (_, pid) in self.run.processes().items() if pid == child.pid]
            if shows:
                self.world.stopped.add(child.pid)
            if shows or self.run.board.all_blocked(rows):
                child.thread.sign = lambda: None

    @rule(seconds=st.sampled_from([60.0, HOUR_S + 1]))
    def pause_the_machine(self, seconds: float) -> None:
        self.scheduler.now += seconds
        self.world.paused += seconds

    @rule(full=st.booleans())
    def fill_the_disk(self, full: bool) -> None:
        self.world.full = full

    @rule()
    def delete_drafts(self) -> None:
        for draft in (self.folder / "checkpoints").glob(".draft-*"):
            shutil.rmtree(draft, ignore_errors=True)

    @rule(kind=st.sampled_from(GARBLED), how=st.sampled_from(["lost", "late", "twice", "dies"]))
    def garble(self, kind: str, how: str) -> None:
        """`dies`: its sender. No more than one is lost: sockets of one machine lose none."""
        if how != "lost" or not self.lost:
            self.lost = self.lost or how == "lost"
            self.world.trouble |= dict.fromkeys(kind.split(), how)

    @rule()
    def signal(self) -> None:
        if self.main.alive and self.run.signal is None:
            self.run._on_signal(signal.SIGTERM)

    @rule()
    def lose_the_machine(self) -> None:
        """All processes are killed, and the run is resumed."""
        if not self.main.alive or (saved := checkpoint.latest(self.run.root)) is None:
            return
        state = checkpoint.load(saved)[1]
        if state["env_steps"] >= self.config.steps:
            return
        for process in self.scheduler.living:
            process.kill()
        for past in (self.world.children, self.world.deaths, self.world.restarts, self.sealed):
            past.clear()
        self.lives += 1
        self.start(state)

    # What always holds

    def check_checkpoint(self, path: Path) -> None:
        tensors, state = checkpoint.load(path)
        counts = state["learners"]
        assert state["present"], f"{path.name} has no parts"
        assert state["env_steps"] == sum(row["learned"] for row in counts)
        for rank in state["present"]:
            part = checkpoint.learner(tensors, rank)
            assert part, f"{path.name} lacks the part of learner {rank}"
            if self.config.exchange != "gossip":  # there, weights are a peer's after a restart
                tally = int(part["model"][self.world.weight].flatten()[0])
                assert tally == counts[rank]["learned"], f"{path.name}: rows lost or learned twice"

    @invariant()
    def budgets_are_kept(self) -> None:
        for kind, limit in self.limits.items():
            assert self.world.in_the_last_hour(self.world.restarts, kind) <= limit, f"too many restarts: {kind}"

    @invariant()
    def a_failure_has_a_good_reason(self) -> None:
        if (error := self.main.error) is None:
            return
        reason = str(error)
        if "in an hour (" in reason:
            kind = "learner" if reason.startswith("learner") else "actor"
            assert self.world.in_the_last_hour(self.world.deaths, kind) > self.limits[kind], reason
        elif "before there was a checkpoint" in reason:
            assert not self.sealed, reason
        elif "while the run was ending" not in reason or not self.world.deaths or self.run.signal is not None:
            raise AssertionError(reason) from error

    def finish(self) -> None:
        """Nothing more disturbs the run, but for messages in `trouble`: it ends, and its accounts are right."""
        self.world.full = False
        assert self.scheduler.wait(END_S, lambda: not self.main.alive), f"it does not end: {self.describe()}"
        self.a_failure_has_a_good_reason()
        self.budgets_are_kept()
        if (summary := self.over) is None:
            return
        path = checkpoint.latest(self.run.root)
        assert path is not None
        state = checkpoint.load(path)[1]
        rows = summary["rows"]
        assert summary["env_steps"] == rows["learned"] == state["env_steps"], "the last checkpoint lacks rows"
        parts = rows["learned"] + rows["in_flight"] + rows["dropped"] + rows["rolled_back"]
        assert rows["produced"] == parts, rows
        if not self.lives:  # the accounts of a lost machine are those of its last checkpoint
            assert rows["produced"] == self.world.produced, f"{rows}, and {self.world.produced} were acted"
            deaths = [kind for _, kind in self.world.deaths].count("learner")
            assert rows["rolled_back"] <= deaths * self.cost, "they go back to an old checkpoint"
            assert summary["digest"] or self.world.deaths, "it ends at an old checkpoint for no reason"
            if summary["digest"] and not deaths:  # else learners were killed with what they had not learned
                assert rows["dropped"] == self.world.dropped, f"{rows}, and {self.world.dropped} were dropped"

    def describe(self) -> str:
        run = self.run
        return f"order {run.order} of {run.board.order}, sealed {run.board.sealed}, idle {run.idle} of {run.members}"

    def _close(self) -> None:
        super()._close()
        for run in self.runs:
            run.writer.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class OneProcess(RunSimulation):
    """A lone learner in the process of its coordinator."""

    settings: ClassVar = {"exchange": "solo", "learners": 1}
    kill = hang = garble = None


class Gossiping(RunSimulation):
    """Learners that are restarted alone."""

    settings: ClassVar = {"exchange": "gossip", "learners": 3, "restarts": 1}
    limits: ClassVar = {"learner": 1}


class GoingBack(RunSimulation):
    """Learners with actors; all go back to the last checkpoint where one is lost."""

    settings: ClassVar = {
        "exchange": "hogwild", "learners": 2, "restarts": 2, "acting": "decoupled", "actors": 4,
        "decoupled.restarts": 2, "algorithm": "vtrace",
    }  # fmt: skip
    limits: ClassVar = {"learner": 2, "actor": 2}


class Lone(GoingBack):
    """A lone learner with actors. What it had reported is not lost when it dies."""

    settings: ClassVar = {
        **GoingBack.settings, "exchange": "solo", "learners": 1, "actors": 2, "log.checkpoint_every": 30.0,
    }  # fmt: skip
    cost: ClassVar = 60
    fill_the_disk = delete_drafts = None
