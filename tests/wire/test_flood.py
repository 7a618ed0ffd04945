"""What a server gives to unknown clients: a few connections, for a few seconds, and little memory."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import cycle
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import StatusCode

from coterie.errors import CoterieError
from coterie.wire import server
from coterie.wire.auth import read_token
from coterie.wire.client import Stream
from coterie.wire.keys import make_keys
from coterie.wire.server import _WATCH_S
from coterie.wire.service import Limits
from coterie.wire.tokens import NONCE_BYTES
from tests.support.http2 import PREFACE, SETTINGS
from tests.support.net import free_port
from tests.support.proxy import Proxy
from tests.support.waiting import wait_until
from tests.support.wire import LAYOUT, METHOD, TOKEN, WAIT_S, Raw, arrays, channel_to, hello_frame, works
from tests.wire.conftest import Serve

DESCRIPTORS, CONNECTIONS = 256, 1000
SERVER = f"""
import resource, sys
from coterie.wire.auth import read_token
from coterie.wire.server import Server, server_credentials
from tests.support.wire import EchoService
address, token, cert, key = sys.argv[1:]
resource.setrlimit(resource.RLIMIT_NOFILE, ({DESCRIPTORS // 2}, {DESCRIPTORS}))
credentials = server_credentials(cert, key) if cert else None
server = Server(address, {{"Infer": EchoService()}}, token=read_token(token), credentials=credentials)
print("ready", flush=True)
for line in sys.stdin:  # a checkpoint: a few files at once
    try:
        files = [open("/dev/null") for _ in range(20)]
        files.clear()
        print("saved", resource.getrlimit(resource.RLIMIT_NOFILE)[0], flush=True)
    except OSError as error:
        print(error.strerror, flush=True)
"""


@contextmanager
def flood(port: int, firsts: list[bytes]) -> Iterator[list[socket.socket]]:
    """Connections that send these first bytes by turns."""
    with ExitStack() as stack:
        made = list[socket.socket]()
        for first, _ in zip(cycle(firsts), range(CONNECTIONS), strict=False):
            made.append(stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10)))
            with suppress(OSError):  # it was closed at once
                made[-1].sendall(first)
        yield made


@pytest.mark.parametrize(
    ("firsts", "tls", "seconds"),  # these are in docs/reference/wire.md
    [([b"", b"\x16\x03\x01"], True, 5), ([PREFACE + SETTINGS], False, 10)],
    ids=["silent, half a TLS hello", "no call"],
)
def test_idle_connections_leave_descriptors_for_the_run_and_room_for_its_clients(
    tmp_path: Path, firsts: list[bytes], tls: bool, seconds: int
):
    token, cert, key, *_ = map(str, make_keys(str(tmp_path / "keys"), []))
    cert *= tls
    port = free_port()
    command = [sys.executable, "-c", SERVER, f"127.0.0.1:{port}", token, cert, key]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            with flood(port, firsts):
                end = time.monotonic() + seconds
                process.stdin.write("\n")
                process.stdin.flush()
                assert process.stdout.readline() == f"saved {DESCRIPTORS}\n"
                folder = f"/proc/{process.pid}/fd"
                assert len(os.listdir(folder)) < DESCRIPTORS - 50

                def admitted() -> bool:
                    try:
                        return works(f"127.0.0.1:{port}", token=read_token(token), cert=cert)
                    except CoterieError:  # all places are taken for the moment
                        return False

                wait_until(admitted, 10.0, "a good client is served")
                rest = end - time.monotonic() + 6.0  # for a busy machine
                wait_until(lambda: len(os.listdir(folder)) < 30, max(rest, 6.0), "idle connections are closed")
        finally:
            process.kill()


def is_open(connection: socket.socket) -> bool:
    try:
        while connection.recv(4096):  # what the server says of itself
            pass
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def test_one_address_has_a_few_connections_without_a_stream(serve: Serve):
    """However many good clients it has."""
    served = serve(f"127.0.0.1:{free_port()}", token=TOKEN, limits=Limits(strangers=5))
    with ExitStack() as stack:
        streams = list[Stream]()
        for _ in range(8):
            channel = stack.enter_context(channel_to(served.address))
            streams.append(Stream(channel, "Infer", {}, LAYOUT, token=TOKEN, silence=WAIT_S))
            stack.callback(streams[-1].close)
        strangers = list[socket.socket]()
        for _ in range(30):
            strangers.append(stack.enter_context(socket.create_connection(("127.0.0.1", served.server.port))))
            strangers[-1].sendall(PREFACE + SETTINGS)
            strangers[-1].setblocking(False)
        wait_until(lambda: sum(map(is_open, strangers)) == 5, 5.0, "those beyond the limit are closed")
        for stream in streams:
            stream.send(arrays())
            assert stream.receive()[1] == 7


def test_the_oldest_connection_without_a_stream_makes_room(serve: Serve):
    served = serve(f"127.0.0.1:{free_port()}", token=TOKEN, limits=Limits(strangers=3))
    with ExitStack() as stack:

        def stranger() -> socket.socket:
            made = stack.enter_context(socket.create_connection(("127.0.0.1", served.server.port)))
            made.sendall(PREFACE + SETTINGS)
            made.setblocking(False)
            return made

        strangers = [stranger() for _ in range(3)]
        time.sleep(2.5 * _WATCH_S)
        assert all(map(is_open, strangers))
        for oldest in list(strangers):
            strangers.append(stranger())
            wait_until(lambda oldest=oldest: not is_open(oldest), 5.0, "the oldest is closed")
            assert all(map(is_open, strangers[-3:])), "a client that is slow to begin is cut off"


def test_a_client_with_the_token_gets_in_where_others_of_its_address_have_taken_all_places(serve: Serve):
    served = serve(f"127.0.0.1:{free_port()}", token=TOKEN, limits=Limits(streams=4, handshakes=4, hello_s=60.0))
    with channel_to(served.address) as channel:
        silent = [Raw(channel, hello_frame(nonce=b"c" * NONCE_BYTES)) for _ in range(4)]
        assert all(raw.next().WhichOneof("kind") == "challenge" for raw in silent)
        assert works(served.address, token=TOKEN)
        assert served.server.refused.total() == 1
        assert "no token in time: newer clients of this address came" in served.lines[0]
    wait_until(lambda: not served.server._streams and not served.server._unproven)


def test_what_a_connection_sends_before_its_proof_is_bounded(serve: Serve):
    """Not by the size of a message alone: gRPC would hold 16 of them for each address."""
    served = serve(f"127.0.0.1:{free_port()}", token=TOKEN)
    size = served.server.limits.message_bytes
    with Proxy(served.server.port) as proxy:
        proxy.rate = 2e7
        with channel_to(f"127.0.0.1:{proxy.port}") as channel, pytest.raises(grpc.RpcError) as caught:
            list(channel.stream_stream(METHOD)(iter([bytes(size)]), timeout=WAIT_S))
        assert caught.value.code() == StatusCode.UNAVAILABLE
        assert proxy.bytes < size / 4
        assert "bytes before it has proven the token" in served.lines[0]
    wait_until(lambda: not served.server._streams and not served.server._unproven)


def test_a_connection_that_has_proven_the_token_may_send_much_and_begin_again(serve: Serve, monkeypatch: Any):
    monkeypatch.setattr(server, "_STRANGERS_BYTES", 4096)
    served = serve(f"127.0.0.1:{free_port()}", token=TOKEN)
    ports = list[set[str]]()
    with channel_to(served.address) as channel:
        for _ in range(2):
            stream = Stream(channel, "Infer", {}, LAYOUT, token=TOKEN, silence=WAIT_S)
            for _ in range(100):
                stream.send(arrays())
                assert stream.receive()[1] == 7
            ports.append(set(served.server.proven))
            stream.close()
            time.sleep(2.5 * _WATCH_S)
    assert not served.lines
    assert ports[0] == ports[1], "it is still the same one"
    wait_until(lambda: not served.server.proven, what="one that is gone is forgotten")


def test_a_small_message_that_would_become_a_large_one_is_refused(serve: Serve):
    served = serve(limits=Limits(message_bytes=1 << 26))
    frames = iter([hello_frame(), bytes(1 << 26)])
    with channel_to(served.address) as channel:
        call = channel.stream_stream(METHOD)(frames, compression=grpc.Compression.Gzip, timeout=WAIT_S)
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
    assert caught.value.code() == StatusCode.UNIMPLEMENTED
    assert served.server.bytes_in == 0
    assert works(served.address)
