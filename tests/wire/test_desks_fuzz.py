"""Every door of a run against broken frames by the hundred thousand, from the token to the status. A seeded mutator
(`harness.mutated`; this is not hypothesis) makes them of good ones.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc import StatusCode

from coterie.wire.codec import Newest, timestep_layout
from coterie.wire.server import Server
from tests.conftest import IMAGE, VECTOR
from tests.remote import guest_house, link_house
from tests.remote import test_admission as test_door
from tests.wire.harness import Desk, data_frame, hello_frame, mutated, works
from tests.wire.test_codec_fuzz import peak_mb

AT_ONCE = 4  # streams; more hosts than central.max_envs bears would be refused
GOOD = 3  # data frames of a good stream
CHORES_S = 1e-3  # between two looks of who learns from rollouts


class Ended(Exception):
    """What gRPC raises where a stream was aborted."""


class Peer:
    """Stands in for gRPC: the frames of one client, of which those from `broken` on are, and how its stream ended."""

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

    @property
    def fed(self) -> int:
        """Broken frames that the server has read."""
        return max(0, self.taken - self.broken)


class Door:
    """A desk of a real server, and streams of good frames for it; nothing of those goes through a socket."""

    def __init__(
        self, server: Server, method: str, streams: Iterator[list[bytes]], works: Callable[[], bool],
        chores: Callable[[], object] = lambda: None,
    ) -> None:  # fmt: skip
        self.server, self.streams, self.works, self.chores = server, streams, works, chores
        self.handle = server._handler(server.desks[method])
        self.ends, self.fed = Counter[StatusCode](), 0

    def feed(self, count: int, seed: int) -> None:
        """So many broken frames more, in several streams at once, after which it must be as good as new."""
        asyncio.run(self._crowd(self.fed + count, seed))
        assert self.works()
        refused = self.ends.total() - self.ends[StatusCode.OK]
        assert self.server.refused == {"unix": refused}, "each is counted"

    async def _crowd(self, goal: int, seed: int) -> None:
        crowd = [asyncio.create_task(self._client(goal, random.Random(AT_ONCE * seed + k))) for k in range(AT_ONCE)]
        while not all(one.done() for one in crowd):
            self.chores()
            await asyncio.wait(crowd, timeout=CHORES_S, return_when=asyncio.FIRST_EXCEPTION)
        await asyncio.gather(*crowd)

    async def _client(self, goal: int, rng: random.Random) -> None:
        while self.fed < goal:
            frames, token = next(self.streams), self.server.token
            broken = rng.randrange(len(frames))
            frames = [mutated(f, rng) if k >= broken else f for k, f in enumerate(frames)]
            if rng.random() < 0.5:
                frames.append(rng.randbytes(rng.randrange(300)))  # for where all of them were good enough
            if rng.random() < 0.01:
                token += "x"
            peer = Peer(frames, broken, token)
            try:
                await self.handle(None, peer)
            except Ended:
                assert peer.reason
                assert peer.reason.isprintable()
                large = peer.taken and len(frames[peer.taken - 1]) > self.server.limits.message_bytes
                due = StatusCode.RESOURCE_EXHAUSTED if large else StatusCode.INVALID_ARGUMENT
                assert peer.status == (due if peer.taken else StatusCode.UNAUTHENTICATED)
            assert peer.written <= peer.taken
            self.ends[peer.status] += 1
            self.fed += peer.fed


def echo(address: str) -> Iterator[Door]:
    server, frames = Server(address, {"Infer": Desk()}), [hello_frame(), *(data_frame(k) for k in range(GOOD))]
    yield Door(server, "Infer", itertools.repeat(frames), lambda: works(address))
    server.close()


def hosts(address: str, newest: bool) -> Iterator[Door]:
    house = test_door.House(address, IMAGE if newest else VECTOR, newest)
    layout = timestep_layout(house.spec, 2, newest)
    parts = Newest(layout)
    content = [data_frame(k, layout.pack(parts.split(house.seen(2, k)))) for k in range(GOOD)]
    streams = ([house.hello(run_id=k), *content] for k in itertools.count())
    yield Door(house.server, "Infer", streams, house.works)
    house.server.close()
    house.central.close()
    assert house.central._error is None
    assert (house.central.envs, house.central.seats) == (0, {})


def guests(address: str, method: str) -> Iterator[Door]:
    house = guest_house.House(address, VECTOR, (2, 4))
    house.publish(0)
    content = [house.question(method, k) for k in range(GOOD)]
    streams = ([house.hello(method, run_id=k), *content] for k in itertools.count())

    def learn() -> None:
        house.learn()
        for arrays in house.learned:
            house.guests.check(arrays)
        house.learned.clear()

    yield Door(house.server, method, streams, house.works, learn)
    house.guests.close()
    assert not house.guests.arrived
    house.server.close()


def gossip(address: str) -> Iterator[Door]:
    hub = link_house.Hub(address)

    def streams() -> Iterator[list[bytes]]:
        for k in itertools.count():
            seat = 1 + k % (link_house.SEATS - 1)
            said = [data_frame(n, link_house.news(seat, n + 1)) for n in range(GOOD)]
            yield [link_house.hello(run_id=k, number=seat), *said]

    def still_gossips() -> bool:
        guest = link_house.Guest(address)
        try:
            link_house.agree(hub.learner, guest.learner)
        finally:
            guest.link.close()
        return bool(np.isfinite(hub.memory.arrays["message"]).all())

    yield Door(hub.meeting.servers.open[0], "Gossip", streams(), still_gossips)
    hub.meeting.close(True)
    assert not hub.meeting.guests


DOORS: dict[str, Callable[[str], Iterator[Door]]] = {
    "echo": echo,
    "hosts": lambda address: hosts(address, False),
    "newest": lambda address: hosts(address, True),
    "push": lambda address: guests(address, guest_house.PUSH),
    "gossip": gossip,
    "pull": lambda address: guests(address, guest_house.PULL),
}


@pytest.fixture(params=DOORS)
def door(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Door]:
    yield from DOORS[request.param](f"unix:{tmp_path}/s")


@pytest.mark.parametrize("count", [1000, pytest.param(20_000, marks=pytest.mark.slow)])
def test_broken_frames(door: Door, count: int):
    """The long ones are 100,000 together: no stream ends in another way than with a status and a reason, each that does
    is counted, and nothing stays.
    """
    door.feed(300, 0)  # what is there once
    before = peak_mb()
    door.feed(count, 1)
    assert peak_mb() - before < 16
    assert min(door.ends[StatusCode.OK], door.ends[StatusCode.INVALID_ARGUMENT]) > count / 100, door.ends


def test_broken_frames_allocate_little(door: Door):
    door.feed(100, 0)
    tracemalloc.start()
    try:
        now = tracemalloc.get_traced_memory()[0]
        door.feed(200, 2)
        after, peak = tracemalloc.get_traced_memory()
        assert (after - now < 1 << 20, peak - now < 2 << 20) == (True, True), (after - now, peak - now)
    finally:
        tracemalloc.stop()
