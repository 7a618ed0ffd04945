"""Stands for gRPC between a learner and its clients: streams of frames, of which each frame, each answer and each end
may be late or missing. The clients' `ReconnectingStream` and the services' `ServiceStream` are real.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from coterie.errors import CoterieError
from coterie.types import Array
from coterie.wire.client import Connection, ConnectionLost
from coterie.wire.codec import FrameLayout, Refused
from coterie.wire.service import Service, ServiceStream
from tests.simulation.scheduler import Process, Scheduler

_LOOK_S = 0.1
SILENCE_S = 10.0  # of the other end, after which a stream is broken


class Peer:
    """A learner or a client: some processes that are killed together."""

    def __init__(self, scheduler: Scheduler, name: str) -> None:
        self.scheduler, self.name = scheduler, name
        self.processes: list[Process] = []
        self.lines: list[Line] = []  # that are open

    def start(self, name: str, work: Callable[[], None]) -> Process:
        self.processes.append(self.scheduler.start(f"{self.name} {name}", work))
        return self.processes[-1]

    @property
    def alive(self) -> bool:
        return self.processes[0].alive

    def freeze(self, hangs: bool) -> None:
        for process in self.processes:
            process.frozen = hangs

    def kill(self) -> None:
        for process in self.processes:
            process.kill()

    def cut(self, late: float) -> None:
        """All of its streams break; the other end notices it so many seconds later."""
        for line in self.lines:
            line.cut(late)
        self.lines.clear()


class Line:
    """A stream between a client and a learner, which serves it in a process of its own."""

    def __init__(self, learner: Peer, service: Service, hello: Any) -> None:
        self.scheduler, self.learner, self.service, self.hello = learner.scheduler, learner, service, hello
        self.questions, self.answers = deque[bytes](), deque[tuple[dict[str, Array], int]]()
        self.stream: ServiceStream | None = None
        self.broken, self.noticed = False, math.inf
        self.error = ""
        self.server = learner.start("stream", self._serve)

    def cut(self, late: float) -> None:
        if not self.broken:
            self.broken, self.noticed = True, self.scheduler.now + late

    @property
    def over(self) -> bool:
        return self.scheduler.now >= self.noticed

    def _serve(self) -> None:
        if self.broken:  # it cannot prove any more that it knows the token; those of one unix socket come in order
            return
        try:
            self.stream = stream = self.service(self.hello)
        except Refused as error:
            self.error = str(error)
            return
        try:
            while not self.over:
                if self.questions:
                    self._answer(stream, stream.reads.unpack(self.questions.popleft()))
                self.scheduler.pause(_LOOK_S)
        except Refused as error:
            self.error = str(error)
        finally:
            if not self.scheduler.closed:
                stream.leave()

    def _answer(self, stream: ServiceStream, arrays: dict[str, Array]) -> None:
        found = list[tuple[dict[str, Array], int]]()
        stream.ask(arrays, lambda answer, version: found.append(({k: x.copy() for k, x in answer.items()}, version)))
        while not found and not self.over:
            if not stream.alive:
                raise Refused("replaced")
            self.scheduler.pause(_LOOK_S)
        self.answers.extend(found)


class ClientStream:
    """Stands for `wire.client.Stream`."""

    def __init__(self, client: Peer, learner: Peer | None, service: Service, hello: Any, sends: FrameLayout) -> None:
        self.scheduler, self.sends = client.scheduler, sends
        self.scheduler.pause()
        if learner is None or not learner.alive:
            raise ConnectionLost("connection refused")
        self.line = Line(learner, service, hello)
        client.lines.append(self.line)
        self._wait(lambda: self.line.stream is not None)
        assert self.line.stream is not None
        self.welcome, self.reads = SimpleNamespace(**self.line.stream.welcome), self.line.stream.writes

    def _wait(self, done: Callable[[], bool]) -> None:
        end = self.scheduler.now + SILENCE_S
        while self.line.broken or not done():
            if self.line.error:
                raise CoterieError(self.line.error)
            if self.line.broken or not self.line.server.alive or self.scheduler.now > end:
                self.close()
                raise ConnectionLost("the stream is broken")
            self.scheduler.pause(_LOOK_S)

    def send(self, arrays: Mapping[str, Array], info: Mapping[str, Any] = {}) -> None:
        self.line.questions.append(self.sends.pack(arrays))

    def receive(self) -> tuple[dict[str, Array], int]:
        self._wait(lambda: bool(self.line.answers))
        return self.line.answers.popleft()

    def close(self) -> None:
        self.line.cut(0.0)


class Link:
    """Stands for `wire.client.Connection`. `learner`: the one that listens now, and its services by RPC."""

    def __init__(self, client: Peer, learner: Callable[[], tuple[Peer | None, Mapping[str, Service]]], **hello: Any):
        self.client, self.learner, self.hello = client, learner, hello
        self.endpoint, self.patience = SimpleNamespace(address="there", cert=""), math.inf
        self.report: Callable[[str], None] = lambda line: None

    def retry(self, act: Callable[[], Any], check: Callable[[], None]) -> Any:
        return Connection.retry(self, act, check, self.client.scheduler.pause)  # type: ignore[arg-type]

    def stream(
        self, method: str, sends: FrameLayout, check: Any, *, silence: float = 0.0, **hello: int
    ) -> ClientStream:
        learner, services = self.learner()
        told = SimpleNamespace(**{"group": 0, **self.hello, **hello}, sends=sends.message())
        return ClientStream(self.client, learner, services[method] if services else None, told, sends)  # type: ignore[arg-type]
