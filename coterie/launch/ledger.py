"""What a run has done so far: the learners' reports and the board become lines of metrics, status and summary."""

from __future__ import annotations

import hashlib
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import numpy as np

from coterie.acting.child_processes import WorkerReport
from coterie.build.evaluate import Scores
from coterie.config import ResolvedConfig
from coterie.envs.tasks import overall, task_of, tasks
from coterie.parallel.board import Board
from coterie.parallel.meters import Busy, Energy
from coterie.roles.entry import LearnerReport
from coterie.runs.metrics import Episodes
from coterie.types import Spec

# Gauges that learners add up; of others the mean.
_SUM = ("wire/refused", "normalizer/clamped", "inference/envs", "inference/streams", "replay/size", "slots/remote_envs")


class Ledger:
    """Counts are read from the board, the rest is added up here.

    `state`: of the checkpoint that the run continues from; `reached`: env steps of its last line of metrics.
    """

    def __init__(
        self, config: ResolvedConfig, spec: Spec, board: Board, state: dict[str, Any] | None, reached: int
    ) -> None:
        self.config, self.spec, self.board = config, spec, board
        self.episodes = Episodes()
        self.tasks = {task: Episodes() for task in several} if len(several := tasks(config.env.id)) > 1 else {}
        self.resumes, self.seconds_before, self.begin_steps = 0, 0.0, 0
        self.rolled_back = self.dropped = self.restarts = 0
        self.restarts_before, self.actor_restarts = ((state or {}).get(k, 0) for k in ("restarts", "actor_restarts"))
        self.last_eval: dict[str, float] = {}
        self.lags, self.line_lags = Counter[int](), Counter[int]()  # rows by policy_lag: of all, since the last line
        self.lag_by_row, self.rollouts = list[float](), 0  # sums of the lag of each row, over that many rollouts
        self.latencies = deque[float](maxlen=20_000)  # seconds that envs have waited for their latest actions
        self.begin_stages: dict[str, float] = dict(state["stages"]) if state is not None else {}
        if state is not None:
            self.resumes = state["life"] + 1
            self.seconds_before, self.begin_steps = state["seconds"], state["env_steps"]
            # What was acted and not learned before the run was resumed is lost.
            self.last_eval, self.dropped = state["last_eval"], state["dropped"] + state.get("in_flight", 0)
            self._load_history(state)
            # What came after the checkpoint is learned again.
            self.rolled_back = state["rolled_back"] + max(0, reached - self.begin_steps)
        self.begin = self.last_line = time.monotonic()
        self.reports: dict[int, LearnerReport] = {}  # the latest of each learner
        self.acted: dict[int, WorkerReport] = {}  # and of each actor
        self.stages, self.metrics = dict(self.begin_stages), dict[str, float]()
        self.line_stages, self.line_steps = dict(self.begin_stages), self.begin_steps
        self.batches, self.first_step = 0, np.inf  # batches since the last line; unix time of the first env step
        self.readers: list[Callable[[], dict[str, float]]] = []  # more values for the lines of metrics
        self.energy, self.busy = Energy(), Busy()

    @property
    def seconds(self) -> float:
        return self.seconds_before + time.monotonic() - self.begin

    @property
    def env_steps(self) -> int:
        return self.board.sum("learned")

    def take(self, rank: int, report: LearnerReport) -> None:
        """Add a learner's report."""
        self.episodes.extend((score, length) for score, length, _ in report.episodes)
        if self.tasks:
            for score, length, env_id in report.episodes:
                self.tasks[task_of(self.config, env_id)].extend([(score, length)])
        self.batches += report.batches
        for name, value in report.metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + value
        self.lags.update(report.lags)
        self.line_lags.update(report.lags)
        if report.rollouts:
            before = self.lag_by_row or [0.0] * len(report.lag_by_row)
            self.lag_by_row = [a + b for a, b in zip(before, report.lag_by_row, strict=True)]
            self.rollouts += report.rollouts
        self._add_stages(report, self.reports.get(rank), self.board.learners)
        self.reports[rank] = report

    def take_acted(self, row: int, report: WorkerReport) -> None:
        """Add an actor's report."""
        self.latencies.extend(report.latencies)
        self._add_stages(report, self.acted.get(row), len(self.board.counts) - self.board.learners)
        self.acted[row] = report

    def _add_stages(self, report: LearnerReport | WorkerReport, before: Any, processes: int) -> None:
        """Add a process's seconds in each stage since `before`, its last report: means over learners, or actors."""
        self.first_step = min(self.first_step, report.first_step)
        for name, seconds in report.stages.items():
            more = seconds - (before.stages.get(name, 0.0) if before else 0.0)  # a restarted process counts from 0
            self.stages[name] = self.stages.get(name, 0.0) + more / processes

    def take_scores(self, scores: Scores, env_steps: int) -> dict[str, Any]:
        """Add an evaluation after `env_steps`; returns its line of metrics."""
        self.last_eval = {"eval_return": scores.mean, "eval_stderr": scores.stderr}
        line = {
            "env_steps": env_steps,
            "seconds": round(self.seconds, 3),
            "eval/return": scores.mean,
            "eval/stderr": scores.stderr,
            "eval/episodes": len(scores.returns),
            "eval/unfinished": scores.unfinished,
            **scores.info.means("eval/env/"),
        }
        if (second := scores.secondary) is not None and not second.unfinished:
            line |= {"eval/secondary_return": second.mean, "eval/secondary_stderr": second.stderr}
        return line

    def lose(self, rank: int, actors: Iterable[int] = ()) -> None:
        """A learner has died, and its actors (rows of the board) with it: the rows that it had not learned are lost."""
        learned = self.board.read(rank)["learned"]
        self.dropped += sum(self.board.read(row)["produced"] for row in (rank, *actors)) - learned
        self.board.write(rank, {"produced": learned, "dropped": 0, "in_flight": 0})
        for row in actors:
            self.board.write(row, {"produced": 0, "delivered": 0})
            self.acted.pop(row, None)
        self.reports.pop(rank, None)

    def lose_actor(self, row: int, delivered: int = 0) -> None:
        """An actor has died, and its unfinished rollout is lost. `delivered`: rows that it may have handed over without
        counting them.
        """
        counts = self.board.read(row)
        delivered = max(delivered, counts["delivered"])
        self.dropped += counts["produced"] - delivered
        self.board.write(row, {"produced": delivered, "delivered": delivered})
        self.acted.pop(row, None)

    def roll_back(self, state: dict[str, Any], board: Board) -> None:
        """Go back to a checkpoint, with a new board; the old one has what was counted since then."""
        learned = self.board.sum("learned")
        self.rolled_back += learned - state["env_steps"]
        self.dropped += self.board.sum("produced") - learned
        self.board, self.reports, self.acted, self.metrics, self.batches = board, {}, {}, {}, 0
        self.line_steps, self.last_eval = state["env_steps"], state["last_eval"]
        self.line_lags.clear()
        self._load_history(state)

    def _load_history(self, state: dict[str, Any]) -> None:
        self.lags = Counter({int(k): v for k, v in state.get("lags", {}).items()})
        self.lag_by_row, self.rollouts = list(state.get("lag_by_row", ())), state.get("rollouts", 0)
        self.episodes.load_state_dict(state["episodes"])
        for task, episodes in self.tasks.items():
            episodes.load_state_dict(state["tasks"][task])

    def state(self, counts: list[dict[str, int]], last: bool) -> dict[str, Any]:
        """What a checkpoint keeps, with each learner's counts as of its part. `last`: the actors have ended."""
        replaced = sum(self.board.read(row)["replaced"] for row in range(self.board.learners, len(self.board.counts)))
        counts = [{**row, "replaced": row["replaced"] + replaced * (rank == 0)} for rank, row in enumerate(counts)]
        return {
            "env_steps": sum(row["learned"] for row in counts),
            "learners": counts,
            "stages": self.stages,
            "last_eval": self.last_eval,
            "seconds": self.seconds,
            "life": self.resumes,
            "rolled_back": self.rolled_back,
            "dropped": self.dropped + self.board.sum("dropped"),
            "restarts": self.restarts_before + self.restarts,
            "actor_restarts": self.actor_restarts,
            "in_flight": self.board.in_flight if last else 0,
            "lags": {str(lag): rows for lag, rows in self.lags.items()},
            "lag_by_row": self.lag_by_row,
            "rollouts": self.rollouts,
            "episodes": self.episodes.state_dict(),
            "tasks": {task: episodes.state_dict() for task, episodes in self.tasks.items()},
        }

    def status(self) -> dict[str, Any]:
        """For the display: rates and stages since the run was started."""
        elapsed = max(time.monotonic() - self.begin, 1e-9)
        return {
            **self._rates(self.env_steps - self.begin_steps, elapsed),
            "mean_return": self.episodes.mean_return,
            "episodes": self.episodes.count,
            "stages": {k: (v - self.begin_stages.get(k, 0.0)) / elapsed for k, v in self.stages.items()},
            "restarts": self.restarts,
            **self.last_eval,
        }

    def line(self) -> dict[str, Any]:
        """One line of metrics: rates and stages since the line before, losses as means over its batches."""
        now, steps = time.monotonic(), self.env_steps
        elapsed = max(now - self.last_line, 1e-9)
        reports = list(self.reports.values())
        processes = chain[LearnerReport | WorkerReport](reports, self.acted.values())
        rss = [r.rss_mb for r in processes if r.rss_mb is not None]
        line: dict[str, Any] = {
            **{k: v / max(1, self.batches) for k, v in self.metrics.items()},  # a user's may have the names below
            **self._rates(steps - self.line_steps, elapsed),
            **self._totals(),
            "mean_length": self.episodes.mean_length,
            **self._task_returns(),
            "lr": reports[0].lr if reports else None,
            **self._line_lag(),
            **{f"latency/{name}": value for name, value in self._latency().items()},
            "rss_mb": sum(rss) if rss else None,
        }
        for name in sorted({name for r in reports for name in r.gauges}):
            values = [r.gauges[name] for r in reports if name in r.gauges]
            line[name] = max(values) if name.endswith("/max") else sum(values) / (1 if name in _SUM else len(values))
        for stage, seconds in self.stages.items():
            line[f"stage/{stage}"] = (seconds - self.line_stages.get(stage, 0.0)) / elapsed
        self.line_stages, self.last_line, self.line_steps = dict(self.stages), now, steps
        self.metrics, self.batches = {}, 0
        self.line_lags.clear()
        if joules := self.energy.joules():
            line["joules"] = joules  # of the whole machine, since the run was started
        for read in (self.busy.read, *self.readers):
            line |= read()
        return line

    def _rates(self, env_steps: int, seconds: float) -> dict[str, Any]:
        """The env steps, and the rate at which the last `env_steps` of them were learned."""
        rate = env_steps / seconds
        return {"env_steps": self.env_steps, "env_steps_per_s": rate, "frames_per_s": rate * self.spec.action_repeat}

    def _totals(self) -> dict[str, Any]:
        """Sums over the whole run, for the lines of metrics and the summary."""
        board = self.board
        return {
            "learner_steps": board.sum("learner_steps"),
            "seconds": round(self.seconds, 3),
            "episodes": self.episodes.count,
            "mean_return": self.episodes.mean_return,
            "masked_steps": board.sum("masked"),
            "envs_replaced": board.sum("replaced"),
            "skipped_batches": board.sum("skipped"),
            "policy_lag_max": int(board.counts["policy_lag_max"].max()),
        }

    def _task_returns(self) -> dict[str, float]:
        """The mean return of each of several tasks, and one score of all once each has ended an episode."""
        means = {task: episodes.mean_return for task, episodes in self.tasks.items() if episodes.count}
        lines = {f"return/{task}": mean for task, mean in means.items()}
        return lines | ({"score": overall(means)} if means and len(means) == len(self.tasks) else {})

    def _line_lag(self) -> dict[str, float]:
        """The policy lag (mean and 95th percentile, in learner steps) of the rows learned since the last line."""
        total = self.line_lags.total()
        if not total:
            return {}
        lags = np.array(sorted(self.line_lags.items()))  # lag, rows
        p95 = lags[np.searchsorted(lags[:, 1].cumsum(), 0.95 * total), 0]
        return {"policy_lag/mean": float(lags[:, 0] @ lags[:, 1] / total), "policy_lag/p95": int(p95)}

    def _latency(self) -> dict[str, float]:
        """How long envs have waited for their latest actions."""
        if not self.latencies:
            return {}
        p50, p99 = np.percentile(np.array(self.latencies), (50, 99)) * 1e3
        return {"p50_ms": float(p50), "p99_ms": float(p99)}

    def summary(self, digests: dict[int, str]) -> dict[str, Any]:
        """The final metrics that this run can have. `digests`: of the learners' last weights, where they have ended."""
        board, learned, totals = self.board, self.env_steps, self._totals()
        if self.config.optim.on_nonfinite == "stop":
            del totals["skipped_batches"]
        each = [digests.get(k, "") for k in range(self.config.learners)]
        by_row = [round(x / self.rollouts, 3) for x in self.lag_by_row]
        whole = each[0] if len(each) == 1 else hashlib.sha256("".join(each).encode()).hexdigest()
        return {
            "env_steps": learned,
            "env_frames": learned * self.spec.action_repeat,
            **totals,
            "samples_trained": board.sum("samples_trained"),
            "env_steps_per_s": float(f"{learned / max(self.seconds, 1e-9):.5g}"),
            **({"tasks": self._task_returns()} if self.tasks else {}),
            "rows": {
                "produced": board.sum("produced") + self.rolled_back + self.dropped,
                "learned": learned,
                "in_flight": board.in_flight if digests else 0,
                # An error or a second signal: the processes took with them what was not learned.
                "dropped": self.dropped + (board.sum("dropped") if digests else board.sum("produced") - learned),
                "rolled_back": self.rolled_back,
            },
            "policy_lag": {str(lag): rows for lag, rows in sorted(self.lags.items())},
            **({"policy_lag_by_row": by_row} if any(by_row) else {}),
            **{f"latency_{name}": round(value, 3) for name, value in self._latency().items()},
            "stages": {k: seconds for k, v in self.stages.items() if (seconds := round(v, 3))},
            "energy": self.energy.summary((learned - self.begin_steps) * self.spec.action_repeat),
            "digest": whole if digests else "",
            **({"digests": each} if len(each) > 1 else {}),
            "restarts": self.restarts_before + self.restarts,
            "actor_restarts": self.actor_restarts,
            **self.last_eval,
        }
