"""A run in this process, with a thread beside it."""

from __future__ import annotations

import json
import multiprocessing.process
import os
import signal
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import pytest

from coterie.cli.main import main
from coterie.parallel.clock import awake
from coterie.runs import checkpoint
from coterie.runs.objects import _folder
from tests.support.commands import PATIENCE
from tests.support.process_table import gone
from tests.support.waiting import wait_until


class Meddler:
    """Runs the command line in this process, with a thread beside it that knows the process ids of the children.

    Most runs go this way, because the fork server is warm.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, out: Path) -> None:
        self.out, self.over, self.patch = out, threading.Event(), monkeypatch.setattr
        # Rank (or "actor 1") and pid of every child, in the order of their starts.
        self.started: list[tuple[int | str, int]] = []
        start = multiprocessing.process.BaseProcess.start

        def record(process: multiprocessing.process.BaseProcess) -> None:
            start(process)
            kind, _, number = process.name.removeprefix("coterie-").rpartition("-")
            self.started.append((int(number) if kind == "learner" else f"{kind} {number}", process.pid))

        self.patch(multiprocessing.process.BaseProcess, "start", record)

    def hurry(self, factor: float, *modules: ModuleType) -> None:
        """From now on deadlines of these modules come so many times sooner, in this process: not in the children."""
        begin = awake()
        for module in modules:
            self.patch(module, "awake", lambda: begin + factor * (awake() - begin))

    def run(self, args: list[str], action: Callable[[], None] = lambda: None) -> int:
        """The exit code of the command, with `action` in a thread beside it."""
        self.over.clear()
        failed: list[BaseException] = []

        def meddle() -> None:
            try:
                action()
                assert self.over.wait(PATIENCE), "the run does not end"
            except BaseException as error:
                failed.append(error)
                for _ in range(2):  # end the run, whatever it does
                    if not self.over.wait(0.2):
                        os.kill(os.getpid(), signal.SIGTERM)

        thread = threading.Thread(target=meddle)
        thread.start()
        try:
            code = main(args)
        finally:
            self.over.set()
            thread.join()
        if failed:
            raise failed[0]
        return code

    def starts(self, which: int | str) -> int:
        return [one for one, _ in self.started].count(which)

    def pid(self, which: int | str) -> int:
        return [pid for one, pid in self.started if one == which][-1]

    def until(self, condition: Callable[[], object], what: str) -> None:
        def met() -> object:
            over = self.over.is_set()
            found = condition()
            assert found or not over, f"the run ended before: {what}"
            return found

        wait_until(met, PATIENCE, what)

    def steps(self) -> int:
        """Env steps of the last line of metrics."""
        with suppress(OSError):
            lines = (self.out / "metrics.jsonl").read_text().rpartition("\n")[0].splitlines()
            return json.loads(lines[-1])["env_steps"] if lines else 0
        return 0

    def saved(self) -> int:
        """Env steps of the newest checkpoint; -1 where there is none."""
        # Not `latest`: in this process it is the run that waits for a disk.
        path = max(checkpoint._complete(self.out / "checkpoints"), key=checkpoint._age, default=None)
        return -1 if path is None else int(path.name.removeprefix("step_").removesuffix(".old"))

    def log(self) -> str:
        path = self.out / "log.txt"
        return path.read_text() if path.exists() else ""

    def at_work(self) -> None:
        """Wait until all learners have learned, and there is a checkpoint of that."""
        self.until(lambda: self.saved() > 0 and self.steps() > 0, "a checkpoint and a line of metrics")

    def saves_again(self) -> None:
        at = self.saved()
        self.until(lambda: self.saved() > at, "a later checkpoint")

    def interrupt(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    def kill(self, which: int | str, number: signal.Signals = signal.SIGKILL) -> int:
        """Kill a learner, or an actor, and wait until it has been restarted; returns the env steps known before.

        They are more than the last checkpoint's, so that going back to it costs something.
        """
        self.until(lambda: self.steps() > self.saved(), "a line of metrics after the last checkpoint")
        steps, starts = self.steps(), self.starts(which)
        os.kill(self.pid(which), number)
        self.until(lambda: self.starts(which) > starts, f"{which} is restarted")
        return steps

    def check_nothing_left(self) -> None:
        wait_until(lambda: all(gone(pid) for _, pid in self.started), 30, "every child is gone")
        stay = {_folder()} if _folder.cache_info().currsize else set()  # until this process ends
        if socket := multiprocessing.current_process()._config.get("tempdir"):  # type: ignore[attr-defined]
            stay.add(Path(socket).parent)  # the fork server's
        for folder in (tempfile.gettempdir(), "/tmp"):  # where a path would be too long for a socket
            assert not set(Path(folder).glob(f"coterie-*-{os.getpid()}-*")) - stay
