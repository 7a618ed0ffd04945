"""The server's side of a stream: the handshake, then a client's frames and their answers."""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import grpc
from google.protobuf.message import DecodeError

from coterie.parallel.clock import awake
from coterie.types import Array
from coterie.wire.codec import INFO_BYTES, PROTOCOL, Frame, FrameLayout, Refused, unpack_info
from coterie.wire.tokens import NONCE_BYTES, proof

_HELLO_BYTES = 1 << 16
_ROUND = 64  # bytes around a frame's tensors

Answer = Callable[[Mapping[str, Array], int], None]  # arrays, and the version of the weights


@dataclass(frozen=True)
class Limits:
    """What a server allows its clients, and when it sends heartbeats."""

    message_bytes: int = 64 << 20
    streams: int = 1024  # of one client
    all_streams: int = 4096
    connections: int = 4096
    strangers: int = 64  # connections of one address without a stream
    handshakes: int = 16  # of one address at a time: their messages are read before anything is known of the client
    hello_s: float = 10.0  # for each of a client's first frames; less where others of its address wait
    heartbeat_s: float = 5.0  # between two empty frames while an answer takes long


class ServiceStream:
    """The server's side of one client's stream. One without envs is of this class, and gets the welcome only."""

    reads: FrameLayout = FrameLayout(())  # of the client's data frames
    writes: FrameLayout = FrameLayout(())  # of the answers
    alive: bool = True  # False once another stream of the client has replaced this one
    about: str = ""  # what joins the run with it, for the log
    patience: float = 0.0  # seconds for the client to send its next frame; 0: no limit

    def __init__(self, welcome: Mapping[str, Any]) -> None:
        self.welcome = welcome  # fields of the Welcome, except `sends` and `credits`

    def ask(self, arrays: dict[str, Array], answer: Answer) -> None:
        """Take a data frame, in the server's thread. `answer` is called once, in any thread. Raises `Refused`."""
        raise Refused("a stream of 0 envs must not send data frames")

    def leave(self) -> None:
        """The stream has ended; called once."""


Service = Callable[[Any], ServiceStream]  # takes a Hello; raises Refused


class ServerStream:
    """One client's stream to a `coterie.wire.server.Server`, from its first frame to its end."""

    def __init__(self, server: Any, context: Any) -> None:
        self.server, self.context = server, context
        self.peer = unquote(context.peer())
        self.stream: ServiceStream | None = None
        self.number, self.joined, self.reading = 0, False, False
        self._writing = asyncio.Lock()

    async def handshake(self, token: str, seconds: float) -> Any:
        """The client's Hello, once it has proven that it knows `token`; None if it left before. `seconds`: for each of
        its frames.
        """
        if (frame := await self._first("hello", seconds)) is None:
            return None
        hello = frame.hello
        if hello.protocol != PROTOCOL:
            raise Refused(f"protocol {hello.protocol} is not {PROTOCOL}: client and server are of different versions")
        if token:
            if len(hello.nonce) != NONCE_BYTES:
                raise Refused("the run's clients need its token", "UNAUTHENTICATED")
            nonce = secrets.token_bytes(NONCE_BYTES)
            await self._write(Frame(challenge={"nonce": nonce, "proof": proof(token, "server", hello.nonce, nonce)}))
            frame = await self._first("proof", seconds)
            if frame is None or not hmac.compare_digest(frame.proof, proof(token, "client", hello.nonce, nonce)):
                raise Refused("not the run's token", "UNAUTHENTICATED")
        return hello

    async def _first(self, kind: str, seconds: float) -> Any:
        try:
            frame = await asyncio.wait_for(self._read(_HELLO_BYTES), seconds)
        except TimeoutError:
            raise Refused(f"no {kind} for {seconds:g} s", "UNAVAILABLE") from None
        if frame is not None and frame.WhichOneof("kind") != kind:
            raise Refused(f"the first frame must be a {kind}")
        return frame

    async def serve(self, hello: Any, service: Service) -> None:
        limits = self.server.limits
        if self.server.over is not None:  # it ended during the handshake
            return await self.end(self.server.over)
        self.stream = stream = service(hello)
        most = stream.reads.most + _ROUND  # checked before parsing, which can inflate small input
        if most > limits.message_bytes:
            raise Refused(
                f"frames of up to {stream.reads.most} bytes; wire.max_message_mb allows {limits.message_bytes}"
            )
        self.server.open.add(self)
        self.server.proven.add(self.peer)
        await self._write(Frame(welcome={**stream.welcome, "credits": 1, "sends": stream.writes.message()}))
        self.joined = bool(stream.about)
        self.tell("has joined")
        if not stream.patience:
            return await self._serve(stream, most)
        serving = asyncio.ensure_future(self._serve(stream, most))
        try:
            await self._until_silent(serving, stream.patience)
        finally:
            serving.cancel()
            await asyncio.wait({serving})

    async def _until_silent(self, serving: asyncio.Future[None], patience: float) -> None:
        """Until `serving` has ended, or the client has sent nothing for `patience` seconds and was not kept waiting."""
        seen, since = -1, awake()
        while not (await asyncio.wait({serving}, timeout=min(1.0, patience / 4)))[0]:
            if self.number != seen or not self.reading:
                seen, since = self.number, awake()
            elif awake() - since > patience:
                return self.tell(f"is closed: it has sent nothing for {patience:.0f} s, while others wait for it")
        serving.result()

    async def _serve(self, stream: ServiceStream, most: int) -> None:
        """Take frames of up to `most` bytes, besides info, and answer them, until the client ends the stream."""
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
        self.reading = True
        data = await self.context.read()
        self.reading = False
        if data is grpc.aio.EOF:
            return None
        self.server.bytes_in += len(data)
        limit = self.server.limits.message_bytes
        if len(data) > limit:
            raise Refused(f"a message of {len(data)} bytes, more than {limit}", "RESOURCE_EXHAUSTED")
        if len(data) > most:
            raise Refused(f"a message of {len(data)} bytes, more than {most}")
        try:
            return Frame.FromString(data)
        except DecodeError:
            raise Refused("the bytes are not a frame") from None

    async def _write(self, frame: Any) -> None:
        data = frame.SerializeToString()
        self.server.bytes_out += len(data)
        async with self._writing:
            await self.context.write(data)

    def tell(self, what: str) -> None:
        """A line for the run's log, if something joined the run with this stream."""
        if self.joined and self.stream is not None:
            name = self.peer.partition(":")[2] or "a local client"
            self.server.on_client(f"{name} {what}: {self.stream.about}", False)

    async def end(self, reason: str) -> None:
        await self._write(Frame(over={"reason": reason}))


def _settle(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


def peer_of(connection: socket.socket) -> str:
    """The other end of an Internet socket, as gRPC spells it, unquoted: address and port."""
    host, port = connection.getpeername()[:2]
    host = host.removeprefix("::ffff:")  # an IPv4 address on a socket for both
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"


def client_name(peer: str) -> str:
    """A client's name: its address without the port."""
    return peer.rpartition(":")[0] if peer.startswith("ipv") else peer.partition(":")[0]
