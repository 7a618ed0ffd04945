"""Executes lives of learners again, with the rollouts, weights and messages that their records name."""

from __future__ import annotations

import base64
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from copy import copy
from dataclasses import dataclass, field, replace

import torch

from coterie.acting.table import acting_kind
from coterie.build.factory import ProcessContext
from coterie.config import ResolvedConfig
from coterie.errors import ConfigError, CoterieError, one_line
from coterie.exchange.table import exchange_kind
from coterie.flight.life import RecordedLife, RecordEnds, unrecorded
from coterie.learner import Observer
from coterie.parallel.board import Board
from coterie.parallel.threads import set_torch
from coterie.plugins import named
from coterie.roles.learner_process import LearnerProcess
from coterie.roles.life import digest_of_state
from coterie.runs.checkpoint import Tensors
from coterie.tools.duel import REPLAYED
from coterie.tools.replay.compare import Comparison, Differs, DivergentRollout, cause
from coterie.types import Rollout

Observers = Callable[[LearnerProcess], Sequence[Observer]]
LearnerStep = tuple[int, int]  # a learner and its learner step
EDITABLE = ("algo", "ppo", "vtrace", "q", "r2d2", "sac", "optim", "reward")  # sections of the config


@dataclass
class ReplayResult:
    """What came of a life's replay."""

    life: RecordedLife
    steps: int = 0  # the last learner step
    compared: bool = True
    switched: int | None = None  # from this learner step on with other settings
    returns: deque[float] = field(default_factory=lambda: deque(maxlen=100))  # of its last episodes
    rollouts: int = 0  # as recorded
    digests: int = 0
    unseen: int = 0  # learner steps since the weights were compared
    difference: str = ""  # the first one
    odd: DivergentRollout | None = None  # where an env may be at fault
    error: str = ""  # that ended it
    stopped: str = ""  # why it ends here, without an error


@dataclass
class Replay:
    """Lives that ran together, by learner, each learner's in their order.

    `begin`: what a life begins with, or None for the run's first weights. It raises `RecordEnds` where that is gone.
    """

    config: ResolvedConfig
    lives: Mapping[int, Sequence[RecordedLife]]
    begin: Callable[[RecordedLife], Tensors | None] = lambda life: None
    until: int | None = None  # learner step to stop at
    edited: ResolvedConfig | None = None  # other settings, with which nothing is compared
    since: int = 0  # the learner step from which on those hold
    observers: Observers = lambda learner: ()
    wanted: set[LearnerStep] = field(default_factory=set)  # where to take a snapshot of a learner's state
    snapshots: dict[LearnerStep, list[Tensors]] = field(default_factory=dict)
    results: list[ReplayResult] = field(default_factory=list)

    def run(self) -> list[ReplayResult]:
        """Raises what is not Coterie's error."""
        everything = [life for each in self.lives.values() for life in each]
        kind = exchange_kind(self.config)
        self._board = Board(self.config.learners)
        self._mixing = kind.mixing(self.config, self.config.learners)
        self._shared = named("replay", kind.shared_in_replay)(everything) if kind.shared_in_replay else None
        self._independent = not kind.in_lockstep
        self._short = set(self.lives)  # learners that have not come to `until`
        bugs = list[BaseException]()

        def work(rank: int, lives: Sequence[RecordedLife]) -> None:
            try:
                all(map(self._live, lives))  # up to the first that differs or has nothing to begin with
            except BaseException as error:
                bugs.append(error)
            finally:
                self._short.discard(rank)
                if self._shared is not None:
                    self._shared.end(rank)

        threads = [threading.Thread(target=work, args=each, daemon=True) for each in self.lives.items()]
        restore = set_torch(self.config.deterministic)  # as in a learner's process
        os.environ[REPLAYED] = str(everything[0].path.absolute().parents[1] / "selfplay")  # for its envs' processes
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            os.environ.pop(REPLAYED, None)
            restore()
        for bug in bugs:
            raise bug
        return self.results

    def _live(self, life: RecordedLife) -> bool:
        """Whether the life was as recorded, as far as it could be compared."""
        result, comparison, rank = ReplayResult(life), Comparison(life), life.header["learner"]
        if rank in self._short:
            self.results.append(result)
        else:  # it goes on for the others, which take its messages
            comparison.rest()
        try:
            tensors = self.begin(life)
        except RecordEnds as gone:
            result.stopped = str(gone)
            return False
        try:
            self._train(life, comparison, result, tensors)
        except Differs as difference:
            result.difference, result.odd = str(difference), difference.odd
        except RecordEnds as end:
            result.stopped = str(end)
        except CoterieError as error:
            if life.end == one_line(error):
                result.error = str(error)
            else:
                raise
        else:
            if rank in self._short and life.end is None:
                result.stopped = life.damage or "the record breaks off there"
        result.rollouts, result.digests = comparison.equal["rollout"], comparison.digests
        result.unseen = max(0, result.steps - comparison.steps)
        return not result.difference

    def _train(self, life: RecordedLife, comparison: Comparison, result: ReplayResult, tensors: Tensors | None) -> None:
        header, rank = life.header, life.header["learner"]
        left, counts = len(life.of("rollout")), header["counts"]
        edited = None if self.edited is None else as_recorded(self.edited, life)
        if edited is not None and counts.get("learner_steps", 0) >= self.since:
            config, edited, result.compared = edited, None, False
        else:
            config = as_recorded(self.config, life)
        context = ProcessContext(
            rank=rank, board=self._board, mixing=self._mixing, recorded_life=life, shared_in_replay=self._shared,
            note=comparison.note if result.compared else unrecorded,
        )  # fmt: skip
        learner = LearnerProcess(config, header["life"], context)

        def keep() -> None:
            if (at := (rank, learner.progress.learner_steps)) in self.wanted:
                now, known = learner.tensors(), self.snapshots.setdefault(at, [])
                if not known or digest_of_state(now) != digest_of_state(known[-1]):
                    known.append(copied(now))

        def check_progress() -> None:
            nonlocal edited
            steps = learner.progress.learner_steps
            ends = self.until is not None and steps >= self.until
            if edited is not None and steps >= self.since and not ends:
                comparison.rest()
                switch(learner, edited)
                edited, result.switched = None, steps
            keep()
            if rank in self._short:
                result.steps = steps
                if ends:
                    self._short.discard(rank)
                    comparison.rest()

        def after_rollout(rollout: Rollout) -> bool:
            nonlocal left
            left -= 1
            if rank in self._short:
                result.returns.extend(score for score, *_ in rollout.episodes)
            check_progress()
            return left == 0 or not self._short or not (self._independent or rank in self._short)

        if (before := getattr(self._shared, "before", None)) is not None:
            before[rank] = keep  # a learner saves what it has when it loses another one in a sum
        with closing(learner):
            if tensors is not None:
                if not result.compared and shapes(tensors) != shapes(learner.tensors()):
                    raise ConfigError("--edit: a checkpoint does not fit these settings: give --from start")
                learner.load(tensors)
                for rng, state in zip(learner.rngs, header["rng"], strict=True):
                    rng.set_state(torch.frombuffer(bytearray(base64.b64decode(state)), dtype=torch.uint8))
            learner.start(counts, header["env_steps"])
            check_progress()
            learner.observers[:0] = [comparison, *self.observers(learner)]
            if left and self._short:
                learner.run(after_rollout)


def explain(result: ReplayResult, again: Sequence[ReplayResult]) -> None:
    """Add to a difference what a second replay tells about its cause."""
    if (odd := result.odd) is None:
        return
    second = next((x for x in again if x.life is result.life), None)
    if second is None or second.rollouts < odd.number or (second.rollouts == odd.number and second.odd is None):
        result.difference += "; a second replay does not come so far"
    elif why := cause(odd, second.odd, result.life.header):
        result.difference += f"; {why}"


def as_recorded(config: ResolvedConfig, life: RecordedLife) -> ResolvedConfig:
    """The config with what the recording processes had, and with sections that `switch` may change."""
    header, kind = life.header, acting_kind(config)
    sections = {name: copy(getattr(config, name)) for name in EDITABLE}
    sections["env"] = replace(config.env, replace_budget=sys.maxsize)  # those of hours may follow in one
    sections["optim"] = replace(config.optim, chunk=config.optim.chunk or header["chunk"])
    names, begins = ["steps", "torch_threads", "precision", "device"], header.get("init_from", "")
    # Groups may depend on the cores of a learner or a host, and each has its own random numbers.
    opened = [group for _, _, group, start, *_ in life.of("open") if start >= 0]  # not by a remote host
    if opened or not kind.has_children:
        sections["env"] = replace(sections["env"], groups=1 + max(opened) if opened else header["groups"])
    return replace(config, init_from=begins, **sections, **{name: header[name] for name in names})


def switch(learner: LearnerProcess, config: ResolvedConfig) -> None:
    """Go on with other settings: its parts share these sections, and read them at each use."""
    for name in EDITABLE:
        vars(getattr(learner.config, name)).update(vars(getattr(config, name)))
    learner.exchange.guard.max_grad_norm = config.optim.max_grad_norm
    learner.gradients.recorded.clear()  # graphs hold the old ones


def shapes(tensors: Tensors) -> dict[tuple[str, str], torch.Size]:
    """Shapes of the state that a learner begins with, without its random numbers."""
    return {(group, name): x.shape for group, each in tensors.items() if group != "rng" for name, x in each.items()}


def copied(tensors: Tensors) -> Tensors:
    return {group: {name: x.detach().clone() for name, x in each.items()} for group, each in tensors.items()}
