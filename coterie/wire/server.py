"""The server: streams of questions and answers for any service, on an event loop in a thread.

A service turns a client's `Hello` into a `ServiceStream`, which receives the client's frames one by one and answers
each when it can. Every frame is checked against the handshake first; a client that breaks it loses its stream.

A connection costs a descriptor of the learner's before its token is known. gRPC limits how many there are in all, and
for how long one may be silent; `_watch` limits those of one address that have no stream, and what one sends before it
has proven that it knows the token. Where an address has too many clients, the oldest that has not proven it yet makes
room: one that knows it is quick.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any

import grpc
from grpc import StatusCode

from coterie.errors import ConfigError, CoterieError
from coterie.parallel.processes import descriptors
from coterie.wire.auth import check_free, is_local, read_pem, received, split
from coterie.wire.codec import Refused
from coterie.wire.service import Limits, ServerStream, Service, client_name, peer_of
from coterie.wire.tokens import SCOPES, own_token, scoped

SERVICE = "coterie.v1.Coterie"
_GRACE_S = 1.0  # for streams to end by themselves
_START_S = 30.0
_IDLE_MS = 10_000  # that a connection may be without a stream
_WATCH_S = 0.5
_POLLS = 5  # in that time, while a client has not proven that it knows the token
_STRANGERS_BYTES = 1 << 18  # of a connection before that: a few first frames
_LEAST = 0.1  # of the time for a handshake, where many of one address wait
_REASON = 400  # characters of a reason: it travels in a header, of which gRPC takes 8 KiB

# A client may send an undecodable header, and is refused; it may be gone before it receives the reason. gRPC would
# print a traceback of each, and a line for each stream that a server ends.
_USUAL = ("Invalid encoding", "ExecuteBatchError raised in core", "Aborting method")
logging.getLogger("grpc._cython.cygrpc").addFilter(lambda record: not str(record.msg).startswith(_USUAL))


def server_credentials(cert: str, key: str) -> grpc.ServerCredentials:
    return grpc.ssl_server_credentials([(read_pem(key, "wire.key"), read_pem(cert, "wire.cert"))])


@contextmanager
def _borrowed(descriptor: str) -> Iterator[socket.socket]:
    """A socket of gRPC's, left open at the end. Not a copy of it, since closing one would release file locks."""
    connection = socket.socket(fileno=int(descriptor))
    try:
        yield connection
    finally:
        connection.detach()


class Server:
    """Serves `services`, by RPC, at `address`: unix:PATH, for this user alone, or HOST:PORT, whose clients need
    `token`; at a loopback address without one, that of the user's own servers. `field`: the setting of the address.
    """

    def __init__(
        self, address: str, services: Mapping[str, Service], *, token: str = "",
        credentials: grpc.ServerCredentials | None = None, limits: Limits | None = None,
        on_client: Callable[[str, bool], None] = lambda line, refused: None,
        on_info: Callable[[Mapping[str, tuple[float, int]]], None] = lambda info: None, field: str = "wire.bind",
    ) -> None:  # fmt: skip
        if not is_local(address) and (credentials is None or not token):
            raise ConfigError(f"{field}: {address} is reachable from other machines, so it needs TLS and a token")
        self.address, self.services, self.field = address, services, field
        self.port = 0 if address.startswith("unix:") else split(address)[1]
        self.token = token or (own_token(address) if self.port else "")
        self.tokens = {rpc: self.token and scoped(self.token, SCOPES[rpc]) for rpc in services}
        self.credentials = credentials
        self.limits, self.on_client, self.on_info = limits or Limits(), on_client, on_info
        self.refused = Counter[str]()  # by client
        self.bytes_in = self.bytes_out = 0
        self._streams = Counter[str]()
        self._handshakes: dict[str, asyncio.Semaphore] = {}
        self._unproven: dict[str, list[asyncio.Task[Any]]] = {}  # handshakes by client, the oldest first
        self.open = set[ServerStream]()  # after the handshake
        self.proven = set[str]()  # peers of connections that had such a stream
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
        # gRPC does not wait for streams that it has ended, and prints a traceback of one that is cancelled twice.
        for cancels in (False, True):
            if left := asyncio.all_tasks(self._loop):
                for task in left if cancels else ():
                    task.cancel()
                self._loop.run_until_complete(asyncio.wait(left, timeout=_GRACE_S))
        self._loop.close()

    def _do(self, work: Coroutine[Any, Any, None], seconds: float) -> None:
        """Run this on the event loop, from another thread."""
        asyncio.run_coroutine_threadsafe(work, self._loop).result(seconds)

    def _end_thread(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_GRACE_S * 3)

    async def _start(self) -> None:
        self._server = grpc.aio.server(
            options=[
                # Twice the limit: a stream that gRPC itself ends looks like a client that left, and is not counted.
                ("grpc.max_receive_message_length", min(2 * self.limits.message_bytes, 2**31 - 1)),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_concurrent_streams", self.limits.all_streams),
                ("grpc.max_allowed_incoming_connections", min(self.limits.connections, descriptors() // 2)),
                ("grpc.server_handshake_timeout_ms", 5_000),
                ("grpc.max_connection_idle_ms", _IDLE_MS),
                ("grpc.compression_enabled_algorithms_bitset", 1),  # none: a small message may not become a large one
                ("grpc.so_reuseport", 0),
                ("grpc.keepalive_time_ms", 10_000),  # detects a cut connection
                ("grpc.keepalive_timeout_ms", 10_000),
                ("grpc.http2.ping_timeout_ms", 10_000),  # gRPC takes the larger of the two, by default a minute
                ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            ]
        )
        methods: dict[str, Any] = {
            name: grpc.stream_stream_rpc_method_handler(self.handler(name))  # bytes, which are counted
            for name in self.services
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
        before = os.umask(0o077)  # a unix socket is for this user alone
        try:
            check_free(self.address, self.field)  # gRPC replaces any unix socket
            if self.credentials is None:
                self._server.add_insecure_port(self.address)
            else:
                self._server.add_secure_port(self.address, self.credentials)
        except ConfigError as error:  # perhaps for a moment only: a learner is restarted
            raise CoterieError(str(error)) from None
        except RuntimeError:
            asked = "is the address in use?" if self.credentials is None else "is wire.key the key of wire.cert?"
            raise CoterieError(f"{self.field}: cannot listen at {self.address}: {asked}") from None
        finally:
            os.umask(before)
        await self._server.start()
        self._watcher = asyncio.create_task(self._watch()) if self.port else None

    async def _watch(self) -> None:
        """Close connections without a stream: the oldest ones of an address beyond its limit, but none that is new, and
        one that sends too much.
        """
        since = dict[str, int]()  # by peer: when a connection without a stream was seen first
        for tick in count():
            await asyncio.sleep(_WATCH_S / _POLLS)
            if tick % _POLLS and not any(self._unproven.values()):
                continue
            try:
                names = os.listdir("/dev/fd")
            except OSError:  # no descriptor to list them with
                continue
            admitted, strangers = {one.peer for one in self.open}, dict[str, list[tuple[int, str, str]]]()
            proven, self.proven = self.proven, set(admitted)
            for name in names:
                with suppress(OSError), _borrowed(name) as connection:  # no connection, or closed meanwhile
                    if connection.family not in (socket.AF_INET, socket.AF_INET6):
                        continue
                    peer = peer_of(connection)
                    if connection.getsockname()[1] != self.port or peer in admitted:
                        continue
                    client = client_name(peer)
                    strangers.setdefault(client, []).append((since.get(peer, tick), peer, name))
                    if peer in proven:
                        self.proven.add(peer)
                    elif (received(connection) or 0) > _STRANGERS_BYTES:
                        connection.shutdown(socket.SHUT_RDWR)
                        self._note(client, f"more than {_STRANGERS_BYTES} bytes before it has proven the token")
            since = {peer: first for found in strangers.values() for first, peer, _ in found}
            for found in strangers.values():
                for first, _, name in sorted(found)[: -self.limits.strangers]:
                    if first <= tick - _POLLS:
                        with suppress(OSError), _borrowed(name) as connection:
                            connection.shutdown(socket.SHUT_RDWR)

    async def _stop(self) -> None:
        streams = list(self.open) if self.over is not None else []
        ends = (stream.end(self.over or "") for stream in streams)
        with suppress(TimeoutError):  # a client that does not read
            await asyncio.wait_for(asyncio.gather(*ends, return_exceptions=True), _GRACE_S)
        if self._watcher is not None:
            self._watcher.cancel()
        await self._server.stop(_GRACE_S)

    def handler(self, rpc: str) -> Callable[[Any, Any], Any]:
        """gRPC's handler of one method."""

        async def handle(_: Any, context: grpc.aio.ServicerContext[bytes, Any]) -> None:
            connection = ServerStream(self, context)
            client = client_name(connection.peer)
            if reason := self._make_room(client):
                await self._refuse(context, client, StatusCode.UNAVAILABLE, reason)
            self._streams[client] += 1
            try:
                hello = await self._handshake(client, connection, self.tokens[rpc])
                if hello is not None:
                    await connection.serve(hello, self.services[rpc])
            except Refused as error:
                await self._refuse(context, client, StatusCode[error.status], str(error))
            finally:
                self.open.discard(connection)
                self._streams[client] -= 1
                if not self._streams[client]:
                    for by_client in (self._streams, self._handshakes, self._unproven):
                        by_client.pop(client, None)
                if connection.stream is not None:
                    connection.stream.leave()
                    connection.tell("has left")

        return handle

    def _make_room(self, client: str) -> str:
        """Why there is no room for another stream; empty where there is, or where a handshake was ended for it."""
        if self._streams[client] >= self.limits.streams:
            among, reason = self._unproven.get(client), "too many streams of one client"
        elif self._streams.total() >= self.limits.all_streams:
            among, reason = max(self._unproven.values(), key=len, default=None), "too many streams"
        else:
            return ""
        if not among:
            return reason
        among.pop(0).cancel()
        return ""

    async def _handshake(self, client: str, connection: ServerStream, token: str) -> Any:
        """A client's Hello. Those of one address wait for each other, and share the time of one."""
        turn, limits = self._handshakes.setdefault(client, asyncio.Semaphore(self.limits.handshakes)), self.limits
        unproven = self._unproven.setdefault(client, [])

        async def in_turn() -> Any:
            async with turn:
                share = max(_LEAST, min(1.0, limits.handshakes / len(unproven)))
                return await connection.handshake(token, limits.hello_s * share)

        unproven.append(task := asyncio.ensure_future(in_turn()))
        try:
            return await task
        except asyncio.CancelledError:
            if task in unproven:
                raise
            raise Refused("no token in time: newer clients of this address came", "UNAVAILABLE") from None
        finally:
            if task in unproven:
                unproven.remove(task)

    async def _refuse(self, context: Any, client: str, status: StatusCode, reason: str) -> None:
        # It may repeat names that the client chose.
        reason = "".join(c if c.isprintable() else "?" for c in reason[:_REASON])
        self._note(client, reason)
        await context.abort(status, reason)

    def _note(self, client: str, reason: str) -> None:
        if len(self.refused) < self.limits.all_streams or client in self.refused:
            if not self.refused[client]:
                self.on_client(f"refused {client}: {reason}", True)
            self.refused[client] += 1

    @property
    def is_closed(self) -> bool:
        return not self._thread.is_alive()
