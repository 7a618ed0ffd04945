"""The client's side of a stream: blocking questions and answers with time-outs, and streams that reconnect."""

from __future__ import annotations

import hmac
import math
import queue
import random
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError

from coterie.errors import ConfigError, CoterieError
from coterie.parallel.clock import awake, back_off
from coterie.types import Array
from coterie.wire.channel import MOST_BYTES, open_channel
from coterie.wire.codec import PROTOCOL, Frame, FrameLayout, Refused, layout_from, pack_info
from coterie.wire.server import SERVICE
from coterie.wire.tokens import NONCE_BYTES, SCOPES, known_token, proof, scoped

T = TypeVar("T")
_NAP_S = 0.2  # between two looks at whether to leave, while the server is away
_TRANSIENT = (  # ends of a stream after which another attempt may succeed
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
)
_OF_SETTINGS = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED  # refusals of another token or kind
_OTHER_CERTIFICATE = "CERTIFICATE_VERIFY_FAILED", "Hostname Verification Check failed"  # in what gRPC says


class RunEnded(Exception):
    """The server reports that the run has ended."""


class RefusedClient(ConfigError):
    """The server does not take this client, by its token, its kind or the certificate that it knows."""


class ConnectionLost(CoterieError):
    """The stream has ended without a reason that would be the same at the next attempt."""


@dataclass(frozen=True)
class Endpoint:
    """A server's address and what a client needs to use it."""

    address: str  # unix:PATH or HOST:PORT
    token: str = ""
    cert: str = ""  # path of the server's certificate (PEM)
    patience: float = 600.0  # seconds that the server may be away


class Stream:
    """A stream to a service. A wait ends after `silence` seconds without a frame, or when `check` raises."""

    def __init__(
        self, channel: grpc.Channel, method: str, hello: Mapping[str, Any], sends: FrameLayout, *, token: str = "",
        silence: float = 60.0, check: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self.method, self.sends, self.silence, self._check = method, sends, silence, check
        self.number = self.bytes_out = self.bytes_in = 0
        self._out = queue.SimpleQueue[Any]()
        self._last_frame, self._waiting, self._silent = awake(), True, False
        self._closed = threading.Event()
        stub: Any = channel.stream_stream(f"/{SERVICE}/{method}")  # of bytes, which are counted
        token = token and scoped(token, SCOPES[method])
        nonce = secrets.token_bytes(NONCE_BYTES) if token else b""
        self._call: Any = stub(iter(self._out.get, None))
        threading.Thread(target=self._watch, name="coterie-wire-watch", daemon=True).start()
        try:
            self._put(Frame(hello={**hello, "protocol": PROTOCOL, "sends": sends.message(), "nonce": nonce}))
            frame = self._prove(token, nonce) if token else self._next()
            if frame.WhichOneof("kind") != "welcome":
                raise CoterieError("the server's first frame is not a welcome")
            self.welcome = frame.welcome
            self.reads = layout_from(frame.welcome.sends, MOST_BYTES)
        except Refused as error:
            self.close()
            raise CoterieError(f"the server's frames: {error}") from None
        except BaseException:
            self.close()  # else each failed attempt would leave two threads
            raise

    def _prove(self, token: str, nonce: bytes) -> Any:
        """Verify the server's proof that it knows the token, and only then send one; returns the next frame."""
        challenge = self._next().challenge
        if hmac.compare_digest(challenge.proof, proof(token, "server", nonce, challenge.nonce)):
            self._put(Frame(proof=proof(token, "client", nonce, challenge.nonce)))
            return self._next()
        if challenge.proof:
            self._out.put(None)
            with suppress(ConnectionLost):
                self._next()  # a run's server refuses, and logs it
        raise RefusedClient("wire.token_file: the server does not know the token")

    def send(self, arrays: Mapping[str, Array], info: Mapping[str, tuple[float, int]] = {}) -> None:
        """Send a question without waiting for its answer, and what envs say in their info."""
        tensors = self.sends.pack(arrays)
        self._put(Frame(data={"number": self.number, "tensors": tensors, "info": pack_info(info)}))
        self.number += 1

    def receive(self) -> tuple[dict[str, Array], int]:
        """The answer to the oldest unanswered question, {} where it has no tensors, and the version of the weights.
        Raises `RunEnded` or `ConnectionLost`.
        """
        data = self._next().data
        try:
            return (self.reads.unpack(data.tensors) if data.tensors else {}), data.version
        except Refused as error:
            raise CoterieError(f"the server's frame: {error}") from None

    def close(self) -> None:
        self._closed.set()
        self._out.put(None)
        self._call.cancel()

    def _put(self, frame: Any) -> None:
        data = frame.SerializeToString()
        self.bytes_out += len(data)
        self._out.put(data)

    def _next(self) -> Any:
        self._last_frame, self._waiting = awake(), True
        try:
            while True:
                data = next(self._call)
                self._last_frame = awake()
                self.bytes_in += len(data)
                frame = Frame.FromString(data)
                kind = frame.WhichOneof("kind")
                if kind == "over":
                    raise RunEnded(frame.over.reason)
                if kind is not None:
                    return frame
        except DecodeError:
            raise CoterieError("the server sent bytes that are not a frame") from None
        except StopIteration:
            raise ConnectionLost("the server ended the stream") from None
        except grpc.RpcError as error:
            raise self._reason(error) from None
        finally:
            self._waiting = False

    def _reason(self, error: Any) -> CoterieError:
        status, details = error.code(), error.details() or ""
        if self._closed.is_set():
            return ConnectionLost(f"no frame for {self.silence:g} s" if self._silent else "the stream was closed here")
        if any(text in details for text in _OTHER_CERTIFICATE):
            return RefusedClient("wire.cert: the server has another certificate, for other hosts, or not valid today")
        if status in _TRANSIENT:
            return ConnectionLost(f"{status.name.lower()}: {details}")
        if status == grpc.StatusCode.UNIMPLEMENTED:
            details = "`coterie actor` is for decoupled runs (impala), `coterie envs` for central ones (seed-vtrace)"
            details = "the run has no gossip.bind" if self.method == "Gossip" else details
        kind = RefusedClient if status in _OF_SETTINGS else CoterieError
        return kind(f"the server refused: {details} ({status.name.lower()})")

    def _watch(self) -> None:
        """End a wait from outside: gRPC's has no time-out between two frames."""
        while not self._closed.wait(min(1.0, self.silence / 4)):
            if self._waiting:
                self._silent = awake() - self._last_frame > self.silence
                with suppress(Exception):  # the waiting thread calls `check` itself, and raises it
                    self._check()
                    if not self._silent:
                        continue
                self.close()


class ReconnectingStream:
    """A stream that is opened at its first use and again after each loss.

    `connect` opens it; what belongs to one connection (counters, differences to the last frame) is reset there. `check`
    is called before each attempt and may raise to end them.
    """

    def __init__(self, connect: Callable[[], Stream], connection: Connection, check: Callable[[], None]) -> None:
        self._connect, self._connection, self._check = connect, connection, check
        self._stream: Stream | None = None
        self.info: Callable[[], Mapping[str, tuple[float, int]]] = dict  # to send with a question
        self.latency = 0.0  # seconds between the last question and its answer

    def open(self) -> Stream:
        """The open stream."""
        return self._connection.retry(self._opened, self._check)

    def ask(self, question: Callable[[], Mapping[str, Array]]) -> tuple[dict[str, Array], int]:
        """The answer. After a loss the question is made and sent again, on a new stream."""
        return self._connection.retry(lambda: self._ask(question), self._check)

    def ask_once(self, question: Callable[[], Mapping[str, Array]]) -> tuple[dict[str, Array], int] | None:
        """The answer. None after a loss: the server may have received the question or not."""
        self._check()
        try:
            return self._ask(question)
        except ConnectionLost:
            return None

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _opened(self) -> Stream:
        if self._stream is None:
            self._stream = self._connect()
        return self._stream

    def _ask(self, question: Callable[[], Mapping[str, Array]]) -> tuple[dict[str, Array], int]:
        try:
            stream = self._opened()
            begin = time.perf_counter()
            stream.send(question(), self.info())
            answer = stream.receive()
        except ConnectionLost:
            self.close()
            raise
        self.latency = time.perf_counter() - begin
        return answer


class Connection:
    """A client's channel to one server. `hello`: the fields that all its streams share. `report` receives a line when
    the server is away and when it is back.
    """

    def __init__(
        self, endpoint: Endpoint, hello: Mapping[str, Any], report: Callable[[str], None] = lambda line: None
    ) -> None:
        self.endpoint, self.patience, self.report = endpoint, endpoint.patience, report
        self.hello = {"client": "coterie", "number": -1, "run_id": random.SystemRandom().getrandbits(64), **hello}
        self._channel = open_channel(endpoint.address, endpoint.cert)

    def retry(self, act: Callable[[], T], check: Callable[[], None], wait: Callable[[float], object] = time.sleep) -> T:
        """What `act` returns, repeated while it ends in `ConnectionLost`. `check` is called before each attempt and
        during the wait for it, and may raise to end them. Raises `CoterieError` when the server has been away for
        longer than its patience.
        """
        address, patience = self.endpoint.address, self.patience
        hint = "" if self.endpoint.cert or address.startswith("unix:") else " (with TLS it needs --wire.cert)"
        limit, waits = f" for {patience:.0f} s" if patience < math.inf else "", back_off()
        away_since: float | None = None
        while True:
            check()
            try:
                result = act()
            except ConnectionLost as error:
                now = time.monotonic()
                if away_since is None:
                    away_since = now
                    self.report(f"no learner at {address}{hint}: {error}; retrying{limit}")
                if (waited := now - away_since) > patience:
                    raise CoterieError(f"no learner at {address} for {waited:.0f} s: {error}") from None
                left = next(waits)
                while left > 0:
                    wait(min(left, _NAP_S))
                    left -= _NAP_S
                    check()
            else:
                if away_since is not None:
                    self.report(f"a learner at {address} after {time.monotonic() - away_since:.1f} s")
                return result

    def stream(
        self, method: str, sends: FrameLayout, check: Callable[[], None], *, silence: float = 60.0, **hello: int
    ) -> Stream:
        """A new stream; `check` ends a wait for an answer by raising."""
        token = known_token(self.endpoint.address, self.endpoint.token)
        return Stream(self._channel, method, {**self.hello, **hello}, sends, token=token, silence=silence, check=check)

    def settings(self, method: str, check: Callable[[], None] = lambda: None) -> Any:
        """The `Welcome` alone, with the settings that a client needs before it makes its environments."""
        stream = self.retry(lambda: self.stream(method, FrameLayout(()), check, envs=0), check)
        stream.close()
        return stream.welcome

    def close(self) -> None:
        self._channel.close()
