"""The server below gRPC and around it: garbage on the socket, and TLS."""

from __future__ import annotations

import random
import socket
import time
from pathlib import Path

import pytest

from coterie.types import CoterieError
from coterie.wire.auth import make_keys, server_credentials
from coterie.wire.client import ConnectionLost, Stream
from coterie.wire.server import Limits
from tests.support.http2 import PREFACE, SETTINGS, Http2, headers, http2, message
from tests.support.net import free_port
from tests.support.waiting import wait_until
from tests.support.wire import LAYOUT, TOKEN, WAIT_S, channel_to, data_frame, hello_frame, works
from tests.wire.conftest import Serve

MOST = 1 << 16

BEGIN = PREFACE + SETTINGS
GARBAGE = {
    "nothing": b"",
    "HTTP/1": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "TLS": bytes.fromhex("1603010200010001fc0303") + b"\0" * 200,
    "random bytes after the preface": BEGIN + random.Random(1).randbytes(5000),
    "a message cut off": BEGIN + headers() + http2(0, 0, 1, b"\0\0\0\1\0hello"),
    "a message that says 4 GiB": BEGIN + headers() + http2(0, 0, 1, b"\0\xff\xff\xff\xffhello"),
    "compressed by nothing known": BEGIN + headers((b"grpc-encoding", b"x")) + message(hello_frame(), 1),
    "cut off in the data": BEGIN + headers() + message(hello_frame()) + message(data_frame())[:-7],
    "pings": BEGIN + http2(6, 0, 0, b"x" * 8) * 1000,
    "resets": BEGIN + b"".join(headers(stream=2 * k + 1) + http2(3, 0, 2 * k + 1, b"\0\0\0\x08") for k in range(200)),
}


@pytest.mark.parametrize("case", GARBAGE)
@pytest.mark.parametrize("abrupt", [False, True])
def test_a_server_survives_garbage_on_the_socket(serve: Serve, case: str, abrupt: bool):
    served = serve(limits=Limits(message_bytes=MOST))
    with Http2(served.address) as peer:
        try:
            peer.socket.sendall(GARBAGE[case])
            if not abrupt:
                peer.socket.shutdown(socket.SHUT_WR)
                while peer.socket.recv(65536):
                    pass
        except OSError:
            pass  # the server hung up first, as it may
    assert works(served.address)


@pytest.mark.parametrize("value", [b"Bearer \xff\xfe", b"\xc3\xbc", b"Bearer " + b"\x80" * 40, b"Bearer \xed\xa0\x80"])
def test_a_token_that_is_not_ascii_is_refused(serve: Serve, value: bytes):
    served = serve(token=TOKEN)
    with Http2(served.address) as peer:
        peer.call(hello_frame(), more=((b"authorization", value),))
        assert peer.wait(b"not the run's token")
    wait_until(lambda: served.server.is_idle)
    assert not served.service.streams
    assert served.server.refused == {"unix": 1}
    assert works(served.address, token=TOKEN)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], list[Path]]:
    folder = tmp_path_factory.mktemp("keys")
    return make_keys(str(folder / "a"), []), make_keys(str(folder / "b"), [])


def test_tls_needs_the_servers_certificate(serve: Serve, keys: tuple[list[Path], list[Path]]):
    (token_file, cert, key), (_, other, _) = keys
    token, address = token_file.read_text().strip(), f"127.0.0.1:{free_port()}"
    served = serve(address, token=token, credentials=server_credentials(str(cert), str(key)))
    assert works(address, token=token, cert=str(cert))
    assert works(address.replace("127.0.0.1", "localhost"), token=token, cert=str(cert))
    for wrong in ("", str(other)):
        begin = time.monotonic()
        with channel_to(address, wrong) as channel, pytest.raises(ConnectionLost, match="unavailable"):
            Stream(channel, "Infer", {"envs": 1}, LAYOUT, token=token, silence=WAIT_S)
        assert time.monotonic() - begin < WAIT_S
    with channel_to(address, str(cert)) as channel, pytest.raises(CoterieError, match="not the run's token") as caught:
        Stream(channel, "Infer", {"envs": 1}, LAYOUT, token="x" * 20, silence=WAIT_S)
    assert not isinstance(caught.value, ConnectionLost)
    assert served.server.refused == {"ipv4:127.0.0.1": 1}
    assert works(address, token=token, cert=str(cert))
