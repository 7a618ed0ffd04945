"""Stands for `threading` and `queue`: threads that have turns of a scheduler."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from tests.simulation.scheduler import Process, Scheduler

_LOOK_S = 0.2


def threads(scheduler: Scheduler, start: Callable[[str, Callable[[], None]], Process]) -> SimpleNamespace:
    """`start`: makes the process that a thread is, from its name and its work."""

    class Thread:
        def __init__(self, target: Callable[..., None], name: str, daemon: bool, args: tuple[Any, ...] = ()) -> None:
            self.target, self.name, self.args = target, name, args

        def start(self) -> None:
            self.process = start(self.name, lambda: self.target(*self.args))

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

    class Lock:
        """A turn does not end while one is held."""

        def __enter__(self) -> None: ...
        def __exit__(self, *error: object) -> None: ...

        def wait_for(self, predicate: Callable[[], object]) -> None:
            while not predicate():
                scheduler.pause(_LOOK_S)

        def notify(self) -> None: ...

    return SimpleNamespace(Thread=Thread, Event=Event, Lock=Lock, RLock=Lock, Condition=Lock)


def queues(scheduler: Scheduler) -> SimpleNamespace:
    class SimpleQueue(deque[Any]):
        put, empty = deque.append, property(lambda self: lambda: not self)

        def get(self, timeout: float = float("inf")) -> Any:
            end = scheduler.now + timeout
            while not self:
                if scheduler.now >= end:
                    raise queue.Empty
                scheduler.pause(min(_LOOK_S, timeout))
            return self.popleft()

        def get_nowait(self) -> Any:
            return self.get(0.0)

    return SimpleNamespace(SimpleQueue=SimpleQueue, Empty=queue.Empty)
