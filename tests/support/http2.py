"""HTTP/2 by hand: what gRPC would never send, and the frames with which to stop in the middle of anything."""

from __future__ import annotations

import socket
import struct

from tests.support.wire import METHOD, WAIT_S

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\0\0\0\4\0\0\0\0\0"


def http2(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def headers(*more: tuple[bytes, bytes], stream: int = 1) -> bytes:
    """The frame that begins a call: literal headers, no table, no Huffman."""
    fields = [
        (b":method", b"POST"), (b":scheme", b"http"), (b":path", METHOD.encode()), (b":authority", b"x"),
        (b"te", b"trailers"), (b"content-type", b"application/grpc"), *more,
    ]  # fmt: skip
    return http2(1, 4, stream, b"".join(b"\0" + bytes([len(k)]) + k + bytes([len(v)]) + v for k, v in fields))


def message(data: bytes, compressed: int = 0, stream: int = 1) -> bytes:
    return http2(0, 0, stream, bytes([compressed]) + struct.pack(">I", len(data)) + data)


class Http2:
    """A client by hand, which can stop in the middle of anything."""

    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(WAIT_S)
        self.socket.connect(address.removeprefix("unix:"))

    def __enter__(self) -> Http2:
        return self

    def __exit__(self, *error: object) -> None:
        self.socket.close()

    def call(self, *frames: bytes, more: tuple[tuple[bytes, bytes], ...] = ()) -> None:
        self.socket.sendall(PREFACE + SETTINGS + headers(*more) + b"".join(message(f) for f in frames))

    def wait(self, text: bytes) -> bool:
        """Whether the server sends it."""
        said = b""
        while text not in said:
            try:
                got = self.socket.recv(65536)
            except (TimeoutError, ConnectionError):
                return False
            if not got:
                return False
            said += got
        return True
