"""The child processes of a run: learners, and actors or env hosts.

After each rollout a learner counts, reports and carries out orders. Its parent (the same process, or that of several
learners) gives orders on the board and takes messages by `post`.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from coterie.acting.table import acting_kind
from coterie.algorithms.base import AnyAlgorithm
from coterie.build.evaluate import Scores, Trial, evaluate
from coterie.build.factory import EVAL_SEED, ProcessContext, seed_for, seed_globals, worker_setup
from coterie.config import ResolvedConfig
from coterie.envs.news import EnvNews
from coterie.errors import CoterieError, reason_of
from coterie.exchange.table import exchange_kind
from coterie.models.build import Network
from coterie.parallel.board import EVALUATE, HOLD, LAST
from coterie.parallel.clock import awake
from coterie.parallel.hardware import rss_mb
from coterie.parallel.heartbeats import shown_alive
from coterie.parallel.processes import PeerLost, descriptors
from coterie.roles.callbacks import Callbacks, Given, Run
from coterie.roles.learner_process import LearnerProcess
from coterie.runs import checkpoint
from coterie.runs.files import answered
from coterie.types import Post, Rollout

RESCUE_S = 4.0  # for the others to save what they have learned when a learner is gone
_REPORT_S = 0.25  # between two reports of a learner
_KEEP_SHARE = 0.05  # most of a learner's time that may go into copying its weights for the parent, with each report
_GAUGES_S = 0.25  # least seconds between two readings of the gauges: some are slow to read


class Start(NamedTuple):
    """Where a learner begins. `total`: env steps of all learners."""

    life_number: int  # different at each start
    counts: dict[str, int]  # its own
    total: int
    saved: Path | None  # the checkpoint that it continues from
    done: int  # number of the last order to ignore


class LearnerReport(NamedTuple):
    """The message "report" of a learner to its parent: up to `news`, since its last one."""

    episodes: list[tuple[float, int, int]]  # return, length, env id
    metrics: dict[str, float]  # sums over the batches
    batches: int
    lags: dict[int, int]  # rows by policy lag
    lag_by_row: list[float]  # sums over the rollouts
    rollouts: int
    news: EnvNews
    stages: dict[str, float]  # seconds in each
    first_step: float  # unix time of the first env step
    lr: float
    rss_mb: float | None
    gauges: dict[str, float]
    counts: dict[str, int]


class Saved(NamedTuple):
    """The message "saved" of a learner that has written its part of a checkpoint."""

    order: int
    counts: dict[str, int]  # as of that part
    digest: str  # of the last weights
    env_steps: int = 0  # of the run, under an exchange in lockstep, where all parts of a checkpoint must agree


def learner_process(post: Post, config: ResolvedConfig, folder: Path, context: ProcessContext, start: Start) -> None:
    """A child process: one learner, from the beginning or from its part of a checkpoint."""
    descriptors()  # between machines Gloo takes connections without a limit
    with ExitStack() as opened:
        opened.enter_context(shown_alive(context.board, context.rank, config.log.stall))
        begins = config if start.saved is None else replace(config, init_from="")
        learner = LearnerProcess(begins, start.life_number, replace(context, folder=folder))
        opened.callback(learner.close)
        if start.saved is not None:
            alike = exchange_kind(config).in_lockstep  # a disk that does not answer: this process hangs, others go on
            learner.resume(part := checkpoint.load_part(start.saved, context.rank, alike, math.inf))
            if part.rank != context.rank and not (alike or exchange_kind(config).shared_weights):
                post("said", f"learner {context.rank} goes on from the part of learner {part.rank}: it has none itself")
        learner.start(start.counts, start.total)
        callbacks = () if context.rank else config.callbacks
        LearnerService(learner, folder, post, _REPORT_S, start.done, callbacks).run()


def worker_process(
    post: Post, config: ResolvedConfig, life_number: int, context: ProcessContext, number: int, row: int
) -> None:
    """A child process of the run's acting: one actor, or one env host."""
    kind = acting_kind(config)
    os.nice(kind.niceness)
    seed_globals(config, life_number, row)
    with shown_alive(context.board, row, config.log.stall):
        worker = kind.worker(worker_setup(config, life_number, context, number, row), context.acting)
        with closing(worker):
            worker.run(post)


class LearnerService:
    """Runs a learner. `every`: least seconds between two reports; `done`: the last order that is not for it."""

    def __init__(
        self, learner: LearnerProcess, folder: Path, post: Post, every: float = 0.0, done: int = 0,
        callbacks: Sequence[Given] = (),
    ) -> None:  # fmt: skip
        self.learner, self.post, self.every = learner, post, every
        self.root = folder / "checkpoints"
        self.board, self.rank = learner.context.board, learner.context.rank
        self.episodes: list[tuple[float, int, int]] = []  # return, length, env id
        self.next_report = self.gauged = 0.0
        self.gauges: dict[str, float] = {}
        self.done = done  # the last order that was carried out
        self.trained = False  # whether the training ended after a rollout
        self.last = self.over = False  # whether the last order was carried out here, and by all
        self.callbacks = Callbacks(Run(learner, folder, post), callbacks, post)
        learner.exchange.report_to(lambda line: post("said", line))

    @property
    def has_order(self) -> bool:
        return self.board.order[0] > self.done

    def run(self) -> None:
        """Train to the end of the run, then carry out orders until the last one."""
        self.post("note", self.learner.describe())
        self._start_callbacks()
        # Given before the learners began: the checkpoint at step 0. One that rejoins has no weights worth saving yet.
        if self.has_order and not self.learner.context.rejoin:
            self.execute_order()
        self.learner.run(self.after_rollout, self._on_error)
        if not (self.trained or self.learner.is_over()):
            error = CoterieError(f"acting: its rollouts ended after {self.learner.progress.env_steps:,} env steps")
            self._on_error(error)
            raise error
        self.learner.write_counts()  # env hosts go on during the training on the last rollout
        self.report()
        posted = -math.inf
        while not self.over:
            self.board.heartbeat(self.rank)
            if self.has_order:
                self.execute_order()
            elif self.last and self.board.sealed >= self.done:  # else another learner's part is missing
                self.over = True
            elif time.monotonic() - posted >= _REPORT_S:  # again and again: a run of one process acts on messages only
                posted = time.monotonic()
                self.post("idle", None)
            else:
                time.sleep(0.005)
        self.callbacks.end()

    def _start_callbacks(self) -> None:
        """Start them in learner 0; the others wait for it, no longer than `log.stall`."""
        config = self.learner.config
        if self.rank == 0:
            self.callbacks.start()
            self.board.begun[0] = 1
        if config.callbacks:
            self._beat_until(lambda: bool(self.board.begun[0]) or self.board.stopping, config.log.stall)

    def _beat_until(self, done: Callable[[], bool], seconds: float) -> None:
        """Wait, with a heartbeat, no longer than that."""
        end = awake() + seconds
        while not done() and awake() < end:
            self.board.heartbeat(self.rank)
            time.sleep(0.005)

    def after_rollout(self, rollout: Rollout) -> bool:
        """Returns True where the training ends: the budget is used up, or the parent stops it."""
        learner = self.learner
        self.episodes += rollout.episodes
        learner.write_counts()
        if line := learner.flight.trouble():
            self.post("said", line)
        if time.monotonic() >= self.next_report:
            self.report()
        self.callbacks.after_rollout()
        order, stop = learner.exchange.agree(self.has_order, self.board.stopping)
        if order and self.has_order:  # one that started later than the others may have carried it out at its start
            self.execute_order()
        self.trained = stop or learner.exchange.env_steps >= learner.config.steps
        return self.trained

    def _on_error(self, error: BaseException) -> None:
        """Report once more. If another learner is gone, save what was learned since the last checkpoint, if the parent
        orders it.
        """

        def is_held() -> bool:
            return self.has_order and bool(self.board.order[1] & HOLD)  # an older order may be pending

        if isinstance(error, PeerLost):
            self._beat_until(is_held, RESCUE_S)
            if is_held():
                self.execute_order()
        elif isinstance(error, Exception):
            with suppress(Exception):  # which envs were replaced, for example
                self.learner.write_counts()
                self.post("report", self.learner.news())

    def report(self) -> None:
        """Copy the weights for a rescue, then post what is new. One of two copies fits the last report to arrive."""
        progress, begin = self.learner.progress, time.thread_time()
        counts, cost, now = self.learner.keep(), time.thread_time() - begin, time.monotonic()
        self.next_report = now + max(self.every, cost / _KEEP_SHARE)
        if now - self.gauged > _GAUGES_S:
            self.gauged, self.gauges = now, self.learner.gauges()
        content = LearnerReport(
            self.episodes, progress.metrics, progress.batches, dict(progress.lags), progress.lag_by_row,
            progress.rollouts, self.learner.news(), dict(self.learner.stages.seconds),
            self.learner.stages.first_step, self.learner.lr(self.learner.exchange.env_steps), rss_mb(),
            self.gauges | self.callbacks.run.recorded, counts,
        )  # fmt: skip
        self.episodes, progress.metrics, progress.batches = [], {}, 0
        progress.lags.clear()
        progress.rollouts = 0
        self.post("report", content)

    def execute_order(self) -> None:
        """Evaluate, if the order asks for it and this is the first learner; then save this learner's part."""
        number, what = self.board.order
        self.done, learner = number, self.learner
        if what & LAST and exchange_kind(learner.config).shared_weights:
            learner.exchange.pull(learner.params)  # others have updated them since this learner's last step,
            learner.exchange.after_rollout(learner.params)  # and the normalizers
        if what & EVALUATE and self.rank == 0:
            self._evaluate(number)
            self.board.evaluated[0] = number  # also where no message says so
        if name := learner.params.nonfinite(learner.params.data):
            raise CoterieError(f"the weights of {name} are not finite at learner step {learner.progress.learner_steps}")
        groups, draft = learner.tensors(), checkpoint.draft_path(self.root, f"order_{number}")
        try:
            files = {f"learner_{self.rank}/{name}": group for name, group in groups.items()}
            answered(partial(checkpoint.write, draft, files), learner.config.log.stall / 2)
        except (CoterieError, OSError) as error:
            self.post("unsaved", (number, reason_of(error)))
            return
        learner.flight.note("saved", learner.progress.learner_steps)
        learner.flight.flush()  # a later life may begin with it
        digest = checkpoint.digest({"model": groups["model"]}) if what & LAST else ""
        if what & LAST:
            learner.write_counts()  # nothing acts any more: what is in flight stays so
        self.gauged = 0.0  # read them once more, also in a run that is shorter than the time between two readings
        self.report()  # the checkpoint counts these rows, too
        # Of those that are rescued some may be a step behind: the part that is furthest is taken.
        exact = learner.exchange.counts_alike and not what & HOLD
        steps = learner.exchange.env_steps if exact else 0
        self.post("saved", Saved(number, learner.counts(), digest, steps))
        self.last = bool(what & LAST)
        if what & HOLD:  # until it is killed: what it learned now would be lost
            self._beat_until(lambda: False, learner.config.log.stall)

    def _evaluate(self, order: int) -> None:
        """Score the weights that the checkpoint will hold, unless a signal ends it."""
        learner = self.learner
        learner.refresh_actor()
        scores = self._scores(learner.algorithm, learner.actor)
        if (second := learner.secondary) is not None:
            scores.secondary = self._scores(second.algorithm, second.model)
        if not self.board.stopping:
            self.post("scores", (order, scores))
            self.callbacks.call("on_evaluation", scores)

    def _scores(self, algorithm: AnyAlgorithm, model: Network) -> Scores:
        config = self.learner.config

        def stop(*_: int) -> bool:
            self.board.heartbeat(self.rank)
            return self.board.stopping

        seed = seed_for(config.seed, EVAL_SEED, self.learner.exchange.env_steps)
        buffers = [x.clone() for x in model.buffers()]  # the noise of noisy layers, which the checkpoint has
        try:
            return evaluate(algorithm, model, config, Trial(config.eval.episodes, config.eval.sampled, seed, stop=stop))
        finally:
            for x, before in zip(model.buffers(), buffers, strict=True):
                x.copy_(before)
