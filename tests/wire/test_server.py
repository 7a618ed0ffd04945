"""The server against clients that break the protocol: each loses its stream, and others go on."""

from __future__ import annotations

import asyncio
import random
import time

import pytest
from grpc import StatusCode

from coterie.wire.client import ConnectionLost, Stream
from coterie.wire.codec import Frame, FrameLayout, TensorSpec
from coterie.wire.service import Limits
from tests.support.waiting import wait_until
from tests.support.wire import (
    LAYOUT,
    WAIT_S,
    Context,
    EchoStream,
    Ended,
    Raw,
    arrays,
    channel_to,
    data_frame,
    hello_frame,
    works,
)
from tests.wire.conftest import Serve, Served

MOST = 1 << 16


def raw_end(served: Served, *frames: bytes) -> tuple[StatusCode, str]:
    """How a stream of these frames ends, after which the server must be as good as new."""
    with channel_to(served.address) as channel:
        end = Raw(channel, *frames).end()
    wait_until(lambda: not served.server._streams)
    return end


REFUSED = {
    "no hello": ([data_frame()], "first frame must be a hello"),
    "another protocol": ([hello_frame(protocol=1)], "protocol 1 is not 2"),
    "other tensors": ([hello_frame(FrameLayout([TensorSpec("x", "uint8", (3,))]))], "other tensors"),
    "huge tensors": ([hello_frame(FrameLayout([TensorSpec("x", "uint8", (2**31,) * 4)]))], "more than"),
    "a second hello": ([hello_frame(), hello_frame()], "only data frames may follow"),
    "an over": ([hello_frame(), Frame(over={"reason": "x"}).SerializeToString()], "only data frames may follow"),
    "a replayed frame": ([hello_frame(), data_frame(0), data_frame(0)], "data frame 0 instead of 1"),
    "cut tensors": ([hello_frame(), data_frame(0, LAYOUT.pack(arrays())[:-1])], "ends within"),
    "more than tensors": ([hello_frame(), data_frame(0, LAYOUT.pack(arrays()) + b"x")], "1 more"),
    "a mask of other rows": ([hello_frame(), data_frame(0, b"\1\1\1\0" + LAYOUT.pack(arrays())[4:])], "ends within"),
    "random bytes later": ([hello_frame(), data_frame(0), random.Random(0).randbytes(100)], "not a frame"),
    "more than any frame": ([hello_frame(), data_frame(0, bytes(50_000))], "more than 1"),
    "a hello that is too long": (
        [hello_frame(FrameLayout([TensorSpec("n" * 70_000, "bool", (3,))]))],
        "more than 65536",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_stream_that_breaks_the_protocol_is_refused(serve: Serve, case: str):
    served, (frames, why) = serve(), REFUSED[case]
    for n in (1, 2):
        status, details = raw_end(served, *frames)
        assert status == StatusCode.INVALID_ARGUMENT
        assert why in details
        assert served.server.refused == {"unix": n}
    assert len(served.lines) == 1, "a client is reported once"
    assert served.lines[0].startswith("refused unix: ")
    assert why in served.lines[0]
    assert works(served.address)


def test_the_reason_of_a_refusal_is_short_and_printable(serve: Serve):
    """A peer may choose the name of a tensor, and what is said of it must fit into a header, and into a log."""
    served = serve()
    status, details = raw_end(served, hello_frame(FrameLayout([TensorSpec("\n\u2028" + "n" * 60_000, "O", (3,))])))
    assert status == StatusCode.INVALID_ARGUMENT
    assert details.startswith("'\\n")
    assert len(served.lines[0]) < 1000
    names = FrameLayout([TensorSpec("a\nrefused nobody\x1b[2J", "bool", (3,)), TensorSpec("b\u2028", "bool", (3,))])
    _, details = raw_end(served, hello_frame(names))
    assert details == "other tensors: a?refused nobody?[2J, b?"


def test_too_many_streams_of_one_client_are_refused(serve: Serve):
    served = serve(limits=Limits(streams=2))
    with channel_to(served.address) as channel:
        for _ in range(2):  # places are given back
            two = [Raw(channel, hello_frame()) for _ in range(2)]
            assert all(one.next().WhichOneof("kind") == "welcome" for one in two)
            status, why = Raw(channel, hello_frame()).end()
            assert (status, why) == (StatusCode.UNAVAILABLE, "too many streams of one client")
            assert all(one.end()[0] == StatusCode.OK for one in two)
            wait_until(lambda: not served.server._streams)
    assert served.server.refused == {"unix": 2}
    assert works(served.address)


def test_too_many_streams_of_all_clients_are_refused(serve: Serve):
    served = serve(limits=Limits(all_streams=2))
    with channel_to(served.address) as one, channel_to(served.address) as other:  # gRPC's limit is of a connection
        two = [Raw(channel, hello_frame()) for channel in (one, other)]
        assert all(raw.next().WhichOneof("kind") == "welcome" for raw in two)
        assert Raw(other, hello_frame()).end() == (StatusCode.UNAVAILABLE, "too many streams")
        assert all(raw.end()[0] == StatusCode.OK for raw in two)
    assert works(served.address)


def test_refused_clients_are_counted_by_address_up_to_a_limit(serve: Serve):
    """A client is the same at any port. One with many addresses cannot fill the memory."""
    served = serve(limits=Limits(all_streams=4))
    handle, clients = served.server.handler("Infer"), ["ipv6:[::1]", *(f"ipv4:10.0.0.{k}" for k in range(9))]
    for client in clients:
        for port in range(2):
            with pytest.raises(Ended):
                asyncio.run(handle(None, Context([data_frame()], peer=f"{client}:{port}")))
    assert served.server.refused == dict.fromkeys(clients[:4], 2)
    assert [line.split(": the first")[0] for line in served.lines] == [f"refused {client}" for client in clients[:4]]


@pytest.mark.parametrize("first", [True, False], ids=["hello", "data"])
def test_messages_above_the_limit_are_refused(serve: Serve, first: bool):
    """What goes a little too far is refused and counted; what goes far beyond gRPC does not even take in."""
    served = serve(limits=Limits(message_bytes=MOST))
    before = [] if first else [hello_frame()]
    status, why = raw_end(served, *before, data_frame(0, b"x" * (MOST + 1)))
    assert status == StatusCode.RESOURCE_EXHAUSTED
    assert f"more than {MOST}" in why
    assert served.server.refused == {"unix": 1}
    taken = served.server.bytes_in
    status, why = raw_end(served, *before, data_frame(0, b"x" * (MOST * 20)))
    assert status == StatusCode.RESOURCE_EXHAUSTED
    assert "larger than max" in why
    assert served.server.bytes_in - taken < MOST
    assert works(served.address)


def test_a_stream_that_ends_at_once_is_not_counted_as_refused(serve: Serve):
    served = serve()
    assert raw_end(served)[0] == StatusCode.OK
    assert raw_end(served, hello_frame())[0] == StatusCode.OK
    assert not served.server.refused


def test_a_client_that_falls_silent_is_closed_where_others_wait_for_it(serve: Serve, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(EchoStream, "patience", 1.0)
    monkeypatch.setattr(EchoStream, "about", "4 envs")
    served = serve()
    with channel_to(served.address) as channel:
        stream = Stream(channel, "Infer", {"envs": 1}, LAYOUT, silence=WAIT_S, token="")
        served.service.late = True
        stream.send(arrays())
        time.sleep(2 * EchoStream.patience)  # it is the client that waits
        sent, answer = served.service.asked.get(timeout=WAIT_S)
        answer(sent, 0)
        assert stream.receive()[0]["x"][0] == 0
        with pytest.raises(ConnectionLost):
            stream.receive()
        stream.close()
    closed = "a local client is closed: it has sent nothing for 1 s, while others wait for it: 4 envs"
    assert served.lines == ["a local client has joined: 4 envs", closed, "a local client has left: 4 envs"]
    assert not served.server.refused
