"""Processes as coroutines of which one runs at a time, from one wait to the next, on a clock that only a test moves."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from greenlet import GreenletExit, getcurrent, greenlet
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from coterie.parallel import clock
from coterie.parallel.shm import SharedArrays
from coterie.roles import entry
from coterie.runs import checkpoint, files, metrics

_NAP_S = 0.05  # the shortest sleep: a process may always sleep for longer than it asked
_LATEST_S = 1.0  # of a process that waits for ever


class Process:
    """Work that runs from one wait to the next. Once killed, it stands still for ever: as with SIGKILL, none of its
    `finally` is carried out.
    """

    def __init__(self, name: str, work: Callable[[], None], scheduler: Scheduler) -> None:
        self.name, self.work, self.scheduler = name, work, scheduler
        self.wakes = self.seen = scheduler.now
        self.stopped = 0.0  # seconds that `awake` has skipped in this process
        self.grad = True  # torch keeps this by threads, of which all processes are one
        self.dead = self.frozen = False  # killed; does not get a turn (SIGSTOP)
        self.error: BaseException | None = None
        self.sign: Callable[[], None] = lambda: None  # of life, which another thread of it gives
        self.let = greenlet(
            self._enter, scheduler.main
        )  # where it ends; else the process that has started it would run

    def run(self, switch: Callable[[], object]) -> None:
        """Enter it by `switch`, until its next wait."""
        with torch.set_grad_enabled(self.grad):
            switch()
            self.grad = torch.is_grad_enabled()

    @property
    def alive(self) -> bool:
        return not (self.dead or self.let.dead)

    def kill(self) -> None:
        self.dead = True

    def _enter(self) -> None:
        try:
            self.work()
        except Exception as error:
            self.error = error


class Scheduler:
    """Gives the processes turns. While it is in place, `time.monotonic` is its clock, and `time.sleep` ends a turn."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now, self.closed = 1000.0, False
        self.processes: list[Process] = []
        self.running: Process | None = None
        self.main = getcurrent()
        sleep = time.sleep
        patch.setattr(time, "monotonic", lambda: self.now)
        patch.setattr(time, "sleep", lambda s: self.pause(max(s, _NAP_S)) if self.running else sleep(s))
        patch.setattr(os, "fsync", lambda fd: self.pause())
        for module in (checkpoint, entry, files, metrics):
            patch.setattr(module, "answered", lambda call, seconds=0.0: call())  # without a thread
        for name in ("_last", "_stopped"):  # of the clock `awake`, which goes on as it was
            patch.setattr(clock, name, getattr(clock, name))

    def start(self, name: str, work: Callable[[], None]) -> Process:
        self.processes.append(Process(name, work, self))
        return self.processes[-1]

    def pause(self, seconds: float = 0.0) -> None:
        """Let others run, for at least so long: a process may be killed here."""
        if self.closed:
            raise GreenletExit
        if self.running is not None:
            self.running.wakes = self.now + seconds
            self.main.switch()

    @property
    def living(self) -> list[Process]:
        return [process for process in self.processes if process.alive]

    def turn(self, process: Process) -> None:
        """One slice: until its next wait."""
        if process.frozen or not process.alive:
            return
        clock._last, clock._stopped = process.seen, process.stopped
        self.running = process
        process.run(process.let.switch)
        self.running = None
        process.seen, process.stopped = clock._last, clock._stopped

    def round(self) -> None:
        """A slice of each process that is awake; time goes on where none is."""
        able = [process for process in self.living if not process.frozen]
        if not (awake := [process for process in able if process.wakes <= self.now]):
            self.now = min((process.wakes for process in able), default=self.now + _LATEST_S)
            awake = [process for process in able if process.wakes <= self.now]
        for process in self.living:
            process.sign()
        for process in awake:
            self.turn(process)

    def wait(self, seconds: float, done: Callable[[], bool] = lambda: False) -> bool:
        """Rounds, for so long; returns whether `done` became true."""
        end = self.now + seconds
        while not (over := done()) and self.now < end:
            self.round()
        return over

    def close(self) -> None:
        self.closed = True
        for process in reversed(self.processes):  # each puts back the handlers of signals that it has found
            process.run(partial(process.let.throw, GreenletExit))


class Simulation(RuleBasedStateMachine):
    """Some processes, and how they take turns. A subclass starts them, disturbs them by rules, and checks them: by
    invariants after each rule, and in `finish` once the disturbances are over.
    """

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.scheduler = Scheduler(self.patch)
        self.mapped, make = list[SharedArrays](), SharedArrays.__init__

        def keep(memory: SharedArrays, *args: Any, **more: Any) -> None:
            make(memory, *args, **more)
            self.mapped.append(memory)

        self.patch.setattr(SharedArrays, "__init__", keep)
        try:
            self.begin()
        except BaseException:
            self._close()
            raise

    def begin(self) -> None: ...
    def finish(self) -> None: ...

    @rule(seconds=st.sampled_from([0.1, 0.5, 1.0]))
    def wait(self, seconds: float) -> None:
        self.scheduler.wait(seconds)

    @rule(who=st.integers(0, 7), slices=st.integers(1, 12))
    def favor(self, who: int, slices: int) -> None:
        """One process runs while the others do not."""
        if living := self.scheduler.living:
            process = living[who % len(living)]
            for _ in range(slices):
                self.scheduler.now = max(self.scheduler.now, process.wakes)
                self.scheduler.turn(process)

    def teardown(self) -> None:
        try:
            if sys.exc_info()[0] is None:
                self.finish()
        finally:
            self._close()

    def _close(self) -> None:
        self.scheduler.close()
        self.patch.undo()
        for memory in self.mapped:
            memory.close()  # those that were killed did not
