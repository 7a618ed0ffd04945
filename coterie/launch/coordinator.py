"""A run from its first order to its summary: what is due when, checkpoints put together, signals, the end.

Learners report and save; a `Run` decides, an `Account` (account.py) adds up, the folder's writer writes down.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from coterie.acting.table import acting_kind
from coterie.build.evaluate import Scores
from coterie.config import ResolvedConfig
from coterie.launch.ledger import Account
from coterie.parallel.affinity import rss_mb
from coterie.parallel.board import EVALUATE, LAST, SAVE, Board
from coterie.parallel.signals import on_signals
from coterie.runs import checkpoint
from coterie.runs.display import Display
from coterie.runs.metrics import RunWriter, read_metrics
from coterie.types import CoterieError, Spec

_STARVED_S = 20.0  # that learners wait for rollouts after a signal


class Run:
    """The life of a run in one process. `state`: of the checkpoint that it goes on from."""

    def __init__(
        self,
        config: ResolvedConfig,
        folder: Path,
        spec: Spec,
        board: Board,
        *,
        state: dict[str, Any] | None,
        quiet: bool,
    ) -> None:
        self.config, self.folder, self.root, self.spec = config, folder, folder / "checkpoints", spec
        reached = 0 if state is None else max((line["env_steps"] for line in read_metrics(folder)), default=0)
        self.account = Account(config, spec, board, state, reached)
        self.next_eval = config.eval.every if state is None else state["next_eval"]
        self.writer = self._writer(None if state is None else state["env_steps"])
        self.display = Display(config.steps, title(config), start_steps=self.account.begin_steps, quiet=quiet)
        self.last_checkpoint = time.monotonic()
        self.members = set(range(self.learners))  # who is to take part in a checkpoint
        self.idle: set[int] = set()
        self.order: int | None = None  # the order that is being carried out
        self.saved: dict[int, dict[str, Any]] = {}
        self.scores: Scores | None = None
        self.digests: dict[int, str] = {}
        self.on_end: Callable[[], None] = lambda: None  # called before the last order: nobody acts after it
        self.actors: set[int] = set()  # their rows of the board, where they are at work
        # Name and pid of the process behind each row of the board.
        self.processes: Callable[[], dict[int, tuple[str, int]]] = lambda: {0: ("learner 0", os.getpid())}
        self.over = False
        self.signal: signal.Signals | None = None
        self.noted = self.alarmed = False
        self.more: dict[str, Any] = {}  # for the summary
        self.waiting_since = 0.0  # after a signal: since when all learners wait
        self.starved = False  # they have for too long: the last checkpoint has to do

    @property
    def board(self) -> Board:
        return self.account.board

    @property
    def learners(self) -> int:
        return self.account.learners

    def _writer(self, resume_env_steps: int | None) -> RunWriter:
        return RunWriter(self.folder, self.config.log.tensorboard, self.config.log.wandb, resume_env_steps)

    @property
    def ending(self) -> bool:
        """Whether the last order has been given."""
        return self.order is not None and bool(self.board.order[1] & LAST)

    def go(self, work: Callable[[], None], close: Callable[[], None]) -> dict[str, Any]:
        """Do `work` to the end, to a signal, or to an error, and write the summary whichever it is."""
        status, reason = "finished", ""
        failure: BaseException | None = None
        with on_signals(self._hear):
            try:
                with self.display:
                    work()
                if self.signal is not None:
                    status, reason = "interrupted", self.signal.name
            except KeyboardInterrupt as error:
                status, reason, failure = "failed", "stopped at once by a second signal, without a checkpoint", error
            except Exception as error:
                status, reason, failure = "failed", _one_line(error), error
                if not isinstance(error, CoterieError):
                    with suppress(CoterieError):
                        self.writer.log(traceback.format_exc())
            finally:
                close()
        summary = self._summary(status, reason)
        with suppress(CoterieError):  # what could not be written has its reason already
            self.writer.summary(summary)
        with suppress(CoterieError):
            self.writer.log(f"{status} {reason}".strip())
        with suppress(CoterieError):
            self.writer.close()
        if isinstance(failure, KeyboardInterrupt):
            raise failure
        if failure is not None:
            with suppress(OSError):
                checkpoint.sweep(self.root)
            kept = checkpoint.latest(self.root)
            kind = type(failure) if isinstance(failure, CoterieError) else CoterieError
            raise kind(reason + (f"; last good checkpoint: {kept}" if kept else "")) from failure
        return summary

    def _summary(self, status: str, reason: str) -> dict[str, Any]:
        told = {**self.account.summary(self.digests), **self.more}
        return {"status": status, "reason": reason, "folder": str(self.folder), **told}

    def receive(self, rank: int, kind: str, content: Any) -> None:
        """The message of a learner, or of an actor (`rank`: its row of the board); then see what is due."""
        if kind == "note":
            if rank == 0 or self.learners == 1:
                self.display.note(f"{self.learners} learners, each: {content}" if self.learners > 1 else content)
        elif kind == "report":
            self.account.take(rank, content)
            for reason in content["failures"]:
                self.writer.log(reason)
        elif kind == "said":
            self.writer.log(content)
            self.display.note(content)
        elif kind == "acted":
            self.account.take_acted(rank, content)
            for reason in content["failures"]:
                self.writer.log(reason)
        elif kind == "scores":
            if content["order"] == self.order:
                self.scores = content["scores"]
        elif kind == "saved":
            if content["order"] == self.order:
                self.saved[rank] = content
        elif kind == "idle":
            self.idle.add(rank)
        self.poll()

    def poll(self) -> None:
        """Do what is due by now. Called after every message, and in between where there are several learners."""
        now, account = time.monotonic(), self.account
        if self.signal is not None and not self.noted:
            self.noted, self.waiting_since = True, now
            self.display.note(f"{self.signal.name}: a checkpoint, then the end (again: stop at once)")
            self.board.stop()
        if self.order is not None and self.members <= self.saved.keys():
            self._seal()
        if self.signal is not None:
            self._see_who_waits(now)
        if self.over:
            return
        if account.reports and now - account.last_line >= self.config.log.every:
            self._line()
        if self.order is None:
            if self.members <= self.idle:
                if account.news:
                    self._line()
                self.on_end()
                self._order(SAVE | LAST)
            elif self.idle:
                pass  # the end is near
            elif account.life == 0 and checkpoint.latest(self.root) is None:
                self._order(SAVE)  # from here on there is something to resume from
            elif self.config.eval.every and account.env_steps >= self.next_eval and self.signal is None:
                self._order(SAVE | EVALUATE)
            elif now - self.last_checkpoint >= self.config.log.checkpoint_every:
                self._order(SAVE)
        if account.reports:
            self.display.update(account.status())

    def _see_who_waits(self, now: float) -> None:
        """After a signal: learners that all wait for what nobody makes, such as one that has no hosts and others that
        wait for its gradient, cannot come to a checkpoint.
        """
        if self.over or self.idle or not self.board.all_blocked(self.members):
            self.waiting_since = now
        self.starved = now - self.waiting_since > _STARVED_S

    def _line(self) -> None:
        line, section = self.account.line(), acting_kind(self.config).section(self.config)
        alarm = 0 if section is None else section.lag_alarm
        self.writer.write(line)
        self.writer.processes(self._health(), self.account.restarts)
        if alarm and line.get("policy_lag/p95", 0) >= alarm:
            self.writer.log(
                f"policy_lag {line['policy_lag/p95']:g} learner steps (p95), {self.config.acting}.lag_alarm {alarm}"
            )
            if not self.alarmed:
                self.display.note(f"the policy that acts is old: see policy_lag in {self.folder / 'metrics.jsonl'}")
            self.alarmed = True
        self.display.update({**self.account.status(), "losses": line})

    def _health(self) -> list[dict[str, Any]]:
        """What is known of each process: `rss_mb` is None where it is gone."""
        now, board = time.monotonic(), self.board
        return [
            {
                "name": name, "pid": pid, "silent_s": round(now - float(board.heartbeat[row]), 1),
                "env_steps": board.read(row)["produced"], "rss_mb": rss_mb(pid),
            }
            for row, (name, pid) in sorted(self.processes().items())
        ]  # fmt: skip

    def _order(self, what: int) -> None:
        self.saved, self.scores = {}, None
        self.order = self.board.order[0] + 1
        checkpoint.open_draft(self.root, f"order_{self.order}")
        self.board.give(what)

    def give_up_order(self) -> None:
        """Somebody who was to take part in the order is gone: it will be given again."""
        self.order, self.saved = None, {}
        self.last_checkpoint = -1e9

    def join(self, board: Board, readers: list[Callable[[], dict[str, float]]], back: dict[str, Any] | None) -> None:
        """A group of learners begins on this board, where one is given `back` at a checkpoint's state."""
        if back is not None:
            self.account.roll_back(back, board)
            self.order, self.saved, self.scores = None, {}, None
            self.members, self.idle, self.next_eval = set(range(self.learners)), set(), back["next_eval"]
            self.writer.close()
            self.writer = self._writer(back["env_steps"])  # curves do not double back
        self.account.board = board
        self.account.readers = readers

    def _seal(self) -> None:
        """All parts of a checkpoint are there."""
        what = self.board.order[1]
        counts = [  # a learner that is gone keeps what it had learned
            self.saved[rank]["counts"] if rank in self.saved else self.board.read(rank) for rank in range(self.learners)
        ]
        steps = sum(row["learned"] for row in counts)
        if self.scores is not None:
            self.writer.write(self.account.take_scores(self.scores, steps))
            every = self.config.eval.every
            self.next_eval += -(-max(1, steps - self.next_eval + 1) // every) * every
        account = self.account.state(counts, bool(what & LAST))
        state = {**account, "present": sorted(self.saved), "next_eval": self.next_eval}
        draft = checkpoint.draft_path(self.root, f"order_{self.order}")
        path = checkpoint.seal(self.root, draft, steps, state)
        # The games that end early are not a fair sample: a score that was cut short marks nothing.
        if self.scores is not None and self.scores.returns and not self.scores.unfinished:
            best = checkpoint.best_score(self.root)
            if best is None or self.scores.mean >= best:
                checkpoint.mark_best(self.root, path, self.scores.mean)
        checkpoint.prune(self.root, self.config.log.keep)
        if what & LAST:
            self.digests = {rank: part["digest"] for rank, part in self.saved.items()}
            self.over = True
        self.order, self.saved, self.scores = None, {}, None
        self.last_checkpoint = time.monotonic()

    def stalled(self) -> str | None:
        """Who has not come forward for `log.stall` seconds, if anybody."""
        stall, now = self.config.log.stall, time.monotonic()
        watched = sorted(self.members | self.actors)
        stale = self.board.stale(watched, now - stall) if now - self.account.begin > stall else []
        if not stale:
            return None
        idle = now - max(float(self.board.heartbeat[stale[0]]), self.account.begin)
        row = stale[0] - self.learners
        kind = acting_kind(self.config).child
        who = f"{kind} {row}: " if row >= 0 else f"learner {stale[0]}: " if self.learners > 1 else ""
        return f"{who}no rollout for {idle:.0f} s (log.stall): an environment or the learner hangs"

    def exit_when_stalled(self) -> Callable[[], None]:
        """Watch this very process from a thread: a hung simulator cannot be interrupted. Returns a call to end that."""
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(min(5.0, self.config.log.stall / 4)):
                if reason := self.stalled():
                    with suppress(Exception):
                        self.writer.summary(self._summary("failed", reason))
                    sys.stderr.write(f"coterie: {reason}\n")
                    sys.stderr.flush()
                    os._exit(1)

        threading.Thread(target=watch, name="coterie-watchdog", daemon=True).start()
        return ended.set

    def _hear(self, number: signal.Signals) -> None:
        """The first asks for an end after this rollout; a second one ends it at once."""
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = number


def title(config: ResolvedConfig) -> str:
    parts = (config.preset or config.algorithm, config.env.id, config.acting, config.exchange)
    return " x ".join(parts)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, CoterieError) else f"{type(error).__name__}: {text}"
