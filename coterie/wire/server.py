"""The server: streams of questions and answers for any service, on an event loop in a thread.

A service turns a client's `Hello` into a `ServiceStream`, which receives the client's frames one by one and answers
each when it can. Every frame is checked against the handshake first; a client that breaks it loses its stream.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc import StatusCode

from coterie.types import Array, ConfigError, CoterieError
from coterie.wire.auth import is_local, is_token, read_pem
from coterie.wire.codec import INFO_BYTES, PROTOCOL, Frame, Layout, Refused, unpack_info

SERVICE = "coterie.v1.Coterie"
_HELLO_BYTES = 1 << 16
_ROUND = 64  # bytes around a frame's tensors
_GRACE_S = 1.0  # for streams to end by themselves
_START_S = 30.0
_REASON = 400  # characters of a reason: it travels in a header, of which gRPC takes 8 KiB

# A client may send an undecodable header, and is refused; it may be gone before it receives the reason. gRPC would
# print a traceback of each.
_CLIENTS_FAULT = ("Invalid encoding", "ExecuteBatchError raised in core")
logging.getLogger("grpc._cython.cygrpc").addFilter(lambda record: not str(record.msg).startswith(_CLIENTS_FAULT))

Answer = Callable[[Mapping[str, Array], int], None]  # arrays, and the version of the weights


@dataclass(frozen=True)
class Limits:
    """What a server allows its clients, and when it sends heartbeats."""

    message_bytes: int = 64 << 20
    streams: int = 1024  # of one client
    all_streams: int = 4096
    hello_s: float = 10.0  # for a client's first frame
    heartbeat_s: float = 5.0  # between two empty frames while an answer takes long


class ServiceStream(ABC):
    """The server's side of one client's stream."""

    reads: Layout = Layout(())  # of the client's data frames
    writes: Layout = Layout(())  # of the answers
    alive: bool = True  # False once another stream of the client has replaced this one

    def __init__(self, welcome: Mapping[str, Any]) -> None:
        self.welcome = welcome  # fields of the Welcome, except `sends` and `credits`

    @abstractmethod
    def ask(self, arrays: dict[str, Array], answer: Answer) -> None:
        """Take a data frame, in the server's thread. `answer` is called once, in any thread. Raises `Refused`."""

    def leave(self) -> None:  # noqa: B027 (not every service has something to end)
        """The stream has ended; called once."""


def server_credentials(cert: str, key: str) -> grpc.ServerCredentials:
    return grpc.ssl_server_credentials([(read_pem(key, "wire.key"), read_pem(cert, "wire.cert"))])


Service = Callable[[Any], ServiceStream]  # takes a Hello; raises Refused


class Server:
    """Serves `services`, by RPC, at `address`: unix:PATH or HOST:PORT. `field`: the setting of the address."""

    def __init__(
        self, address: str, services: Mapping[str, Service], *, token: str = "",
        credentials: grpc.ServerCredentials | None = None, limits: Limits | None = None,
        on_refused: Callable[[str], None] = lambda line: None,
        on_info: Callable[[Mapping[str, tuple[float, int]]], None] = lambda info: None, field: str = "wire.bind",
    ) -> None:  # fmt: skip
        if not is_local(address) and (credentials is None or not token):
            raise ConfigError(f"{field}: {address} is reachable from other machines, so it needs TLS and a token")
        self.address, self.services, self.field = address, services, field
        self.token, self.credentials = token, credentials
        self.limits, self.on_refused, self.on_info = limits or Limits(), on_refused, on_info
        self.refused = Counter[str]()  # by client
        self.bytes_in = self.bytes_out = 0
        self._streams = Counter[str]()
        self.open = set[_Connection]()  # after the handshake
        self.over: str | None = None  # why the run has ended, once it has
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="coterie-wire", daemon=True)
        self._thread.start()
        try:
            self._do(self._start(), _START_S)
        except BaseException:
            self._end_thread()
            raise

    def close(self, reason: str | None = "the run has ended") -> None:
        """End all streams, with `reason` for the end of the run. None: the run goes on, and clients may reconnect."""
        if not self.is_closed:
            self.over = reason
            with suppress(Exception):
                self._do(self._stop(), _GRACE_S * 4)
            self._end_thread()

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    def _do(self, work: Coroutine[Any, Any, None], seconds: float) -> None:
        """Run this on the event loop, from another thread."""
        asyncio.run_coroutine_threadsafe(work, self._loop).result(seconds)

    def _end_thread(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_GRACE_S * 2)

    async def _start(self) -> None:
        self._server = grpc.aio.server(
            options=[
                # Twice the limit: a stream that gRPC itself ends looks like a client that left, and is not counted.
                ("grpc.max_receive_message_length", min(2 * self.limits.message_bytes, 2**31 - 1)),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_concurrent_streams", self.limits.all_streams),
                ("grpc.so_reuseport", 0),
                ("grpc.keepalive_time_ms", 10_000),  # detects a cut connection
                ("grpc.keepalive_timeout_ms", 10_000),
                ("grpc.http2.ping_timeout_ms", 10_000),  # gRPC takes the larger of the two, by default a minute
                ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            ]
        )
        methods: dict[str, Any] = {
            name: grpc.stream_stream_rpc_method_handler(self.handler(service))  # bytes, which are counted
            for name, service in self.services.items()
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
        try:
            if self.credentials is None:
                self._server.add_insecure_port(self.address)
            else:
                self._server.add_secure_port(self.address, self.credentials)
        except RuntimeError:
            raise CoterieError(f"{self.field}: cannot listen at {self.address}: is the address in use?") from None
        await self._server.start()

    async def _stop(self) -> None:
        streams = list(self.open) if self.over is not None else []
        ends = (stream.end(self.over or "") for stream in streams)
        with suppress(TimeoutError):  # a client that does not read
            await asyncio.wait_for(asyncio.gather(*ends, return_exceptions=True), _GRACE_S)
        await self._server.stop(_GRACE_S)

    def handler(self, service: Service) -> Callable[[Any, Any], Any]:
        """gRPC's handler of one method."""

        async def handle(_: Any, context: grpc.aio.ServicerContext[bytes, Any]) -> None:
            client = client_name(context.peer())
            given = dict(context.invocation_metadata() or ()).get("authorization", "")
            if self.token and not is_token(str(given), f"Bearer {self.token}"):
                await self._refuse(context, client, StatusCode.UNAUTHENTICATED, "not the run's token")
            if self._streams[client] >= self.limits.streams:
                await self._refuse(context, client, StatusCode.RESOURCE_EXHAUSTED, "too many streams of one client")
            if self._streams.total() >= self.limits.all_streams:
                await self._refuse(context, client, StatusCode.RESOURCE_EXHAUSTED, "too many streams")
            self._streams[client] += 1
            connection = _Connection(self, context)
            try:
                await connection.serve(service)
            except Refused as error:
                status = StatusCode.RESOURCE_EXHAUSTED if error.too_much else StatusCode.INVALID_ARGUMENT
                await self._refuse(context, client, status, str(error))
            finally:
                self.open.discard(connection)
                self._streams[client] -= 1
                if not self._streams[client]:
                    del self._streams[client]
                if connection.stream is not None:
                    connection.stream.leave()

        return handle

    async def _refuse(self, context: Any, client: str, status: StatusCode, reason: str) -> None:
        # It may repeat names that the client chose.
        reason = "".join(c if c.isprintable() else "?" for c in reason[:_REASON])
        if len(self.refused) < self.limits.all_streams or client in self.refused:
            if not self.refused[client]:
                self.on_refused(f"refused {client}: {reason}")
            self.refused[client] += 1
        await context.abort(status, reason)

    @property
    def is_closed(self) -> bool:
        return not self._thread.is_alive()


class _Connection:
    """One client's stream, from its first frame to its end."""

    def __init__(self, server: Server, context: Any) -> None:
        self.server, self.context = server, context
        self.stream: ServiceStream | None = None
        self.number = 0
        self._writing = asyncio.Lock()

    async def serve(self, service: Service) -> None:
        limits = self.server.limits
        try:
            hello = await asyncio.wait_for(self._read(_HELLO_BYTES), limits.hello_s)
        except TimeoutError:
            raise Refused(f"no hello for {limits.hello_s:g} s") from None
        if hello is None:
            return
        if hello.WhichOneof("kind") != "hello":
            raise Refused("the first frame must be a hello")
        if hello.hello.protocol != PROTOCOL:
            raise Refused(
                f"protocol {hello.hello.protocol} is not {PROTOCOL}: client and server are of different versions"
            )
        if self.server.over is not None:  # it ended during the handshake
            return await self.end(self.server.over)
        self.stream = stream = service(hello.hello)
        most = stream.reads.most + _ROUND  # checked before parsing, which can inflate small input
        if most > limits.message_bytes:
            raise Refused(
                f"frames of up to {stream.reads.most} bytes; wire.max_message_mb allows {limits.message_bytes}"
            )
        self.server.open.add(self)
        await self._write(Frame(welcome={**stream.welcome, "credits": 1, "sends": stream.writes.message()}))
        loop = asyncio.get_running_loop()
        while (frame := await self._read(most + INFO_BYTES)) is not None:
            if frame.WhichOneof("kind") != "data":
                raise Refused("only data frames may follow the hello")
            if frame.data.number != self.number:
                raise Refused(f"data frame {frame.data.number} instead of {self.number}")
            arrays = stream.reads.unpack(frame.data.tensors)
            if frame.data.info:
                self.server.on_info(unpack_info(frame.data.info))
            future: asyncio.Future[tuple[Mapping[str, Array], int]] = loop.create_future()

            def resolve(answer: Mapping[str, Array], version: int, future: asyncio.Future[Any] = future) -> None:
                with suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(_settle, future, (answer, version))

            stream.ask(arrays, resolve)
            answer, version = await self._wait(stream, future)
            data = {"number": self.number, "version": version, "tensors": stream.writes.pack(answer) if answer else b""}
            await self._write(Frame(data=data))
            self.number += 1

    async def _wait(self, stream: ServiceStream, future: asyncio.Future[Any]) -> Any:
        """The answer; until then the client receives heartbeats."""
        while True:
            done, _ = await asyncio.wait({future}, timeout=self.server.limits.heartbeat_s)
            if done:
                return future.result()
            if not stream.alive:
                raise Refused("replaced by another stream of the same client and group")
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
            raise Refused("the bytes are not a frame") from None

    async def _write(self, frame: Any) -> None:
        data = frame.SerializeToString()
        self.server.bytes_out += len(data)
        async with self._writing:
            await self.context.write(data)

    async def end(self, reason: str) -> None:
        await self._write(Frame(over={"reason": reason}))


def _settle(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


def client_name(peer: str) -> str:
    """A client's name: its address without the port."""
    return peer.rpartition(":")[0] if peer.startswith("ipv") else peer.partition(":")[0]
