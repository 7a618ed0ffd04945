"""How the server's streams wait and end, what is below gRPC and around it: garbage on the socket, TLS, time-outs."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc import StatusCode

from coterie.errors import ConfigError, CoterieError
from coterie.wire.client import ConnectionLost, RunEnded, Stream
from coterie.wire.codec import FrameLayout, TensorSpec
from coterie.wire.keys import make_keys
from coterie.wire.server import Server, server_credentials
from coterie.wire.service import Limits
from tests.support.http2 import PREFACE, SETTINGS, Http2, headers, http2, message
from tests.support.net import free_port
from tests.support.waiting import wait_until
from tests.support.wire import LAYOUT, WAIT_S, Raw, arrays, channel_to, data_frame, hello_frame, works
from tests.wire.conftest import Serve


def test_a_client_that_sends_no_hello_is_refused(serve: Serve):
    served = serve(limits=Limits(hello_s=0.2))
    with channel_to(served.address) as channel:
        begin, raw = time.monotonic(), Raw(channel)
        with pytest.raises(grpc.RpcError):
            next(raw.call)
        assert time.monotonic() - begin < WAIT_S / 2
        assert raw.end() == (StatusCode.UNAVAILABLE, "no hello for 0.2 s")
    wait_until(lambda: not served.server._streams)
    assert served.server.refused == {"unix": 1}
    assert works(served.address)


def test_a_client_may_vanish_while_its_answer_is_pending(serve: Serve):
    served = serve()
    served.service.late = True
    with Http2(served.address) as peer:
        peer.call(hello_frame(), data_frame(0))
        asked, answer = served.service.asked.get(timeout=WAIT_S)
    wait_until(lambda: served.service.streams[0].left == 1)
    for _ in range(2):
        answer(asked, 1)  # the client is gone: no error
    wait_until(lambda: not served.server._streams)
    served.service.late = False
    assert works(served.address)
    assert served.service.streams[0].left == 1


def test_a_closed_server_leaves_no_task(serve: Serve):
    """Else one is destroyed while it waits, and asyncio says so on stderr. gRPC may leave those of its streams."""
    server = serve().server
    left = asyncio.run_coroutine_threadsafe(asyncio.sleep(WAIT_S), server._loop)
    server.close()
    assert left.cancelled()


def test_clients_receive_the_end_of_the_run(serve: Serve):
    """Both those that wait for an answer and those that have not asked."""
    served = serve()
    served.service.late = True
    with channel_to(served.address) as channel:
        waiting, stepping = (Stream(channel, "Infer", {"envs": 1}, LAYOUT, silence=WAIT_S) for _ in range(2))
        waiting.send(arrays())
        asked, answer = served.service.asked.get(timeout=WAIT_S)
        served.server.close("that was all")
        answer(asked, 1)
        with pytest.raises(RunEnded, match="that was all"):
            waiting.receive()
        stepping.send(arrays())
        with pytest.raises(RunEnded, match="that was all"):
            stepping.receive()
        for stream in (waiting, stepping):
            stream.close()
        with pytest.raises(ConnectionLost):
            Stream(channel, "Infer", {"envs": 1}, LAYOUT, silence=WAIT_S)
    assert not served.server.refused
    served.server.close()  # a second time is nothing


def test_a_server_closes_although_a_client_does_not_read(serve: Serve):
    """A client that reads nothing: what the server writes is stuck on the way."""
    wide = FrameLayout([TensorSpec("x", "uint8", (1 << 20,))])
    served = serve()
    with Http2(served.address) as peer:  # takes in 64 KiB, and never asks for more
        served.service.late = True
        peer.call(hello_frame(), data_frame(0))
        _, answer = served.service.asked.get(timeout=WAIT_S)
        served.service.streams[0].writes = wide
        answer({"x": np.zeros(1 << 20, np.uint8)}, 1)
        with channel_to(served.address) as channel:
            good = Stream(channel, "Infer", {"envs": 1}, LAYOUT, silence=WAIT_S)
            begin = time.monotonic()
            served.server.close()
            assert time.monotonic() - begin < 10
            with pytest.raises(RunEnded):
                good.receive()
            good.close()


def test_an_address_in_use_is_refused(serve: Serve):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(CoterieError, match=r"^wire\.bind: cannot listen at .*: Address already in use$"):
            Server(address, {})
    assert works(serve(address).address)


def test_a_socket_is_taken_over_only_from_a_server_that_is_gone(serve: Serve, address: str):
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(address.removeprefix("unix:"))
    assert works(serve(address).address)
    with pytest.raises(CoterieError, match=r"^wire\.bind: cannot listen at .*: Address already in use$") as caught:
        Server(address, {})
    assert not isinstance(caught.value, ConfigError), "a learner that is restarted tries again"
    assert works(address)


def test_a_client_that_says_hello_while_the_run_ends_receives_the_end(serve: Serve):
    served = serve()
    with channel_to(served.address) as channel:
        # The late stream is open before the end, as the welcome of a later one proves; its hello comes afterwards.
        first, late, last = Raw(channel, hello_frame()), Raw(channel), Raw(channel, hello_frame())
        assert [raw.next().WhichOneof("kind") for raw in (first, last)] == ["welcome"] * 2
        ending = threading.Thread(target=served.server.close, args=("enough",))
        ending.start()
        wait_until(lambda: served.server.over is not None)
        late.out.put(hello_frame())
        assert late.next().over.reason == "enough"
        for raw in (first, late, last):
            raw.end()
        ending.join(WAIT_S)
    assert not ending.is_alive()


BEGIN = PREFACE + SETTINGS
GARBAGE = {
    "HTTP/1": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "random bytes after the preface": BEGIN + random.Random(1).randbytes(5000),
    "a message that says 4 GiB": BEGIN + headers() + http2(0, 0, 1, b"\0\xff\xff\xff\xffhello"),
    "compressed by nothing known": BEGIN + headers((b"grpc-encoding", b"x")) + message(hello_frame(), 1),
    "cut off in the data": BEGIN + headers() + message(hello_frame()) + message(data_frame())[:-7],
    "resets": BEGIN + b"".join(headers(stream=2 * k + 1) + http2(3, 0, 2 * k + 1, b"\0\0\0\x08") for k in range(200)),
}


@pytest.mark.parametrize("case", GARBAGE)
def test_a_server_survives_garbage_on_the_socket(serve: Serve, case: str):
    """Of clients that hang up at once, and that wait."""
    served = serve(limits=Limits(message_bytes=1 << 16))
    for wait in (False, True):
        with Http2(served.address) as peer, suppress(OSError):  # the server may hang up first
            peer.socket.sendall(GARBAGE[case])
            if wait:
                peer.socket.shutdown(socket.SHUT_WR)
                while peer.socket.recv(65536):
                    pass
        assert works(served.address)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], list[Path]]:
    folder = tmp_path_factory.mktemp("keys")
    return make_keys(str(folder / "a"), []), make_keys(str(folder / "b"), [])


def test_tls_needs_the_servers_certificate(serve: Serve, keys: tuple[list[Path], list[Path]]):
    (token_file, cert, key, *_), (_, other, *_) = keys
    token, address = token_file.read_text().strip(), f"127.0.0.1:{free_port()}"
    served = serve(address, token=token, credentials=server_credentials(str(cert), str(key)))
    assert works(address, token=token, cert=str(cert))
    assert works(address.replace("127.0.0.1", "localhost"), token=token, cert=str(cert))
    for wrong, kind, why in ("", ConnectionLost, "unavailable"), (str(other), ConfigError, "^wire.cert: the server"):
        begin = time.monotonic()
        with channel_to(address, wrong) as channel, pytest.raises(kind, match=why):
            Stream(channel, "Infer", {"envs": 1}, LAYOUT, token=token, silence=WAIT_S)
        assert time.monotonic() - begin < WAIT_S
    with channel_to(address, str(cert)) as channel, pytest.raises(CoterieError, match="not the run's token") as caught:
        Stream(channel, "Infer", {"envs": 1}, LAYOUT, token="x" * 20, silence=WAIT_S)
    assert not isinstance(caught.value, ConnectionLost)
    assert served.server.refused == {"ipv4:127.0.0.1": 1}
    assert works(address, token=token, cert=str(cert))
