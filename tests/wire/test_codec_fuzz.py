"""Broken frames by the hundred thousand: each is refused, in one way, and none costs more memory than it has. A seeded
mutator (`harness.mutated`) makes them; test_codec.py has what hypothesis makes.
"""

from __future__ import annotations

import asyncio
import random
import resource
import tracemalloc
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from coterie.wire.codec import (
    PROTOCOL,
    Frame,
    Layout,
    Refused,
    layout_from,
    timestep_layout,
)
from coterie.wire.server import Limits, _Stream
from tests.wire.harness import LAYOUT, Desk, data_frame, hello_frame, mutated
from tests.wire.test_codec import MIXED, STACKS

VALID = [
    hello_frame(),
    hello_frame(timestep_layout(STACKS, 4, newest=True)),
    hello_frame(timestep_layout(MIXED, 4)),
    data_frame(),
    Frame(welcome={"number": 1, "credits": 1, "settings": "{}", "sends": LAYOUT.message()}).SerializeToString(),
    Frame(over={"reason": "the run has ended"}).SerializeToString(),
    Frame().SerializeToString(),
]
HELLO_MOST = 1 << 16


def read(data: bytes, layout: Layout) -> tuple[str, Layout]:
    """What a server does with a frame: what it was, and the layout from then on."""
    try:
        frame = Frame.FromString(data)
    except DecodeError:
        return "no frame", layout
    kind = frame.WhichOneof("kind")
    try:
        if kind == "hello":
            if frame.hello.protocol != PROTOCOL:
                return "protocol", layout
            return "hello", layout_from(frame.hello.sends, HELLO_MOST)
        if kind == "data":
            layout.unpack(frame.data.tensors)
    except Refused:
        return "refused", layout
    return str(kind), layout


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def test_100_000_broken_frames():
    """Nothing but Refused comes out of them, and nothing stays."""
    rng, layout, seen = random.Random(0), LAYOUT, dict[str, int]()
    before = 0.0
    for k in range(100_000):
        kind, layout = read(mutated(rng.choice(VALID), rng), layout)
        if kind == "hello" and k % 2:
            layout = LAYOUT  # half the time what comes next is measured by a layout that was tampered with
        seen[kind] = seen.get(kind, 0) + 1
        if k == 5000:
            before = peak_mb()
    assert peak_mb() - before < 16
    assert min(seen[x] for x in ("no frame", "protocol", "hello", "refused", "data", "None")) > 500, seen


def test_broken_frames_allocate_no_more_than_they_hold():
    rng, layout = random.Random(1), LAYOUT
    tracemalloc.start()
    try:
        for k in range(3000):
            tracemalloc.reset_peak()
            now = tracemalloc.get_traced_memory()[0]
            _, layout = read(mutated(VALID[k % len(VALID)], rng), layout)
            assert tracemalloc.get_traced_memory()[1] - now < 1 << 18
    finally:
        tracemalloc.stop()


class Peer:
    """Stands in for a stream's context: the frames of one client, and then the end."""

    def __init__(self, frames: list[bytes]) -> None:
        self.frames = iter(frames)
        self.written = 0

    async def read(self) -> Any:
        return next(self.frames, grpc.aio.EOF)

    async def write(self, frame: Any) -> None:
        self.written += 1


class Counts:
    """Stands in for the server."""

    bytes_in = bytes_out = 0
    limits, over = Limits(), None

    def opened(self, stream: Any) -> None:
        pass


async def serve(streams: int, rng: random.Random) -> dict[str, int]:
    desk, ends = Desk(), dict[str, int]()
    for _ in range(streams):
        frames = [hello_frame(), *(data_frame(k) for k in range(3))]
        broken = rng.randrange(5)  # from this one on, if at all
        frames = [mutated(f, rng) if k >= broken else f for k, f in enumerate(frames)]
        peer: Any = Peer(frames)
        one = _Stream(Counts(), peer)  # type: ignore[arg-type]
        try:
            await one.serve(desk)
            end = "served"
        except Refused:
            end = "refused"
        assert peer.written <= len(frames)
        ends[end] = ends.get(end, 0) + 1
    return ends


def test_a_stream_of_broken_frames_is_refused():
    """The server's own path, from the hello to the answer."""
    ends = asyncio.run(serve(3000, random.Random(2)))
    assert min(ends["served"], ends["refused"]) > 300, ends
