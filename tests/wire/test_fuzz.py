"""Broken frames for every service, made of good ones by a seeded mutator (`support.wire.mutated`).

Each is refused with a reason, and none costs more memory than it has.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import resource
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc import StatusCode

from coterie.remote.rollout_service import check_rollout
from coterie.wire.codec import Newest
from coterie.wire.server import Server
from tests.conftest import IMAGE, VECTOR
from tests.remote import gossip_runs
from tests.support.services import INFER, PULL, PUSH, InferenceServices, RolloutServices, Services
from tests.support.wire import EchoService, data_frame, hello_frame, mutated, works

AT_ONCE = 4  # streams; central.max_envs admits no more hosts
GOOD = 3  # data frames of a good stream
POLL_S = 1e-3
slow = pytest.mark.slow


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class Ended(Exception):
    """What gRPC raises where a stream was aborted."""


class Context:
    """gRPC's side of a stream: the frames of one client, broken from `broken` on, and how the stream ended."""

    def __init__(self, frames: list[bytes], broken: int, token: str) -> None:
        self.frames, self.broken, self.token = frames, broken, token
        self.taken = self.written = 0
        self.status, self.reason = StatusCode.OK, ""

    def peer(self) -> str:
        return "unix:"

    def invocation_metadata(self) -> Any:
        return (("authorization", f"Bearer {self.token}"),)

    async def read(self) -> Any:
        if self.taken == len(self.frames):
            return grpc.aio.EOF
        self.taken += 1
        return self.frames[self.taken - 1]

    async def write(self, frame: Any) -> None:
        self.written += 1

    async def abort(self, status: StatusCode, reason: str) -> None:
        assert self.status == StatusCode.OK, "a stream ends once"
        self.status, self.reason = status, reason
        raise Ended


class Target:
    """A service of a real server, and streams of good frames for it. Only `works` goes through a socket."""

    def __init__(
        self, server: Server, method: str, streams: Iterator[list[bytes]], works: Callable[[], bool],
        poll: Callable[[], object] = lambda: None,
    ) -> None:  # fmt: skip
        self.server, self.streams, self.works, self.poll = server, streams, works, poll
        self.handle = server.handler(server.services[method])
        self.ends, self.fed = Counter[StatusCode](), 0

    def feed(self, count: int, seed: int) -> None:
        """Send `count` broken frames, in several streams at once. A good client must be served afterwards."""
        asyncio.run(self._clients(self.fed + count, seed))
        assert self.works()
        refused = self.ends.total() - self.ends[StatusCode.OK]
        assert self.server.refused == {"unix": refused}, "each is counted"

    async def _clients(self, goal: int, seed: int) -> None:
        clients = [asyncio.create_task(self._client(goal, random.Random(AT_ONCE * seed + k))) for k in range(AT_ONCE)]
        while not all(one.done() for one in clients):
            self.poll()
            await asyncio.wait(clients, timeout=POLL_S, return_when=asyncio.FIRST_EXCEPTION)
        await asyncio.gather(*clients)

    async def _client(self, goal: int, rng: random.Random) -> None:
        while self.fed < goal:
            frames, token = next(self.streams), self.server.token
            broken = rng.randrange(len(frames))
            frames = [mutated(f, rng) if k >= broken else f for k, f in enumerate(frames)]
            if rng.random() < 0.5:
                frames.append(rng.randbytes(rng.randrange(300)))  # in case that all of them were good enough
            if rng.random() < 0.01:
                token += "x"
            context = Context(frames, broken, token)
            try:
                await self.handle(None, context)
            except Ended:
                assert context.reason
                assert context.reason.isprintable()
                large = context.taken and len(frames[context.taken - 1]) > self.server.limits.message_bytes
                due = StatusCode.RESOURCE_EXHAUSTED if large else StatusCode.INVALID_ARGUMENT
                assert context.status == (due if context.taken else StatusCode.UNAUTHENTICATED)
            assert context.written <= context.taken
            self.ends[context.status] += 1
            self.fed += max(0, context.taken - context.broken)


def echo(address: str) -> Iterator[Target]:
    server, frames = Server(address, {INFER: EchoService()}), [hello_frame(), *(data_frame(k) for k in range(GOOD))]
    yield Target(server, INFER, itertools.repeat(frames), lambda: works(address))
    server.close()


def of(services: Services, method: str, questions: list[bytes], poll: Callable[[], object]) -> Iterator[Target]:
    streams = ([services.hello(method, run_id=k), *questions] for k in itertools.count())
    yield Target(services.server, method, streams, services.works, poll)
    services.close()


def infer(address: str, newest: bool) -> Iterator[Target]:
    services = InferenceServices(address, IMAGE if newest else VECTOR, newest)
    parts = Newest(services.layout())
    questions = [data_frame(k, services.layout().pack(parts.split(services.seen(2, k)))) for k in range(GOOD)]
    return of(services, INFER, questions, lambda: None)


def rollouts(address: str, method: str) -> Iterator[Target]:
    services = RolloutServices(address, VECTOR, (2, 4))

    def learn() -> None:
        services.learn()
        for arrays in services.learned:
            check_rollout(VECTOR, arrays)
        services.learned.clear()

    return of(services, method, [services.question(method, k) for k in range(GOOD)], learn)


def gossip(address: str) -> Iterator[Target]:
    run = gossip_runs.HubRun(address)

    def streams() -> Iterator[list[bytes]]:
        for k in itertools.count():
            yield [gossip_runs.hello(run_id=k), *(data_frame(n, gossip_runs.frame()) for n in range(GOOD))]

    def still_gossips() -> bool:
        other = gossip_runs.ClientRun(address)
        try:
            gossip_runs.agree(run.learner, other.learner)
        finally:
            other.close()
        return bool(np.isfinite(run.hub.mailboxes.weights).all())

    yield Target(run.hub.servers.open[0], "Gossip", streams(), still_gossips)
    run.close()
    assert not run.hub.clients


TARGETS: dict[str, Callable[[str], Iterator[Target]]] = {
    "echo": echo,
    "infer": lambda address: infer(address, False),
    "newest": lambda address: infer(address, True),
    "push": lambda address: rollouts(address, PUSH),
    "pull": lambda address: rollouts(address, PULL),
    "gossip": gossip,
}


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Target]:
    yield from TARGETS[request.param](f"unix:{tmp_path}/s")


@pytest.mark.parametrize("count", [200, pytest.param(20_000, marks=slow)])
def test_a_service_refuses_broken_frames_and_goes_on(target: Target, count: int):
    """No stream ends without a status and a reason, each refused one is counted, and nothing is kept."""
    target.feed(100, 0)  # what is allocated once
    before = peak_mb()
    target.feed(count, 1)
    assert peak_mb() - before < 16
    assert min(target.ends[StatusCode.OK], target.ends[StatusCode.INVALID_ARGUMENT]) > count / 400, target.ends
