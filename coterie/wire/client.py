"""The client's side of a stream: questions and answers that block, with time-outs and a reason for each."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError

from coterie.types import Array, ConfigError, CoterieError
from coterie.wire.auth import channel_credentials, is_local
from coterie.wire.codec import PROTOCOL, Frame, Layout, Refused, layout_from
from coterie.wire.server import SERVICE

T = TypeVar("T")
_MOST_BYTES = 1 << 30  # of a frame that the server may declare
_PASSING = (  # ends of a stream after which it is worth to try again
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
)


class Over(Exception):
    """The server says that the run has ended."""


class Lost(CoterieError):
    """The stream is gone: the server may be back after a while."""


def open_channel(address: str, cert: str = "", field: str = "--connect", option: str = "--cert") -> grpc.Channel:
    """A connection to unix:PATH or HOST:PORT; `cert`: the certificate (PEM) that the server must have. `field` and
    `option` are what the person who gave the two calls them.
    """
    if not cert and not is_local(address):
        raise ConfigError(f"{field}: {address} is not on this machine: give its certificate with {option}")
    options = [
        ("grpc.max_receive_message_length", _MOST_BYTES),
        ("grpc.max_send_message_length", -1),
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.ping_timeout_ms", 10_000),  # a minute by itself, whatever the line above says
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 10_000),  # despite its name: for one try to connect, with TLS
        ("grpc.max_reconnect_backoff_ms", 1_000),
        ("grpc.use_local_subchannel_pool", 1),  # a client of its own, whoever else is in this process
    ]
    if cert:
        return grpc.secure_channel(address, channel_credentials(cert), options)
    return grpc.insecure_channel(address, options)


class Stream:
    """One stream to a service. `silence`: seconds without any frame after which it is given up; `check` raises where
    nobody waits for an answer any longer, however long it takes.
    """

    def __init__(
        self, channel: grpc.Channel, method: str, hello: Mapping[str, Any], sends: Layout, *, token: str = "",
        silence: float = 60.0, check: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self.sends, self.silence, self._check = sends, silence, check
        self.number = 0
        self.bytes_out = self.bytes_in = 0
        self._out = queue.SimpleQueue[Any]()
        self._heard, self._waits = time.monotonic(), True
        self._closed = threading.Event()
        stub: Any = channel.stream_stream(f"/{SERVICE}/{method}")  # of bytes, which are counted
        metadata = (("authorization", f"Bearer {token}"),) if token else None
        self._call: Any = stub(iter(self._out.get, None), metadata=metadata)
        threading.Thread(target=self._watch, name="coterie-wire-watch", daemon=True).start()
        try:
            self._put(Frame(hello={**hello, "protocol": PROTOCOL, "sends": sends.message()}))
            frame = self._next()
            if frame.WhichOneof("kind") != "welcome":
                raise CoterieError("the server's first frame is no welcome")
            self.welcome = frame.welcome
            self.reads = layout_from(frame.welcome.sends, _MOST_BYTES)
        except Refused as error:
            self.close()
            raise CoterieError(f"the server's frames: {error}") from None
        except BaseException:
            self.close()  # nobody else can: there would be two more threads after each try
            raise

    def send(self, arrays: Mapping[str, Array]) -> None:
        """A question; does not wait."""
        self._put(Frame(data={"number": self.number, "tensors": self.sends.pack(arrays)}))
        self.number += 1

    def receive(self) -> tuple[dict[str, Array], int]:
        """The answer to the oldest question without one, and the version of the weights; {}: nothing but leave to go
        on. Raises `Over`, or `Lost`.
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
        self._heard, self._waits = time.monotonic(), True
        try:
            while True:
                data = next(self._call)
                self._heard = time.monotonic()
                self.bytes_in += len(data)
                frame = Frame.FromString(data)
                kind = frame.WhichOneof("kind")
                if kind == "over":
                    raise Over(frame.over.reason)
                if kind is not None:
                    return frame
        except DecodeError:
            raise CoterieError("the server's bytes are no frame") from None
        except StopIteration:
            raise Lost("the server ended the stream") from None
        except grpc.RpcError as error:
            raise self._reason(error) from None
        finally:
            self._waits = False

    def _reason(self, error: Any) -> CoterieError:
        status, details = error.code(), error.details()
        if self._closed.is_set():
            return Lost(f"no frame for {self.silence:g} s")
        if status in _PASSING:
            return Lost(f"{status.name.lower()}: {details}")
        return CoterieError(f"the server refused: {details} ({status.name.lower()})")

    def _watch(self) -> None:
        """Nothing can be waited for without an end: a call is given up from here."""
        while not self._closed.wait(min(1.0, self.silence / 4)):
            if self._waits and (time.monotonic() - self._heard > self.silence or self._is_unwanted()):
                self.close()

    def _is_unwanted(self) -> bool:
        try:
            self._check()
        except Exception:  # which is for the thread that waits to raise
            return True
        return False


def back_off(first: float = 0.1, most: float = 10.0) -> Iterator[float]:
    """Seconds to wait before each next try, at least half of them: clients that one server has lost come back apart."""
    while True:
        yield random.uniform(first / 2, first)
        first = min(most, first * 2)


def keep_trying(
    act: Callable[[], T], address: str, patience: float, check: Callable[[], None],
    say: Callable[[str], None] = lambda line: None,
) -> T:  # fmt: skip
    """What `act` returns once it raises no `Lost`, tried for `patience` seconds; `check` may end it by raising. `say`
    hears of a learner that is away, and of its return.
    """
    begin, away = time.monotonic(), False
    for wait in back_off():
        check()
        try:
            found = act()
        except Lost as error:
            if (waited := time.monotonic() - begin) > patience:
                raise CoterieError(f"no learner at {address} for {waited:.0f} s: {error}") from None
            if not away:
                say(f"no learner at {address} ({error}): tried again for {patience:.0f} s")
            away = True
            time.sleep(wait)
        else:
            if away:
                say(f"a learner at {address} after {time.monotonic() - begin:.1f} s")
            return found
    raise AssertionError


def ask_settings(
    channel: grpc.Channel, method: str, hello: Mapping[str, Any], token: str,
    check: Callable[[], None] = lambda: None,
) -> Any:  # fmt: skip
    """The welcome alone: what a client must know before it makes its environments."""
    stream = Stream(channel, method, {**hello, "envs": 0}, Layout(()), token=token, check=check)
    stream.close()
    return stream.welcome
