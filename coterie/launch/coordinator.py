"""The schedule of a run: orders to evaluate, save and end; completed checkpoints; the summary.

Learners report and carry out orders; the coordinator decides, the ledger (ledger.py) counts, a `RunWriter` writes. The
supervisor (supervisor.py) starts, watches and restarts the learner processes.
"""

from __future__ import annotations

import math
import os
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from coterie.acting.child_processes import WorkerReport
from coterie.build.evaluate import Scores
from coterie.choices import title
from coterie.config import ResolvedConfig
from coterie.envs.news import EnvNews, Means, first_time
from coterie.errors import CoterieError, one_line
from coterie.launch.ledger import Ledger
from coterie.launch.retries import Retries
from coterie.parallel.board import EVALUATE, LAST, SAVE, Board
from coterie.parallel.clock import awake
from coterie.parallel.heartbeats import Heartbeats, health
from coterie.parallel.signals import HANDLED, STOP, WARNING, is_second, on_signals
from coterie.roles.entry import LearnerReport, Saved
from coterie.runs import checkpoint
from coterie.runs.display import Display
from coterie.runs.metrics import RunWriter, read_metrics
from coterie.runs.starting import Starting
from coterie.types import Spec


class Coordinator:
    """Decides when learners evaluate, save and stop. `state`: of the checkpoint that the run continues from."""

    def __init__(
        self, config: ResolvedConfig, folder: Path, spec: Spec, board: Board, *,
        state: dict[str, Any] | None, quiet: bool, starting: Starting | None = None,
        signals: Sequence[signal.Signals] = (),
    ) -> None:  # fmt: skip
        self.config, self.folder, self.root = config, folder, folder / "checkpoints"
        self.spec, self.board = spec, board
        reached = 0 if state is None else max((line["env_steps"] for line in read_metrics(folder)), default=0)
        self.learners, self.next_eval = config.learners, config.eval.every if state is None else state["next_eval"]
        before, best = None if state is None else state["env_steps"], checkpoint.best(self.root)[1]
        self.display = Display(config.steps, title(config), before or 0, quiet, starting=starting, best=best)
        self.writer = RunWriter(folder, config, before, self.display.note)
        self.ledger = Ledger(config, spec, board, state, reached)  # its clock begins
        self.members, self.idle = set(range(self.learners)), set[int]()  # part of a checkpoint; at the end of training
        self.order: int | None = None  # number of the order that is being carried out
        self.saved: dict[int, Saved] = {}  # what its members have reported about their parts
        self.scores: Scores | None = None
        self.places, self.info = set[str](), Means()  # where envs have raised; numbers in their info
        self.ordered, self.followed, self.evaluation, self.retries = 0.0, 0.0, 0, Retries(config.log.unsaved_limit)
        self.heartbeats, self.last_checkpoint = Heartbeats(), time.monotonic()
        self.signaled, self.digests, self.signals = 0.0, dict[int, str](), signals  # that came while the run started
        self.signal: signal.Signals | None = None  # the first one, at the time `signaled`
        self.stop: tuple[str, str | None] | None = None  # by a callback: the reason, and the traceback if it raised
        self.over = self.paused = self.warned = False  # paused: no new order is due; warned: a checkpoint is
        self.sealed: Path | None = None  # the last checkpoint that this run has made
        # Set by the supervisor. `on_end`: called before the last order, after which no process may act. `processes`:
        # name and pid of the process behind each row of the board.
        self.on_end: Callable[[], None] = lambda: None
        self.processes: Callable[[], dict[int, tuple[str, int]]] = lambda: {0: ("learner 0", os.getpid())}
        self.extra_summary: dict[str, Any] = {}

    @property
    def ending(self) -> bool:
        """Whether the last order has been given."""
        return self.order is not None and bool(self.board.order[1] & LAST)

    @property
    def interrupted(self) -> signal.Signals | None:
        """The signal that ends the run before it has made its env steps, and before a callback ends it."""
        return self.signal if self.stop is None and self.ledger.env_steps < self.config.steps else None

    def go(self, work: Callable[[], None], close: Callable[[], None]) -> dict[str, Any]:
        """Do `work` until it ends, fails or a signal comes, then `close`, and write the summary."""
        status, reason, trace = "finished", "", ""
        failure: BaseException | None = None
        with on_signals(self._on_signal, HANDLED if self.config.log.checkpoint_on_warning else STOP):
            try:
                for number in self.signals:
                    self._on_signal(number)
                with self.display:
                    work()
                reason, raised = self.stop or ("", None)
                if raised is not None:
                    raise CoterieError(reason, raised)
                if (ended_by := self.interrupted) is not None:
                    status, reason = "interrupted", ended_by.name
            except KeyboardInterrupt as error:
                status, reason, failure = "failed", "stopped at once by a second signal, without a checkpoint", error
            except (Exception, SystemExit) as error:  # an env may call `sys.exit`
                if self.display.starting.code:  # this one is of a signal that came before the run
                    raise
                status, reason, failure = "failed", one_line(error), error
                trace = error.trace if isinstance(error, CoterieError) else traceback.format_exc()
                if trace:
                    self.writer.log(trace)
            finally:
                close()
        summary = self.summary(status, reason)
        self.writer.log(f"{status} {reason}".strip())
        produced, *rest = summary["rows"].values()
        if produced != sum(rest):
            self.log(f"{produced - sum(rest):,} of {produced:,} rows are not accounted for: a bug in the acting")
        for write in (partial(self.writer.summary, summary), self.writer.close):
            try:
                write()
            except CoterieError as error:  # must not hide the reason
                self.display.note(str(error))
        if isinstance(failure, KeyboardInterrupt):
            raise failure
        if failure is not None:
            kind = type(failure) if isinstance(failure, CoterieError) else CoterieError
            raise kind(reason + checkpoint.last_good(self.root), trace) from None  # `trace` has all that matters
        return summary

    def summary(self, status: str, reason: str) -> dict[str, Any]:
        counted = self.ledger.summary(self.digests)
        if math.isfinite(waited := self.ledger.first_step - self.display.starting.begin):
            counted["first_step_s"] = round(waited, 3)
        return {"status": status, "reason": reason, "folder": str(self.folder), **counted, **self.extra_summary}

    def log(self, line: str) -> None:
        """Write a line to the log, and show it."""
        self.writer.log(line)
        self.display.note(line)

    def receive(self, row: int, kind: str, content: Any) -> None:
        """Take the message of a learner or an actor, by its row of the board, then do what is due."""
        if kind == "note":
            self.display.doing("waiting for the first rollout")
            if row == 0 or self.learners == 1:
                self.display.note(f"{self.learners} learners, each: {content}" if self.learners > 1 else content)
        elif kind == "said":
            self.log(content)
        elif kind in ("report", "acted"):
            self.take(row, content)
        elif kind == "scores" and content[0] == self.order:
            self.scores = content[1]
        elif kind == "saved" and content.order == self.order:
            self.saved[row] = content
        elif kind == "unsaved" and content[0] == self.order:
            self.give_up_order(content[1])
        elif kind == "stop" and (self.stop is None or content[1] is not None):
            self.stop = content
            self.board.stop()
            self.log(f"a callback ends the run: {content[0]}")
        elif kind == "recorded":  # by callbacks, after the last line
            self.writer.write({"env_steps": self.ledger.env_steps, "seconds": round(self.ledger.seconds, 3), **content})
        elif kind == "idle":
            self.idle.add(row)
        self.poll()

    def take(self, row: int, report: LearnerReport | WorkerReport | EnvNews) -> None:
        """Add a report, and log its news. A learner that fails has news only."""
        if isinstance(report, WorkerReport):
            self.ledger.take_acted(row, report)
        elif isinstance(report, LearnerReport):
            self.ledger.take(row, report)
        news = report if isinstance(report, EnvNews) else report.news
        for text in (first_time(self.places, reason) for reason in (*news.failures, *self.info.add(news.info))):
            (self.log if "\n" in text or text in news.warnings else self.writer.log)(text)

    def poll(self) -> None:
        """Do the work that is due. Called after every message, and between messages if there are several processes."""
        now, ledger = time.monotonic(), self.ledger
        if self.signal is not None and not self.over and self.retries.hurry():
            self.display.note(f"{self.signal.name}: saving a checkpoint, then exiting (signal again to stop at once)")
            self.board.stop(resumes=bool(self.interrupted))
        if self.order is not None:
            self._follow_order()
        if self.over:
            return
        if ledger.reports and now - ledger.last_line >= self.config.log.every:
            self._write_line()
        if self.order is None and (what := self._due(now)):
            if what & LAST:
                self.on_end()
                if self.board.resumes and not self.interrupted:  # the last rollout has made all env steps
                    self.board.stop()
                if ledger.batches or ledger.env_steps != ledger.line_steps:  # learned since the last line
                    self._write_line()
            self.order_checkpoint(what)
        if ledger.reports:
            self.display.update(ledger.status())

    def _due(self, now: float) -> int:
        """What the next order asks for; 0 where none is due."""
        if self.paused or not self.retries.are_due:
            return 0
        evaluates = self.config.eval.every and 0 in self.members and not (self.board.stopping or self.warned)
        what = SAVE if self.retries.failed else SAVE | EVALUATE  # a disk that is full does not repeat an evaluation
        scored = what if evaluates and self.ledger.env_steps >= self.next_eval else 0
        if self.idle:  # the last order is near
            return (scored or SAVE | LAST) if self.members <= self.idle else 0
        first = self.warned or (self.ledger.resumes == 0 and not self.board.sealed)  # to have something to resume from
        return scored or (SAVE if first or now - self.last_checkpoint >= self.config.log.checkpoint_every else 0)

    def _write_line(self) -> None:
        line = {**self.ledger.line(), **self.info.take().means("env/")}
        self.writer.processes(health(self.board, self.processes()), self.ledger.restarts)  # a line comes after it
        self.writer.write(line)
        self.display.update({**self.ledger.status(), "metrics": line})

    def order_checkpoint(self, what: int = SAVE) -> None:
        number = self.board.order[0] + 1
        try:
            checkpoint.open_draft(self.root, f"order_{number}")
        except CoterieError as error:
            return self.give_up_order(str(error))
        self.order, self.saved, self.scores, self.warned = number, {}, None, False
        self.ordered = self.followed = awake()
        self.evaluation = number if what & EVALUATE else self.evaluation
        self.board.give(what)

    def _follow_order(self) -> None:
        """Complete the checkpoint, once all of its parts exist; give the order up when they are late."""
        missing, evaluates = sorted(self.members - self.saved.keys()), self.board.evaluated[0] < self.evaluation
        since, self.followed = awake() - self.followed, awake()
        if not missing and self.saved:  # all learners may be gone; in lockstep, all parts must be of one step
            self._seal() if len({x.env_steps for x in self.saved.values()}) == 1 else self.give_up_order()
        elif (evaluates and not self.board.stopping) or (missing and self.board.all_blocked(missing)):
            self.ordered += since  # this time does not count: an evaluation has no limit, and waits have their own
        elif self.followed - self.ordered > self.config.log.stall:
            whose = f"learner {missing[0]}" if missing else "any learner"
            self.give_up_order(f"no checkpoint: no part of {whose} for {self.config.log.stall:g} s")

    def give_up_order(self, failure: str = "") -> None:
        """Abandon the current order and make a new one due: at once, or after a while where there was a `failure`."""
        self.order, self.saved, self.last_checkpoint = None, {}, -1e9
        self.evaluation = self.evaluation if failure else 0  # a learner is gone, perhaps the one that evaluates
        if failure:
            checkpoint.sweep(self.root)  # a full disk needs the room
            if self.retries.fail(failure):
                self.log(f"{failure}; {'' if self.board.stopping else 'training goes on, and '}it is tried again")

    def join(self, board: Board, readers: list[Callable[[], dict[str, float]]], back: dict[str, Any] | None) -> None:
        """Begin with a new group of learners on this board. `back`: the state that they are rolled back to, if any."""
        board.continue_orders(self.board)
        if back is not None:
            self.ledger.roll_back(back, board)
            self.order, self.saved, self.scores, self.evaluation = None, {}, None, 0
            self.members, self.idle, self.next_eval = set(range(self.learners)), set(), back["next_eval"]
            self.writer.roll_back(back["env_steps"])
        self.board = self.ledger.board = board
        self.ledger.readers = readers

    def _seal(self) -> None:
        what, ledger, scores = self.board.order[1], self.ledger, self.scores
        # A learner that is gone keeps what it had learned.
        counts = [self.saved[k].counts if k in self.saved else self.board.read(k) for k in range(self.learners)]
        steps, line, next_eval = sum(row["learned"] for row in counts), dict[str, Any](), self.next_eval
        if scores is not None:
            line, every = ledger.take_scores(scores, steps), self.config.eval.every
            next_eval += -(-max(1, steps - next_eval + 1) // every) * every
        state = {**ledger.state(counts, bool(what & LAST)), "present": sorted(self.saved), "next_eval": next_eval}
        try:
            draft = checkpoint.draft_path(self.root, f"order_{self.order}")
            path = self.sealed = checkpoint.seal(self.root, draft, steps, state, self.config.log.stall / 2)
        except CoterieError as error:
            return self.give_up_order(str(error))
        if scores is not None:
            self.writer.write(line)
            if scores.returns and not scores.unfinished:  # episodes that end early are no fair sample
                try:
                    checkpoint.mark_best(self.root, path, scores.mean)
                except CoterieError as error:
                    self.log(f"the checkpoint is not marked as best: {error}")
        self.next_eval = next_eval
        checkpoint.prune(self.root, self.config.log.keep)
        self.board.seal()
        if what & LAST:
            self.digests, self.over = {rank: part.digest for rank, part in self.saved.items()}, True
        self.order, self.saved, self.scores, self.last_checkpoint = None, {}, None, time.monotonic()
        self.retries.succeed()

    def stalled(self) -> tuple[int, float] | None:
        """The row of a process without a sign of life for `log.stall` seconds, if there is one, and for how many."""
        pids = {row: pid for row, (_, pid) in self.processes().items() if row >= self.learners or row in self.members}
        return self.heartbeats.stalled(self.board, {**dict.fromkeys(self.members), **pids}, self.config.log.stall)

    def _on_signal(self, number: signal.Signals) -> None:
        """A warning makes a checkpoint due. Another signal ends the run after this rollout, a second one at once."""
        if number == WARNING:
            self.warned = True
        elif self.signal is None:
            self.signal, self.signaled = number, time.monotonic()
            self.board.stop(resumes=bool(self.interrupted))  # an evaluation in this process looks at it
        elif is_second(number, time.monotonic() - self.signaled):
            raise KeyboardInterrupt
