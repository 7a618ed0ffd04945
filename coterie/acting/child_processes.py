"""What all acting modes with child processes share: their refusals, and what actors and env hosts report to the log."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from coterie.acting.base import Section, Stopped, WorkerSetup
from coterie.acting.recorder import Envs
from coterie.config import Config, Refusal, ResolvedConfig
from coterie.envs.news import EnvNews
from coterie.envs.tasks import tasks
from coterie.parallel.hardware import rss_mb
from coterie.parallel.stages import Stages
from coterie.types import Post

_REPORT_S = 0.5  # between two reports


def shares_evenly(config: ResolvedConfig, optional: bool = False) -> bool:
    """Whether learners, tasks and envs are shared out evenly over the children. `optional`: zero children are allowed
    where remote clients may join.
    """
    actors, learners = config.actors, config.learners
    return (
        (actors > 0 or (optional and bool(config.wire.bind)))
        and actors % learners == actors % len(tasks(config.env.id)) == 0
        and config.env.num_envs * learners % max(1, actors) == 0
    )


def child_process_refusals(section: Callable[[Config], Section], optional: bool = False) -> tuple[Refusal, ...]:
    """Refusals of every acting mode with child processes."""
    return (
        Refusal(
            lambda c, s: c.actors == 0 and not (optional and bool(c.wire.bind)),
            "actors",
            "must be at least 1 for each learner" + ", or 0 where env hosts connect (wire.bind)" * optional,
        ),
        Refusal(
            lambda c, s: not shares_evenly(c, optional),
            "actors",
            "must be a multiple of the learners and of the tasks, and divide env.num_envs x learners evenly; give "
            "other numbers, or leave both at auto",
        ),
        Refusal(
            lambda c, s: section(c).lockstep and section(c).batch_size not in (0, c.env.num_envs),
            "ACTING.batch_size",
            "must be 0 in lockstep: a batch has one rollout of each env",
        ),
    )


@contextmanager
def reported(report: Callable[[], None]) -> Iterator[None]:
    """Call `report` at the end, also after an exception."""
    try:
        yield
    except Exception:
        with suppress(Exception):
            report()
        raise
    report()


class WorkerReport(NamedTuple):
    """The message "acted" of a worker process to its parent."""

    stages: dict[str, float]  # seconds in each
    first_step: float  # unix time of the first env step
    rss_mb: float | None
    news: EnvNews  # since the last report
    latencies: list[float]  # seconds that envs waited for their actions, since then


def check(setup: WorkerSetup) -> None:
    """Write a heartbeat; raise `Stopped` when the run has ended."""
    setup.board.heartbeat(setup.row)
    if setup.board.closed:
        raise Stopped


def sender(setup: WorkerSetup, envs: Envs, post: Post) -> Callable[[WorkerReport], None]:
    """A function that posts a report, after it has added this process's replaced envs to the board's count."""
    counts = setup.board.counts[setup.row]
    before = int(counts["replaced"])

    def send(report: WorkerReport) -> None:
        counts["replaced"] = before + envs.reports.replaced
        post("acted", report)

    return send


class Reporter:
    """Makes the reports of one worker process."""

    def __init__(self, worker: str, stages: Stages, news: Callable[[], EnvNews]) -> None:
        self._worker, self._stages, self._news = worker, stages, news
        self._reported = 0.0
        self.latencies = deque[float](maxlen=4096)

    def is_due(self) -> bool:
        """False before the first env step, then true at once."""
        return self._stages.first_step < math.inf and time.monotonic() - self._reported > _REPORT_S

    def take(self) -> WorkerReport:
        self._reported = time.monotonic()
        latencies = list(self.latencies)
        self.latencies.clear()
        stages = {f"{self._worker}/{k}": v for k, v in self._stages.seconds.items()}
        return WorkerReport(stages, self._stages.first_step, rss_mb(), self._news(), latencies)
