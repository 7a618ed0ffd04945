"""Remote env hosts and actors in threads of a test."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from coterie.acting.base import Stopped
from coterie.build.resources import resolve_config
from coterie.config import Config, Env
from coterie.roles.remote_worker import WorkerOptions
from coterie.wire.client import Endpoint
from coterie.wire.tokens import own_token
from tests.support.commands import PATIENCE
from tests.support.meddler import Meddler
from tests.support.runs import CROWD, ENDLESS, central_options, decoupled_options
from tests.support.waiting import wait_until

WIDTH = 2  # simulators of each host


def central(out: Path, port: int, exchange: str = "solo", **changes: object) -> list[str]:
    """The arguments of a run without local env hosts."""
    own = {"actors": 0, "wire.bind": f"127.0.0.1:{port}", **ENDLESS}
    return central_options(out, exchange, **{**own, **changes})


def decoupled(out: Path, port: int, **changes: object) -> list[str]:
    own = {"wire.bind": f"127.0.0.1:{port}", "actors": 1, **ENDLESS}
    return decoupled_options(out, **{**own, **changes})


class WorkerThread:
    """A remote worker in a thread of this process. `times`: of its `WorkerOptions`. `behind`: the port of a proxy."""

    def __init__(
        self, work: Callable[..., None], port: int, env: Env | None = None, times: tuple[float, ...] = (10.0, 0.5),
        behind: int = 0,
    ) -> None:  # fmt: skip
        env = replace(env or Env("CartPole-v1"), num_envs=WIDTH, delay=0.005, threads=1)
        config = resolve_config(replace(Config(), env=env, device="cpu"))
        self.lines: list[str] = []
        self.error: BaseException | None = None
        self.left = threading.Event()
        token = own_token(f"127.0.0.1:{port}") if behind else ""
        endpoint = Endpoint(f"127.0.0.1:{behind or port}", token, patience=60)

        def leave() -> None:
            if self.left.is_set():
                raise Stopped

        def report(line: str) -> None:
            print(line)  # shown if the test fails
            self.lines.append(line)

        def run() -> None:
            try:
                work(config, endpoint, WorkerOptions(report, leave, *times))
            except Stopped:
                pass
            except BaseException as error:
                self.error = error
                report(f"the worker has failed: {error!r}")

        self.thread = threading.Thread(target=run)
        self.thread.start()

    def is_connected(self) -> bool:
        """Whether it has been admitted and has no outage."""
        away, back = (sum(x.startswith(word) for x in self.lines) for word in ("no learner at", "a learner at"))
        return away == back and bool(self.address)

    @property
    def address(self) -> str:
        """Of its learner; empty before it is admitted."""
        return next((x.rpartition(" ")[2] for x in self.lines if " envs of " in x), "")

    def end(self) -> str:
        """End it; returns its last line."""
        self.left.set()
        self.thread.join(PATIENCE / 2)
        assert not self.thread.is_alive()
        if self.error is not None:
            raise self.error
        return self.lines[-1]


def goes_on(meddler: Meddler, rows: int = 20 * CROWD) -> None:
    steps = meddler.steps()
    meddler.until(lambda: meddler.steps() > steps + rows, "the run goes on")


def finish(meddler: Meddler, *worker_threads: WorkerThread) -> None:
    """End the run by a signal once these workers are connected. They look for it again until they are ended, too."""
    meddler.until(lambda: all(worker.is_connected() for worker in worker_threads), "the workers are connected")
    os.kill(os.getpid(), signal.SIGTERM)
    for worker in worker_threads:
        wait_until(lambda one=worker: not one.is_connected(), PATIENCE, "the worker misses the run")  # type: ignore[misc]
        assert worker.end().startswith("left: ")
