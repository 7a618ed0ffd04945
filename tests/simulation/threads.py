"""Stands for `threading`: threads that have turns of a scheduler."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

from tests.simulation.scheduler import Process, Scheduler

_LOOK_S = 0.2


def threads(scheduler: Scheduler, start: Callable[[str, Callable[[], None]], Process]) -> SimpleNamespace:
    """`start`: makes the process that a thread is, from its name and its work."""

    class Thread:
        def __init__(self, target: Callable[[], None], name: str, daemon: bool) -> None:
            self.target, self.name = target, name

        def start(self) -> None:
            self.process = start(self.name, self.target)

        def join(self, seconds: float) -> None:
            end = scheduler.now + seconds
            while self.process.alive and scheduler.now < end:
                scheduler.pause(_LOOK_S)

    class Event:
        flag = False

        def set(self) -> None:
            self.flag = True

        def clear(self) -> None:
            self.flag = False

        def is_set(self) -> bool:
            return self.flag

        def wait(self, seconds: float) -> bool:
            end = scheduler.now + seconds
            while not self.flag and scheduler.now < end:
                scheduler.pause(_LOOK_S)
            return self.flag

    return SimpleNamespace(Thread=Thread, Event=Event)
