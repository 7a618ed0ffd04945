"""The server: streams of questions and answers, whatever they are about, on an event loop in a thread of its own.

A service is a desk at which a client takes a seat; a seat is asked, frame by frame, and answers when it can. What a
peer sends is checked against its handshake before a seat sees it; a peer that sends anything else loses its stream.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
from google.protobuf.message import DecodeError
from grpc import StatusCode

from coterie.types import Array, ConfigError, CoterieError
from coterie.wire.auth import is_local, is_token
from coterie.wire.codec import PROTOCOL, Frame, Layout, Refused

SERVICE = "coterie.v1.Coterie"
_HELLO_BYTES = 1 << 16
_ROUND = 64  # bytes around a frame's tensors
_HELLO_S = 10.0  # for a client's first frame
_SIGN_S = 5.0  # between two signs of life while an answer takes long
_GRACE_S = 1.0  # for streams to end by themselves
_START_S = 30.0
_REASON = 400  # characters of a reason: it travels in a header, of which gRPC takes 8 KiB

# A header in no encoding is no token, and the peer is refused; a peer may be gone before it hears why its stream ends.
# gRPC would print a traceback of each.
_PEERS_FAULT = ("Invalid encoding", "ExecuteBatchError raised in core")
logging.getLogger("grpc._cython.cygrpc").addFilter(lambda record: not str(record.msg).startswith(_PEERS_FAULT))

Answer = Callable[[Mapping[str, Array], int], None]  # arrays, and the version of the weights


@dataclass(frozen=True)
class Limits:
    """What clients may ask of a server."""

    message_bytes: int = 64 << 20
    streams: int = 1024  # of one client
    all_streams: int = 4096


class Seat(Protocol):
    """One client's place at a service."""

    reads: Layout
    writes: Layout
    alive: bool  # False once another stream has taken its place

    def welcome(self) -> dict[str, Any]: ...  # fields of the Welcome, but for `sends` and `credits`
    def ask(self, arrays: dict[str, Array], answer: Answer) -> None: ...  # `answer` may be called in any thread, once
    def leave(self) -> None: ...  # its stream has ended; called once


Desk = Callable[[Any], Seat]  # takes a Hello; raises Refused


class Server:
    """Serves `desks` (by the name of the RPC) at `address`: unix:PATH or HOST:PORT, which is the setting `field`."""

    def __init__(
        self, address: str, desks: Mapping[str, Desk], *, token: str = "",
        credentials: grpc.ServerCredentials | None = None, limits: Limits | None = None,
        on_refused: Callable[[str], None] = lambda line: None, field: str = "wire.bind",
    ) -> None:  # fmt: skip
        if not is_local(address) and (credentials is None or not token):
            raise ConfigError(f"{field}: {address} can be reached from elsewhere: it needs TLS and a token")
        self.address, self.desks, self.token, self.credentials, self.field = address, desks, token, credentials, field
        self.limits, self.on_refused = limits or Limits(), on_refused
        self.refused = Counter[str]()  # by client
        self.bytes_in = self.bytes_out = 0
        self._streams = Counter[str]()
        self._open: dict[_Stream, None] = {}
        self.over: str | None = None  # why the run has ended, where it has
        self._closed = False
        self._started: Future[None] = Future()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="coterie-wire", daemon=True)
        self._thread.start()
        try:
            self._started.result(_START_S)
        except CoterieError:
            self._thread.join(_GRACE_S)
            raise

    def close(self, reason: str | None = "the run has ended") -> None:
        """Tell every client that it is over, and end the streams. None: it is not, and they may come again."""
        if not self._closed and self._thread.is_alive():
            self._closed, self.over = True, reason
            with suppress(Exception):
                asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(_GRACE_S * 4)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_GRACE_S * 2)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._start())
        except BaseException as error:
            self._started.set_exception(error)
        else:
            self._started.set_result(None)
            self._loop.run_forever()
        finally:
            self._loop.close()

    async def _start(self) -> None:
        self._server = grpc.aio.server(
            options=[
                # Twice, because what gRPC itself cuts off looks like a client that went, and is not counted.
                ("grpc.max_receive_message_length", min(2 * self.limits.message_bytes, 2**31 - 1)),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_concurrent_streams", self.limits.all_streams),
                ("grpc.so_reuseport", 0),
                ("grpc.keepalive_time_ms", 10_000),  # a client that was cut off is found out by this
                ("grpc.keepalive_timeout_ms", 10_000),
                ("grpc.http2.ping_timeout_ms", 10_000),  # a minute by itself, whatever the line above says
                ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            ]
        )
        methods: dict[str, Any] = {
            name: grpc.stream_stream_rpc_method_handler(self._handler(desk))  # bytes, which are counted
            for name, desk in self.desks.items()
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
        try:
            if self.credentials is None:
                self._server.add_insecure_port(self.address)
            else:
                self._server.add_secure_port(self.address, self.credentials)
        except RuntimeError:
            raise CoterieError(f"{self.field}: cannot listen at {self.address}: is it taken?") from None
        await self._server.start()

    async def _stop(self) -> None:
        streams = list(self._open) if self.over is not None else []
        ends = (stream.end(self.over or "") for stream in streams)
        with suppress(TimeoutError):  # of a client that does not read
            await asyncio.wait_for(asyncio.gather(*ends, return_exceptions=True), _GRACE_S)
        await self._server.stop(_GRACE_S)

    def _handler(self, desk: Desk) -> Callable[[Any, Any], Any]:
        async def handle(_: Any, context: grpc.aio.ServicerContext[bytes, Any]) -> None:
            client = _client(context.peer())
            given = dict(context.invocation_metadata() or ()).get("authorization", "")
            if self.token and not is_token(str(given), f"Bearer {self.token}"):
                await self._refuse(context, client, StatusCode.UNAUTHENTICATED, "no such token")
            if self._streams[client] >= self.limits.streams:
                await self._refuse(context, client, StatusCode.RESOURCE_EXHAUSTED, "too many streams of one client")
            if self._streams.total() >= self.limits.all_streams:
                await self._refuse(context, client, StatusCode.RESOURCE_EXHAUSTED, "too many streams")
            self._streams[client] += 1
            stream = _Stream(self, context)
            try:
                await stream.serve(desk)
            except Refused as error:
                status = StatusCode.RESOURCE_EXHAUSTED if error.too_much else StatusCode.INVALID_ARGUMENT
                await self._refuse(context, client, status, str(error))
            finally:
                self._open.pop(stream, None)
                self._streams[client] -= 1
                if not self._streams[client]:
                    del self._streams[client]
                if stream.seat is not None:
                    stream.seat.leave()

        return handle

    async def _refuse(self, context: Any, client: str, status: StatusCode, reason: str) -> None:
        reason = "".join(c if c.isprintable() else "?" for c in reason[:_REASON])  # of names that the client chose
        if len(self.refused) < self.limits.all_streams or client in self.refused:
            if not self.refused[client]:
                self.on_refused(f"refused {client}: {reason}")
            self.refused[client] += 1
        await context.abort(status, reason)

    def opened(self, stream: _Stream) -> None:
        self._open[stream] = None


class _Stream:
    """One client's stream."""

    def __init__(self, server: Server, context: Any) -> None:
        self.server, self.context = server, context
        self.seat: Seat | None = None
        self.number = 0
        self._writing = asyncio.Lock()

    async def serve(self, desk: Desk) -> None:
        try:
            hello = await asyncio.wait_for(self._read(_HELLO_BYTES), _HELLO_S)
        except TimeoutError:
            raise Refused(f"no hello for {_HELLO_S:g} s") from None
        if hello is None:
            return
        if hello.WhichOneof("kind") != "hello":
            raise Refused("the first frame must be a hello")
        if hello.hello.protocol != PROTOCOL:
            raise Refused(f"protocol {hello.hello.protocol} is not {PROTOCOL}: the versions do not fit")
        if self.server.over is not None:  # it ended during the handshake
            return await self.end(self.server.over)
        self.seat = seat = desk(hello.hello)
        if seat.reads.most + _ROUND > (limit := self.server.limits.message_bytes):
            raise Refused(f"its frames have up to {seat.reads.most} bytes, and wire.max_message_mb allows {limit}")
        self.server.opened(self)
        await self._write(Frame(welcome={**seat.welcome(), "credits": 1, "sends": seat.writes.message()}))
        loop = asyncio.get_running_loop()
        # Before it is parsed: of small parts a parser makes large ones.
        most = seat.reads.most + _ROUND
        while (frame := await self._read(most)) is not None:
            if frame.WhichOneof("kind") != "data":
                raise Refused("a data frame must come after the welcome")
            if frame.data.number != self.number:
                raise Refused(f"data frame {frame.data.number} came where {self.number} was due")
            arrays = seat.reads.unpack(frame.data.tensors)
            future: asyncio.Future[tuple[Mapping[str, Array], int]] = loop.create_future()
            seat.ask(arrays, _resolve(loop, future))
            answer, version = await self._wait(seat, future)
            data = {"number": self.number, "version": version, "tensors": seat.writes.pack(answer) if answer else b""}
            await self._write(Frame(data=data))
            self.number += 1

    async def _wait(self, seat: Seat, future: asyncio.Future[Any]) -> Any:
        """The answer; the client sees signs of life until then."""
        while True:
            done, _ = await asyncio.wait({future}, timeout=_SIGN_S)
            if done:
                return future.result()
            if not seat.alive:
                raise Refused("another stream of this client has taken this one's place")
            await self._write(Frame())

    async def _read(self, most: int) -> Any:
        """The next frame, of `most` bytes, or None at the end of the stream."""
        data = await self.context.read()
        if data is grpc.aio.EOF:
            return None
        self.server.bytes_in += len(data)
        limit = self.server.limits.message_bytes
        if len(data) > (most := limit if len(data) > limit else most):
            raise Refused(f"a message of {len(data)} bytes, more than {most}", too_much=len(data) > limit)
        try:
            return Frame.FromString(data)
        except DecodeError:
            raise Refused("these bytes are no frame") from None

    async def _write(self, frame: Any) -> None:
        data = frame.SerializeToString()
        self.server.bytes_out += len(data)
        async with self._writing:
            await self.context.write(data)

    async def end(self, reason: str) -> None:
        await self._write(Frame(over={"reason": reason}))


def _resolve(loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any]) -> Answer:
    def resolve(arrays: Mapping[str, Array], version: int) -> None:
        def there() -> None:
            if not future.done():
                future.set_result((arrays, version))

        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(there)

    return resolve


def _client(peer: str) -> str:
    """Who that is, whatever its port."""
    return peer.rpartition(":")[0] if peer.startswith("ipv") else peer.partition(":")[0]
