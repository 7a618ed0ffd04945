"""How the server's streams wait and end: time-outs, clients that vanish, the end of the run, several servers."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc import StatusCode

from coterie.types import CoterieError
from coterie.wire.client import ConnectionLost, RunEnded, Stream
from coterie.wire.codec import Layout, Tensor
from coterie.wire.server import Limits, Server
from tests.support.http2 import Http2
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
        assert raw.end() == (StatusCode.INVALID_ARGUMENT, "no hello for 0.2 s")
    wait_until(lambda: served.server.is_idle)
    assert served.server.refused == {"unix": 1}
    assert works(served.address)


@pytest.mark.parametrize("how", ["cancel", "socket"])
def test_a_client_may_vanish_while_its_answer_is_pending(serve: Serve, how: str):
    served = serve()
    served.service.late = True
    with channel_to(served.address) as channel:
        if how == "socket":
            with Http2(served.address) as peer:
                peer.call(hello_frame(), data_frame(0))
                asked, answer = served.service.asked.get(timeout=WAIT_S)
        else:
            raw = Raw(channel, hello_frame(), data_frame(0))
            asked, answer = served.service.asked.get(timeout=WAIT_S)
            raw.call.cancel()
            raw.out.put(None)
    wait_until(lambda: served.service.streams[0].left == 1)
    for _ in range(2):
        answer(asked, 1)  # the client is gone: no error
    wait_until(lambda: served.server.is_idle)
    served.service.late = False
    assert works(served.address)
    assert served.service.streams[0].left == 1


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
    wide = Layout([Tensor("x", "uint8", (1 << 20,))])
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


def test_an_address_in_use_is_refused(serve: Serve, tmp_path: Path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(CoterieError, match=r"^wire\.bind: cannot listen at .*: is the address in use\?$"):
            Server(address, {})
    assert works(serve(address).address)


def test_two_servers_of_one_process_are_independent(serve: Serve):
    """A learner has one for local hosts and one for remote ones."""
    addresses = [serve().address, serve().address]
    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(works, addresses * 20))


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
