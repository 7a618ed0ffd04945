"""What the tests of the wire share: an echo service, servers and clients that break the protocol, broken frames."""

from __future__ import annotations

import queue
import random
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import numpy as np

from coterie.types import Array
from coterie.wire.channel import open_channel
from coterie.wire.client import Stream
from coterie.wire.codec import PROTOCOL, Frame, FrameLayout, Refused, TensorSpec, layout_from
from coterie.wire.server import SERVICE
from coterie.wire.service import Answer, ServiceStream
from coterie.wire.tokens import known_token

LAYOUT = FrameLayout(
    [TensorSpec("m", "bool", (4,)), TensorSpec("x", "int64", (3,)), TensorSpec("y", "float32", (0, 2), "m")]
)
METHOD = f"/{SERVICE}/Infer"
TOKEN = "a-token-of-enough-characters"
WAIT_S = 8.0  # for what must happen, on a machine with other work


def arrays(at: int = 0) -> dict[str, Array]:
    return {"m": np.array([True, False, True, False]), "x": np.arange(at, at + 3), "y": np.full((2, 2), at, np.float32)}


def hello_frame(layout: FrameLayout = LAYOUT, **fields: Any) -> bytes:
    hello = {"protocol": PROTOCOL, "client": "test", "run_id": 1, "envs": 1, "sends": layout.message(), **fields}
    return Frame(hello=hello).SerializeToString()


def data_frame(number: int = 0, tensors: bytes | None = None) -> bytes:
    tensors = LAYOUT.pack(arrays(number)) if tensors is None else tensors
    return Frame(data={"number": number, "tensors": tensors}).SerializeToString()


class EchoStream(ServiceStream):
    """Answers with what it was asked, but `x` one higher; at once, or when the test does."""

    reads = writes = LAYOUT

    def __init__(self, service: EchoService) -> None:
        super().__init__({"number": 5, "settings": "{}"})
        self.service = service
        self.left = 0

    def ask(self, arrays: dict[str, Array], answer: Answer) -> None:
        if self.service.late:
            self.service.asked.put((arrays, answer))
        else:
            self.echo(arrays, answer)

    def echo(self, arrays: dict[str, Array], answer: Answer) -> None:
        answer({**arrays, "x": arrays["x"] + 1}, 7)

    def leave(self) -> None:
        self.left += 1


class EchoService:
    """A service of `EchoStream`s. `late`: the test answers what is in `asked`."""

    def __init__(self) -> None:
        self.streams: list[EchoStream] = []
        self.late = False
        self.asked = queue.SimpleQueue[tuple[dict[str, Array], Answer]]()

    def __call__(self, hello: Any) -> EchoStream:
        declared = layout_from(hello.sends, LAYOUT.most).tensors
        if declared != LAYOUT.tensors:
            raise Refused(f"other tensors: {', '.join(t.name for t in declared)}")
        self.streams.append(EchoStream(self))
        return self.streams[-1]


@contextmanager
def channel_to(address: str, cert: str = "") -> Iterator[grpc.Channel]:
    channel = open_channel(address, cert)
    try:
        yield channel
    finally:
        channel.close()


def works(address: str, *, token: str = "", cert: str = "") -> bool:
    """A good client is served."""
    with channel_to(address, cert) as channel:
        known = known_token(address, token)
        stream = Stream(channel, "Infer", {"envs": 1}, LAYOUT, token=known, silence=WAIT_S)
        for at in range(2):
            stream.send(arrays(at))
            answer, version = stream.receive()
            assert answer["x"].tolist() == [at + 1, at + 2, at + 3]
            assert version == 7
        stream.close()
    return True


@contextmanager
def fake_server(
    address: str, answer: Callable[[Iterator[bytes]], Iterable[bytes]]
) -> Iterator[tuple[list[Any], list[bytes]]]:
    """A server of one method that answers a client's frames with any. Gives the headers and frames that it was sent."""
    headers, sent = list[Any](), list[bytes]()

    def kept(frames: Iterator[bytes]) -> Iterator[bytes]:
        for frame in frames:
            sent.append(frame)
            yield frame

    def serve(frames: Iterator[bytes], context: Any) -> Iterator[bytes]:
        headers.extend(context.invocation_metadata())
        yield from answer(kept(frames))

    server = grpc.server(ThreadPoolExecutor(2))
    methods = {"Infer": grpc.stream_stream_rpc_method_handler(serve)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
    server.add_insecure_port(address)
    server.start()
    try:
        yield headers, sent
    finally:
        server.stop(None).wait(WAIT_S)


class Raw:
    """A client that sends any bytes."""

    def __init__(self, channel: grpc.Channel, *frames: bytes, method: str = METHOD) -> None:
        self.out = queue.SimpleQueue[bytes | None]()
        for frame in frames:
            self.out.put(frame)
        # Without serializers bytes go as they are.
        self.call: Any = channel.stream_stream(method)(iter(self.out.get, None), timeout=WAIT_S)

    def next(self) -> Any:
        return Frame.FromString(next(self.call))

    def end(self) -> tuple[grpc.StatusCode, str]:
        """How the server ended the stream, whatever it sent before."""
        self.out.put(None)
        try:
            for _ in self.call:
                pass
        except grpc.RpcError:
            pass
        return self.call.code(), self.call.details()


class Ended(Exception):
    """What gRPC raises where a stream was aborted."""


class Context:
    """gRPC's side of a stream without a socket: the frames of one client, and how the stream ended."""

    def __init__(self, frames: list[bytes], peer: str = "unix:") -> None:
        self.frames, self.peer = frames, lambda: peer
        self.taken = self.written = 0
        self.status, self.reason = grpc.StatusCode.OK, ""

    async def read(self) -> Any:
        if self.taken == len(self.frames):
            return grpc.aio.EOF
        self.taken += 1
        return self.frames[self.taken - 1]

    async def write(self, frame: Any) -> None:
        self.written += 1

    async def abort(self, status: grpc.StatusCode, reason: str) -> None:
        assert self.status == grpc.StatusCode.OK, "a stream ends once"
        self.status, self.reason = status, reason
        raise Ended


def mutated(frame: bytes, rng: random.Random) -> bytes:
    """The frame with something wrong, most of the time: a field with another value, or other bytes somewhere."""
    if rng.random() < 0.5:
        message = Frame.FromString(frame)
        tamper(message, rng)
        return message.SerializeToString()
    b = bytearray(frame)
    at = rng.randrange(len(b) + 1)
    b[at : rng.choice((at, at + 1, at + rng.randrange(9), len(b)))] = rng.randbytes(rng.choice((0, 1, 1, 8, 200)))
    return bytes(b)


_NUMBERS = (0, 1, 2, 3, 255, 2**15, 2**31, 2**32 - 1)
_NAMES = ("", "m", "x", "y", "bool", "int64", "float32", "O", "\n", "n" * 1000)


def tamper(message: Any, rng: random.Random) -> None:
    """Change a field of a message, or of one in it."""
    if not (fields := message.ListFields()):
        return
    field, value = rng.choice(fields)
    if isinstance(value, bytes):
        setattr(message, field.name, rng.choice((value[: rng.randrange(len(value) + 1)], value * 2)))
    elif isinstance(value, str):
        setattr(message, field.name, rng.choice(_NAMES))
    elif isinstance(value, int):
        setattr(message, field.name, rng.choice(_NUMBERS[:-2]))
    elif field.name == "shape":
        value[:] = rng.choice(([*value, rng.choice(_NUMBERS)], [rng.choice(_NUMBERS) for _ in value], []))
    elif field.name == "sends":
        tamper(rng.choice(value), rng)
    else:
        tamper(value, rng)
