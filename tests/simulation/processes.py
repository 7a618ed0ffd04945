"""The processes of a simulated run: what its learners learn, and what its actors act, is only counted."""

from __future__ import annotations

import itertools
import math
import pickle
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from coterie.acting.actor import ActorMailbox
from coterie.acting.base import Stopped, WorkerSetup
from coterie.acting.child_processes import WorkerReport, check
from coterie.build.factory import ProcessContext, exchange_setup, make_model, normalizers
from coterie.config import ResolvedConfig
from coterie.envs.news import EnvNews, Means
from coterie.errors import ConfigError, one_line
from coterie.exchange.gossip import Gossip
from coterie.exchange.solo import Solo
from coterie.launch import supervisor
from coterie.launch.supervisor import Supervisor
from coterie.learner import Progress
from coterie.parallel import heartbeats
from coterie.parallel.board import Board
from coterie.parallel.params import FlatParams
from coterie.parallel.processes import PeerLost
from coterie.parallel.slots import Slots
from coterie.parallel.stages import Stages
from coterie.roles import entry
from coterie.roles.learner_process import LearnerProcess
from coterie.roles.life import LifeRecorder
from coterie.types import Post, Rollout
from tests.conftest import VECTOR
from tests.simulation.scheduler import Scheduler

ROWS = 10  # of a rollout
ROLLOUT_S = 0.2
HOUR_S = 3600.0
STALL_S = 8.0
TOGETHER_S = 0.4  # within which all processes are started


class World:
    """What is outside of a run's processes: the clock, the disk, the wires; and the true counts."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.full = False  # the disk
        self.trouble: dict[str, str] = {}  # by kind of message, what happens to the next one
        self.produced = self.dropped = 0
        self.unfilled = Counter[int]()  # rows of each actor's present rollout, by row of the board
        self.stopped = set[int]()  # pids
        self.pids = itertools.count(1 << 22)  # above those of this machine
        self.children = dict[str, Child]()  # the latest of each name
        # Deaths that the supervisor has seen: when (it may act on one after a pause), and "learner" or "actor".
        self.deaths: list[tuple[float, str]] = []
        self.paused = 0.0  # seconds for which the machine was
        self.restarts: list[tuple[float, str]] = []
        self.weight = ""  # the name of one of a learner's
        self.rejoins = False  # learners are restarted alone
        self.learners_at = 0.0  # when a learner was started last

    def replace_processes(self, put: Callable[..., None]) -> None:
        end_hung = Supervisor._end_hung

        def end_what_hangs(over: Supervisor, row: int, silent: float) -> None:
            if (child := cast(dict[int, Child], over.children).get(row)) is not None:
                # One that gets no turns looks the same.
                hangs = child.thread.frozen or child.thread.wakes < self.scheduler.now - STALL_S / 2
                assert hangs, f"{child.name} does not hang"
                child.thread.frozen = True
            end_hung(over, row, silent)

        put(Supervisor, "_end_hung", end_what_hangs)
        put(supervisor, "Child", lambda name, cores, target, args: Child(self, name, target, args))
        put(supervisor, "worker_process", partial(act, self))
        put(entry, "LearnerProcess", partial(Learner, self))
        put(entry, "shown_alive", self.shown_alive)
        put(heartbeats, "_is_stopped", lambda pid: pid in self.stopped)

    def in_the_last_hour(self, events: list[tuple[float, str]], kind: str) -> int:
        """How many there were up to the latest."""
        times = [when for when, what in events if what == kind]
        return sum(times[-1] - when <= HOUR_S for when in times)

    def note_start(self, kind: str, number: str) -> None:
        """The first start is no restart. All learners may be restarted together, and actors with their learners."""
        now, before = self.scheduler.now, self.children.get(f"{kind}-{number}")
        if kind == "learner":
            together, self.learners_at = not self.rejoins and now - self.learners_at < TOGETHER_S, now
        else:
            together = now - self.learners_at < TOGETHER_S
        if before is not None and not together:
            self.restarts.append((before.died or now, kind))  # the budget counts it then

    @contextmanager
    def shown_alive(self, board: Board, row: int, limit: float) -> Iterator[None]:
        """Stands for `heartbeats.shown_alive`, whose thread has the system's clock."""

        def show() -> None:
            board.alive[row] = self.scheduler.now

        cast(Any, self.scheduler.running).sign = show
        show()
        yield

    def post(self, kind: str, content: Any, to: Callable[[str, Any], None]) -> None:
        trouble = self.trouble.pop(kind, "")
        if trouble == "dies":
            cast(Any, self.scheduler.running).kill()
        self.scheduler.pause(2.0 if trouble == "late" else 0.0)
        for _ in range({"lost": 0, "twice": 2}.get(trouble, 1)):
            to(kind, pickle.loads(pickle.dumps(content)))
        self.scheduler.pause()


class Child:
    """Stands for `processes.Child`."""

    def __init__(self, world: World, name: str, target: Callable[..., None], args: tuple[Any, ...]) -> None:
        self.world, self.name = world, name.removeprefix("coterie-")
        self.inbox, self.manner, self.died = deque[tuple[str, Any]](), "", 0.0
        self.row: int = args[-1]  # of an actor
        self.pid = next(world.pids)
        self.process = SimpleNamespace(pid=self.pid)
        self.thread = world.scheduler.start(self.name, lambda: self._enter(target, args))
        self.kind, number = self.name.split("-")
        world.note_start(self.kind, number)
        world.children[self.name] = self

    def _enter(self, target: Callable[..., None], args: tuple[Any, ...]) -> None:
        try:
            target(lambda kind, content: self.world.post(kind, content, self._arrive), *args)
        except Exception as error:
            kind = "config" if isinstance(error, ConfigError) else "peer" if isinstance(error, PeerLost) else "error"
            self.inbox.append((kind, (one_line(error), "")))
            self.manner = "ended with exit code 1"

    def _arrive(self, kind: str, content: Any) -> None:
        self.inbox.append((kind, content))

    def kill(self) -> None:
        """By the supervisor."""
        if self.thread.frozen and self.thread.alive:
            self._note_death()
        self.thread.kill()

    def _note_death(self) -> None:
        world = self.world
        self.died = world.scheduler.now
        world.deaths.append((self.died - world.paused, self.kind))
        if self.kind == "actor" and not self.thread.let.dead:  # one that leaves loses nothing
            world.dropped += world.unfilled.pop(self.row, 0)

    def messages(self) -> Iterator[tuple[str, Any]]:
        alive = self.thread.alive
        while self.inbox:
            yield self.inbox.popleft()
        if not alive:
            self._note_death()
            yield "end", self.manner or ("was killed by SIGKILL" if self.thread.dead else "ended with exit code 0")

    @property
    def speaks(self) -> bool:
        return bool(self.inbox) or not self.thread.alive


class Learner(LearnerProcess):
    """Counts rows instead of learning from them. Each of its weights is that count, except under gossip."""

    def __init__(
        self, world: World, config: ResolvedConfig, life_number: int = 0, context: ProcessContext | None = None
    ) -> None:
        self.world, self.config, self.spec, self.before = world, config, VECTOR, {}
        self.context = context = context or ProcessContext()
        self.model = make_model(config, self.spec)
        self.params = FlatParams(self.model)
        self.progress, self.stages, self.secondary = Progress(), Stages(), None
        self.flight, self.rngs = LifeRecorder(config, ProcessContext(), life_number), []  # which writes nothing
        self._counts_lock = threading.Lock()
        self.moments = moments = normalizers(config, self.model)
        # Not gossip: its own weights, instead of those that learners share.
        exchange = Gossip if config.exchange == "gossip" else Solo
        self.exchange = exchange(exchange_setup(config, self.params, moments, context))
        world.weight = next(iter(self.params.slices))
        self.loaded, self.acted = -1, 0
        self.set_tally(0)
        self.acting: Any = SimpleNamespace(counts=lambda: {"produced": self.acted})
        self.algorithm: Any = SimpleNamespace(clock=SimpleNamespace(env_steps=0))
        self.actor, self.refresh_actor = self.model, lambda: None

    def set_tally(self, rows: int) -> None:
        self.tally = rows
        if self.config.exchange != "gossip":
            self.params.data.fill_(rows)

    def run(self, on_rollout: Callable[[Rollout], bool], on_error: Callable[..., None] = print) -> None:
        with self.exchange:
            try:
                self._learn(on_rollout)
            except BaseException as error:
                on_error(error)
                raise

    def _learn(self, on_rollout: Callable[[Rollout], bool]) -> None:
        while True:
            rows, exchange = self._wait(), self.exchange
            exchange.count(rows)
            self.world.scheduler.pause()
            exchange.step(self.params, 0.0)
            self.set_tally(self.tally + rows)
            self.progress.env_steps += rows
            self.progress.learner_steps += 1
            exchange.after_rollout(self.params)
            if on_rollout(cast(Rollout, SimpleNamespace(episodes=[(1.0, rows, 0)]))):
                return

    def _wait(self) -> int:
        """The rows of a rollout, once it is there."""
        if self.context.acting is None:
            time.sleep(ROLLOUT_S)
            self.acted += ROWS
            self.world.produced += ROWS
            self.write_counts()
            return ROWS
        slots: Slots = self.context.acting.slots
        slots.open(0, -1)
        with self.context.board.blocked(self.context.rank):
            while not slots.is_full(0):
                time.sleep(ROLLOUT_S)
        return slots.per_batch * ROWS

    def describe(self) -> str:
        return "a simulated learner"

    def news(self) -> EnvNews:
        return EnvNews([], Means())

    def gauges(self) -> dict[str, float]:
        return {}

    def lr(self, env_steps: int) -> float:
        return 0.0

    def close(self) -> None: ...

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        tally = {"rank": torch.tensor(self.context.rank)}
        return {"model": dict(self.model.state_dict()), "exchange": {}, "tally": tally}

    def load(self, tensors: dict[str, dict[str, Tensor]]) -> None:
        self.set_tally(int(tensors["model"][self.world.weight].flatten()[0]))
        self.loaded = int(tensors["tally"]["rank"])

    def start(self, counts: dict[str, int], total: int) -> None:
        super().start(counts, total)
        if self.loaded != self.context.rank:  # it has no part in the checkpoint, and takes that of another
            self.set_tally(counts.get("learned", 0))


def act(
    world: World, post: Post, config: ResolvedConfig, life_number: int, context: ProcessContext, number: int, row: int
) -> None:
    """The process of an actor: real slots, which it fills with nothing."""
    mailbox = ActorMailbox.__new__(ActorMailbox)
    mailbox.slots, mailbox.weights = cast(Any, context.acting).slots, cast(Any, context.acting).weights
    mailbox.board, mailbox.row, mailbox.number = context.board, row, number
    none = cast(Any, None)
    mailbox.check = partial(check, WorkerSetup(none, none, context.board, context.rank, number, row, 1e9))
    mailbox.life_number = mailbox.filled = 0
    mailbox.timeout, mailbox.stages, mailbox.recorders = 1e9, Stages(), defaultdict()
    counts = context.board.counts[row]
    mailbox.recorders.default_factory = lambda: None  # type: ignore[assignment]
    with world.shown_alive(context.board, row, config.log.stall), suppress(Stopped):
        while True:
            mailbox.next()
            for _ in range(2):
                time.sleep(ROLLOUT_S / 2)
                mailbox.check()
                counts["produced"] += ROWS // 2
                world.produced += ROWS // 2
                world.unfilled[row] += ROWS // 2
            mailbox.deliver()
            world.unfilled[row] = 0
            world.scheduler.pause(ROLLOUT_S / 4)
            counts["delivered"] = counts["produced"]
    post("acted", WorkerReport({}, math.inf, None, EnvNews([], Means()), []))
