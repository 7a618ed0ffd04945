"""A run's folder and its book-keeping: metrics, evaluations, checkpoints, signals, the summary.

Learners report and save; a `Run` decides what is due, puts the parts together and writes them down.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from coterie.config import Config
from coterie.evaluate import Scores
from coterie.parallel.board import COUNTS, EVALUATE, LAST, SAVE, Board
from coterie.parallel.energy import Energy
from coterie.runs import checkpoint
from coterie.runs.display import Display
from coterie.runs.metrics import Episodes, RunWriter, read_metrics
from coterie.types import CoterieError, Spec

EXIT_INTERRUPTED = 75  # EX_TEMPFAIL: checkpointed on a signal, run `resume`


class Run:
    """The life of a run in one process. `state`: of the checkpoint that it goes on from."""

    def __init__(
        self, config: Config, folder: Path, spec: Spec, board: Board, *, state: dict[str, Any] | None, quiet: bool
    ) -> None:
        self.config, self.folder, self.root, self.spec = config, folder, folder / "checkpoints", spec
        self.board, self.learners = board, len(board.here)
        self.episodes = Episodes()
        self.life, self.seconds_before, self.next_eval = 0, 0.0, config.eval.every
        self.rolled_back = self.dropped = self.restarts = 0
        self.last_eval: dict[str, float] = {}
        if state is not None:
            self.life, self.seconds_before, self.next_eval = state["life"] + 1, state["seconds"], state["next_eval"]
            self.last_eval, self.dropped = state["last_eval"], state["dropped"]
            self.episodes.load_state_dict(state["episodes"])
            lost = max((line["env_steps"] for line in read_metrics(folder)), default=0) - state["env_steps"]
            self.rolled_back = state["rolled_back"] + max(0, lost)
        at = self.begin_steps = self.line_steps = 0 if state is None else state["env_steps"]
        self.writer = self._writer(at if state is not None else None)
        self.display = Display(config.steps, title(config), start_steps=at, quiet=quiet)
        self.begin = self.last_line = self.last_checkpoint = time.monotonic()
        self.reports: dict[int, dict[str, Any]] = {}
        self.stages: dict[str, float] = {}
        self.begin_stages: dict[str, float] = {} if state is None else dict(state["stages"])
        self.line_stages: dict[str, float] = {}
        self.metrics: dict[str, float] = {}
        self.batches = 0
        self.members = set(range(self.learners))  # who is to take part in a checkpoint
        self.idle: set[int] = set()
        self.order: int | None = None  # the order that is being carried out
        self.saved: dict[int, dict[str, Any]] = {}
        self.scores: Scores | None = None
        self.digests: dict[int, str] = {}
        self.readers: list[Callable[[], dict[str, float]]] = []  # more for the lines of metrics
        self.energy = Energy()
        self.over = False
        self.signal: signal.Signals | None = None
        self.noted = False

    def _writer(self, resume_env_steps: int | None) -> RunWriter:
        return RunWriter(self.folder, self.config.log.tensorboard, self.config.log.wandb, resume_env_steps)

    @property
    def seconds(self) -> float:
        return self.seconds_before + time.monotonic() - self.begin

    @property
    def env_steps(self) -> int:
        return self.board.sum("learned")

    @property
    def ending(self) -> bool:
        """Whether the last order has been given."""
        return self.order is not None and bool(self.board.order[1] & LAST)

    def go(self, work: Callable[[], None], close: Callable[[], None]) -> dict[str, Any]:
        """Do `work` to the end, to a signal, or to an error, and write the summary whichever it is."""
        restore = self._catch_signals()
        status, reason = "finished", ""
        failure: BaseException | None = None
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
            restore()
        summary = self.summary(status, reason)
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

    def receive(self, rank: int, kind: str, content: Any) -> None:
        """A learner's message; then see what is due."""
        if kind == "note":
            if rank == 0 or self.learners == 1:
                self.display.note(f"{self.learners} learners, each: {content}" if self.learners > 1 else content)
        elif kind == "report":
            self._take_report(rank, content)
        elif kind == "scores":
            self._take_scores(content)
        elif kind == "saved":
            if content["order"] == self.order:
                self.saved[rank] = content
        elif kind == "idle":
            self.idle.add(rank)
        self.poll()

    def poll(self) -> None:
        """Do what is due by now. Called after every message, and in between where there are several learners."""
        now = time.monotonic()
        if self.signal is not None and not self.noted:
            self.noted = True
            self.display.note(f"{self.signal.name}: a checkpoint, then the end (again: stop at once)")
            self.board.stop()
        if self.order is not None and self.members <= self.saved.keys():
            self._seal()
        if self.over:
            return
        if self.reports and now - self.last_line >= self.config.log.every:
            self._line()
        if self.order is None:
            steps = self.env_steps
            if self.members <= self.idle:
                self._line()
                self._order(SAVE | LAST)
            elif self.idle:
                pass  # the end is near
            elif self.life == 0 and checkpoint.latest(self.root) is None:
                self._order(SAVE)  # from here on there is something to resume from
            elif self.config.eval.every and steps >= self.next_eval and self.signal is None:
                every = self.config.eval.every
                self.next_eval += -(-(steps - self.next_eval + 1) // every) * every
                self._order(SAVE | EVALUATE)
            elif now - self.last_checkpoint >= self.config.log.checkpoint_every:
                self._order(SAVE)
        if self.reports:
            self.display.update(self._status())

    def lose(self, rank: int) -> None:
        """A learner has died: what it had acted and not learned is lost."""
        row = self.board.read(rank)
        self.dropped += row["produced"] - row["learned"]
        self.board.write(rank, {"produced": row["learned"]})
        self.board.here[rank] = 0
        self.reports.pop(rank, None)

    def roll_back(self, state: dict[str, Any]) -> None:
        """All learners go back to a checkpoint; what they had counted since is on the old board."""
        learned = self.board.sum("learned")
        self.rolled_back += learned - state["env_steps"]
        self.dropped += self.board.sum("produced") - learned
        self.order, self.saved, self.scores = None, {}, None
        self.members, self.idle, self.reports = set(range(self.learners)), set(), {}
        self.line_steps = state["env_steps"]
        self.episodes.load_state_dict(state["episodes"])
        self.next_eval, self.last_eval = state["next_eval"], state["last_eval"]
        self.writer.close()
        self.writer = self._writer(state["env_steps"])  # curves do not double back

    def give_up_order(self) -> None:
        """The order cannot be completed as it was given: somebody who was to take part is gone."""
        self.order, self.saved = None, {}
        self.last_checkpoint = -1e9

    def _take_report(self, rank: int, content: dict[str, Any]) -> None:
        self.episodes.extend(content["games"])
        self.batches += content["batches"]
        for name, value in content["metrics"].items():
            self.metrics[name] = self.metrics.get(name, 0.0) + value
        self.reports[rank] = content
        names = {name for report in self.reports.values() for name in report["stages"]}
        self.stages = {
            name: self.begin_stages.get(name, 0.0)
            + sum(report["stages"].get(name, 0.0) for report in self.reports.values()) / len(self.reports)
            for name in names
        }

    def _status(self) -> dict[str, Any]:
        elapsed = max(time.monotonic() - self.begin, 1e-9)
        steps = self.env_steps
        rate = (steps - self.begin_steps) / elapsed
        return {
            "env_steps": steps,
            "env_steps_per_s": rate,
            "frames_per_s": rate * self.spec.action_repeat,
            "mean_return": self.episodes.mean_return,
            "episodes": self.episodes.count,
            "stages": {k: (v - self.begin_stages.get(k, 0.0)) / elapsed for k, v in self.stages.items()},
            **self.last_eval,
        }

    def _line(self) -> None:
        """One line of metrics: rates and stages since the line before, losses as means over its batches."""
        now, steps, board = time.monotonic(), self.env_steps, self.board
        elapsed = max(now - self.last_line, 1e-9)
        rate = (steps - self.line_steps) / elapsed
        reports = list(self.reports.values())
        rss = [r["rss_mb"] for r in reports if r["rss_mb"] is not None]
        line: dict[str, Any] = {
            "env_steps": steps,
            "seconds": round(self.seconds, 3),
            "learner_steps": board.sum("learner_steps"),
            "env_steps_per_s": rate,
            "frames_per_s": rate * self.spec.action_repeat,
            "mean_return": self.episodes.mean_return,
            "mean_length": self.episodes.mean_length,
            "episodes": self.episodes.count,
            "lr": reports[0]["lr"] if reports else None,
            "policy_lag_max": int(board.counts[:, COUNTS.index("policy_lag_max")].max()),
            "masked_steps": board.sum("masked"),
            "envs_replaced": board.sum("replaced"),
            "skipped_batches": board.sum("skipped"),
            "rss_mb": sum(rss) if rss else None,
            **{k: v / max(1, self.batches) for k, v in self.metrics.items()},
        }
        for name in sorted({name for r in reports for name in r["gauges"]}):
            values = [r["gauges"][name] for r in reports if name in r["gauges"]]
            line[name] = sum(values) / len(values)
        for stage, seconds in self.stages.items():
            line[f"stage/{stage}"] = (
                seconds - self.line_stages.get(stage, self.begin_stages.get(stage, 0.0))
            ) / elapsed
        self.line_stages, self.last_line, self.line_steps = dict(self.stages), now, steps
        self.metrics, self.batches = {}, 0
        for read in self.readers:
            line |= read()
        self.writer.write(line)
        self.display.update({**self._status(), "losses": line})

    def _take_scores(self, scores: Scores) -> None:
        self.scores = scores
        self.last_eval = {"eval_return": scores.mean, "eval_stderr": scores.stderr}
        self.writer.write(
            {
                "env_steps": self.env_steps,
                "seconds": round(self.seconds, 3),
                "eval/return": scores.mean,
                "eval/stderr": scores.stderr,
                "eval/episodes": len(scores.returns),
                "eval/unfinished": scores.unfinished,
            }
        )

    def _order(self, what: int) -> None:
        self.saved, self.scores = {}, None
        self.order = self.board.order[0] + 1
        checkpoint.open_draft(self.root, f"order_{self.order}")
        self.board.give(what)

    def _seal(self) -> None:
        """All parts of a checkpoint are there."""
        last = bool(self.board.order[1] & LAST)
        counts = [  # a learner that is gone keeps what it had learned
            self.saved[rank]["counts"] if rank in self.saved else self.board.read(rank) for rank in range(self.learners)
        ]
        steps = sum(row["learned"] for row in counts)
        state = {
            "env_steps": steps,
            "learners": counts,
            "present": sorted(self.saved),
            "stages": self.stages,
            "last_eval": self.last_eval,
            "seconds": self.seconds,
            "life": self.life,
            "next_eval": self.next_eval,
            "rolled_back": self.rolled_back,
            "dropped": self.dropped,
            "episodes": self.episodes.state_dict(),
        }
        path = checkpoint.seal(self.root, checkpoint.draft_path(self.root, f"order_{self.order}"), steps, state)
        # The games that end early are not a fair sample: a score that was cut short marks nothing.
        if self.scores is not None and self.scores.returns and not self.scores.unfinished:
            best = checkpoint.best_score(self.root)
            if best is None or self.scores.mean >= best:
                checkpoint.mark_best(self.root, path, self.scores.mean)
        checkpoint.prune(self.root, self.config.log.keep)
        if last:
            self.digests = {rank: part["digest"] for rank, part in self.saved.items()}
            self.over = True
        self.order, self.saved, self.scores = None, {}, None
        self.last_checkpoint = time.monotonic()

    def stalled(self) -> str | None:
        """Who has not come forward for `log.stall` seconds, if anybody."""
        stall, now = self.config.log.stall, time.monotonic()
        stale = self.board.stale(sorted(self.members), now - stall) if now - self.begin > stall else []
        if not stale:
            return None
        idle = now - max(float(self.board.beat[stale[0]]), self.begin)
        who = f"learner {stale[0]}: " if self.learners > 1 else ""
        return f"{who}no rollout for {idle:.0f} s (log.stall): an environment or the learner hangs"

    def exit_when_stalled(self) -> Callable[[], None]:
        """Watch this very process from a thread: a hung simulator cannot be interrupted. Returns a call to end that."""
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(min(5.0, self.config.log.stall / 4)):
                if reason := self.stalled():
                    with suppress(Exception):
                        self.writer.summary(self.summary("failed", reason))
                    sys.stderr.write(f"coterie: {reason}\n")
                    sys.stderr.flush()
                    os._exit(1)

        threading.Thread(target=watch, name="coterie-watchdog", daemon=True).start()
        return ended.set

    def summary(self, status: str, reason: str) -> dict[str, Any]:
        seconds, board = self.seconds, self.board
        learned, produced = board.sum("learned"), board.sum("produced")
        digests = [self.digests.get(rank, "") for rank in range(self.learners)]
        whole = digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
        return {
            "status": status,
            "reason": reason,
            "folder": str(self.folder),
            "env_steps": learned,
            "env_frames": learned * self.spec.action_repeat,
            "learner_steps": board.sum("learner_steps"),
            "samples_trained": board.sum("samples_trained"),
            "seconds": round(seconds, 3),
            "env_steps_per_s": learned / seconds,
            "episodes": self.episodes.count,
            "mean_return": self.episodes.mean_return,
            "rows": {
                "produced": produced + self.rolled_back + self.dropped,
                "learned": learned,
                "in_flight": produced - learned,  # what an error or a second signal kept from being learned
                "dropped": self.dropped,
                "rolled_back": self.rolled_back,
            },
            "masked_steps": board.sum("masked"),
            "envs_replaced": board.sum("replaced"),
            "skipped_batches": board.sum("skipped"),
            "policy_lag_max": int(board.counts[:, COUNTS.index("policy_lag_max")].max()),
            "stages": {k: round(v, 3) for k, v in self.stages.items()},
            "energy": self._energy(learned - self.begin_steps),
            "digest": whole if self.digests else "",
            **({"digests": digests, "restarts": self.restarts} if self.learners > 1 else {}),
            **self.last_eval,
        }

    def _energy(self, env_steps: int) -> dict[str, Any]:
        """Of this life of the run, and of the whole machine."""
        joules = self.energy.joules()
        if not joules:
            return {"frames_per_kj": None, "joules": None, "reason": self.energy.reason}
        return {"frames_per_kj": env_steps * self.spec.action_repeat / (joules / 1e3), "joules": joules, "reason": ""}

    def _catch_signals(self) -> Callable[[], None]:
        """SIGINT and SIGTERM ask for an end after this rollout; a second one ends it at once."""

        def handle(number: int, frame: FrameType | None) -> None:
            if self.signal is not None:
                raise KeyboardInterrupt
            self.signal = signal.Signals(number)

        try:
            before = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # not the main thread, as in some notebooks: signals stay whoever's they are
            return lambda: None

        def restore() -> None:
            for number, handler in before.items():
                signal.signal(number, handler)

        return restore


def title(config: Config) -> str:
    parts = (config.preset or config.algorithm, config.env.id, config.acting, config.exchange)
    return " x ".join(parts)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, CoterieError) else f"{type(error).__name__}: {text}"
