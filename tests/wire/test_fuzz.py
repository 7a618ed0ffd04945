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
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grpc import StatusCode

from coterie.remote.rollout_service import check_rollout
from coterie.wire.server import Server
from tests.conftest import IMAGE, VECTOR
from tests.remote import gossip_runs
from tests.support.services import INFER, PULL, PUSH, InferenceServices, RolloutServices, Services
from tests.support.wire import Context, EchoService, Ended, data_frame, hello_frame, mutated, works

AT_ONCE = 4  # streams; central.max_envs admits no more hosts
GOOD = 3  # data frames of a good stream
POLL_S = 1e-3


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class Target:
    """A service of a real server, and streams of good frames for it. Only `works` goes through a socket."""

    def __init__(
        self, server: Server, method: str, streams: Iterator[list[bytes]], works: Callable[[], bool],
        poll: Callable[[], object] = lambda: None,
    ) -> None:  # fmt: skip
        self.server, self.streams, self.works, self.poll = server, streams, works, poll
        self.handle = server.handler(method)
        self.ends, self.fed = Counter[StatusCode](), 0

    async def feed(self, count: int, seed: int) -> None:
        """Send `count` broken frames, in several streams at once."""
        goal = self.fed + count
        clients = [asyncio.create_task(self._client(goal, random.Random(AT_ONCE * seed + k))) for k in range(AT_ONCE)]
        while not all(one.done() for one in clients):
            self.poll()
            await asyncio.wait(clients, timeout=POLL_S, return_when=asyncio.FIRST_EXCEPTION)
        await asyncio.gather(*clients)

    async def _client(self, goal: int, rng: random.Random) -> None:
        while self.fed < goal:
            good = next(self.streams)
            broken = rng.randrange(len(good))
            frames = [*good[:broken], *(mutated(frame, rng) for frame in good[broken:])]
            if rng.random() < 0.5:
                frames.append(rng.randbytes(rng.randrange(300)))  # in case that all of them were good enough
            context = Context(frames)
            try:
                await self.handle(None, context)
            except Ended:
                assert context.reason
                assert context.reason.isprintable()
                large = context.taken and len(frames[context.taken - 1]) > self.server.limits.message_bytes
                assert context.status == (StatusCode.RESOURCE_EXHAUSTED if large else StatusCode.INVALID_ARGUMENT)
            assert context.written <= context.taken
            self.ends[context.status] += 1
            self.fed += max(0, context.taken - broken)


def echo(address: str) -> Iterator[Target]:
    server, frames = Server(address, {INFER: EchoService()}), [hello_frame(), *(data_frame(k) for k in range(GOOD))]
    yield Target(server, INFER, itertools.repeat(frames), lambda: works(address))
    server.close()


def of(make: Callable[[str], Services], method: str, poll: Callable[[Any], object], address: str) -> Iterator[Target]:
    services: Any = make(address)
    questions = services.questions(method, GOOD)
    streams = ([services.hello(method, run_id=k), *questions] for k in itertools.count())
    yield Target(services.server, method, streams, services.works, lambda: poll(services))
    services.close()


def learn(services: RolloutServices) -> None:
    """What has got through is good."""
    services.learn()
    for arrays in services.learned:
        check_rollout(VECTOR, arrays)
    services.learned.clear()


def gossip(address: str) -> Iterator[Target]:
    run = gossip_runs.HubRun(address)
    frames = [data_frame(n, gossip_runs.frame()) for n in range(GOOD)]

    def still_gossips() -> bool:
        other = gossip_runs.ClientRun(address)
        try:
            gossip_runs.agree(run.learner, other.learner)
        finally:
            other.close()
        return bool(np.isfinite(run.hub.mailboxes.weights).all())

    streams = ([gossip_runs.hello(run_id=k), *frames] for k in itertools.count())
    yield Target(run.hub.servers.open[0], "Gossip", streams, still_gossips)
    run.close()
    assert not run.hub.clients


TARGETS: dict[str, Callable[[str], Iterator[Target]]] = {
    "echo": echo,
    "infer": partial(of, InferenceServices, INFER, lambda services: None),
    "newest": partial(of, partial(InferenceServices, spec=IMAGE, newest=True), INFER, lambda services: None),
    "push": partial(of, partial(RolloutServices, core=(2, 4)), PUSH, learn),
    "pull": partial(of, RolloutServices, PULL, learn),
    "gossip": gossip,
}


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Target]:
    yield from TARGETS[request.param](f"unix:{tmp_path}/s")


@pytest.mark.parametrize("count", [200, pytest.param(20_000, marks=pytest.mark.slow)])
def test_a_service_refuses_broken_frames_and_goes_on(target: Target, count: int):
    """No stream ends without a status and a reason, each refused one is counted, and nothing is kept."""
    asyncio.run(target.feed(100, 0))  # what is allocated once
    assert target.works()
    before = peak_mb()
    asyncio.run(target.feed(count, 1))
    assert target.works()
    assert peak_mb() - before < 16
    assert target.server.refused == {"unix": target.ends.total() - target.ends[StatusCode.OK]}, "each is counted"
    assert min(target.ends[StatusCode.OK], target.ends[StatusCode.INVALID_ARGUMENT]) > count / 400, target.ends
