"""The client's side of a stream: whatever happens to the server, it raises in time and with a reason."""

from __future__ import annotations

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from itertools import islice
from pathlib import Path

import grpc
import pytest

from coterie.errors import ConfigError, CoterieError
from coterie.parallel.clock import back_off
from coterie.wire.channel import open_channel
from coterie.wire.client import Connection, ConnectionLost, Endpoint, ReconnectingStream, RunEnded, Stream
from coterie.wire.codec import Frame, FrameLayout, Refused, TensorSpec
from coterie.wire.keys import make_keys
from coterie.wire.server import server_credentials
from coterie.wire.service import Limits
from tests.support.net import free_port
from tests.support.proxy import Proxy
from tests.support.waiting import wait_until
from tests.support.wire import LAYOUT, TOKEN, WAIT_S, arrays, channel_to, fake_server
from tests.wire.conftest import Serve


def connect(channel: grpc.Channel, silence: float = WAIT_S, token: str = "") -> Stream:
    return Stream(channel, "Infer", {"envs": 1}, LAYOUT, silence=silence, token=token)


def watchers() -> int:
    """Threads of streams: each has one that watches, and gRPC one that sends."""
    return sum(t.name == "coterie-wire-watch" or t.name.endswith("(_run)") for t in threading.enumerate())


def test_a_stream_sends_questions_and_receives_answers(serve: Serve):
    with channel_to(serve().address) as channel:
        stream = connect(channel)
        assert (stream.welcome.number, stream.welcome.credits, stream.welcome.settings) == (5, 1, "{}")
        assert stream.reads.tensors == LAYOUT.tensors
        for k in range(3):
            stream.send(arrays(k))
            assert stream.receive()[0]["x"][0] == k + 1
        assert stream.bytes_in > 0
        assert stream.bytes_out > 0
        with pytest.raises(Refused, match="x has shape"):
            stream.send({**arrays(), "x": arrays()["x"][:2]})
        stream.close()
        stream.close()


def test_a_stream_reconnects_to_a_new_server_and_asks_again(serve: Serve):
    first, lines, made = serve(), list[str](), list[Stream]()
    with closing(Connection(Endpoint(first.address, patience=WAIT_S), {"envs": 1}, lines.append)) as connection:

        def connect() -> Stream:
            made.append(connection.stream("Infer", LAYOUT, lambda: None))
            return made[-1]

        stream = ReconnectingStream(connect, connection, lambda: None)
        assert stream.ask(lambda: arrays(len(made)))[0]["x"][0] == 2
        first.server.close(None)
        assert stream.ask_once(lambda: arrays(len(made))) is None, "sent once, and lost"
        serve(first.address)
        assert stream.ask(lambda: arrays(len(made)))[0]["x"][0] == len(made) + 1, "asked for the new stream"
        assert len(made) >= 2
        assert stream.ask_once(lambda: arrays(5)) is not None
        stream.close()
    assert all(re.match(r"no learner at unix:.* retrying for 8 s|a learner at unix:.* after", line) for line in lines)


def test_a_stream_gives_up_a_server_that_stays_away(tmp_path: Path):
    lines = list[str]()
    with closing(Connection(Endpoint(f"unix:{tmp_path}/none", patience=0.1), {}, lines.append)) as connection:
        with pytest.raises(CoterieError, match=r"^no learner at unix:.*/none for \d s: unavailable"):
            connection.settings("Infer")

        def check() -> None:
            if len(lines) > 1:
                raise InterruptedError

        with pytest.raises(InterruptedError):
            connection.settings("Infer", check)
    assert all(line.startswith("no learner at ") for line in lines)
    assert len(lines) == 2, "once for each outage"


def test_a_silent_server_is_given_up(serve: Serve):
    """A server that no longer answers, nor says that it lives."""
    served = serve()
    served.service.late = True
    with channel_to(served.address) as channel:
        stream = connect(channel)
        stream.silence = 0.4
        time.sleep(0.9)  # without a question: no silence
        stream.send(arrays())
        begin = time.monotonic()
        with pytest.raises(ConnectionLost, match=r"no frame for 0\.4 s"):
            stream.receive()
        assert 0.3 < time.monotonic() - begin < WAIT_S / 2
        stream.close()


def test_a_stream_that_is_closed_during_a_wait_says_so(serve: Serve):
    served = serve()
    served.service.late = True
    with channel_to(served.address) as channel:
        stream = connect(channel)
        stream.send(arrays())
        threading.Timer(0.1, stream.close).start()
        with pytest.raises(ConnectionLost, match=r"^the stream was closed here$"):
            stream.receive()


@pytest.mark.slow
def test_a_connection_that_nothing_comes_through_is_given_up_at_both_ends(serve: Serve):
    """The proxy accepts bytes and drops them."""
    served = serve(f"127.0.0.1:{free_port()}")
    served.service.late = True
    with Proxy(int(served.address.rpartition(":")[2])) as proxy, channel_to(f"127.0.0.1:{proxy.port}") as channel:
        stream = connect(channel, silence=120, token=served.server.token)
        proxy.frozen.set()
        stream.send(arrays())
        begin = time.monotonic()
        with pytest.raises(ConnectionLost):
            stream.receive()
        wait_until(lambda: not served.server._streams, 30)
        assert 5 < time.monotonic() - begin < 45


def test_a_client_receives_heartbeats_while_it_waits(serve: Serve):
    served = serve(limits=Limits(heartbeat_s=0.1))
    served.service.late = True
    with channel_to(served.address) as channel:
        stream = connect(channel, silence=2.0)
        stream.send(arrays())
        asked, answer = served.service.asked.get(timeout=WAIT_S)
        threading.Timer(2.5, answer, (asked, 4)).start()
        assert stream.receive()[1] == 4
        stream.close()


def test_a_refusal_is_no_lost_connection(serve: Serve):
    """It would be the same at the next try."""
    served = serve(token=TOKEN)
    with channel_to(served.address) as channel:
        for token, why in ("", "the run's clients need its token"), ("x", "not the run's token"):
            with pytest.raises(CoterieError, match=rf"^the server refused: {why} \(unauthenticated\)$") as caught:
                connect(channel, token=token)
            assert not isinstance(caught.value, ConnectionLost)
        stream = connect(channel, token=TOKEN)
        stream.number = 5
        stream.send(arrays())
        with pytest.raises(CoterieError, match=r"data frame 5 instead of 0 \(invalid_argument\)") as caught:
            stream.receive()
        assert not isinstance(caught.value, ConnectionLost)
        stream.close()


def welcome(layout: FrameLayout = LAYOUT) -> bytes:
    return Frame(welcome={"number": 1, "sends": layout.message()}).SerializeToString()


BROKEN_ANSWERS = {
    "no welcome": ([Frame(data={"number": 0}).SerializeToString()], "not a welcome"),
    "heartbeats": ([b""] * 3, "ended the stream"),
    "huge frames": (
        [welcome(FrameLayout([TensorSpec("x", "float64", (2**31,) * 4)]))],
        "the server's frames: frames of up to",
    ),
    "short data": (
        [welcome(), Frame(data={"tensors": b"abc"}).SerializeToString()],
        "the server's frame: a frame of 3",
    ),
    "over at once": ([Frame(over={"reason": "late"}).SerializeToString()], "late"),
    "over": ([welcome(), Frame(over={"reason": "that was all"}).SerializeToString()], "that was all"),
}


@pytest.mark.parametrize("case", BROKEN_ANSWERS)
def test_a_server_that_breaks_the_protocol_is_refused(tmp_path: Path, case: str):
    frames, why = BROKEN_ANSWERS[case]
    address, before = f"unix:{tmp_path}/s", watchers()
    error = RunEnded if case.startswith("over") else CoterieError
    with fake_server(address, lambda asked: frames), channel_to(address) as channel:
        with pytest.raises(error, match=why), closing(connect(channel)) as stream:
            stream.receive()
        wait_until(lambda: watchers() <= before)


def test_waits_between_attempts_grow_and_differ():
    most = [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]
    one, other = list(islice(back_off(), 9)), list(islice(back_off(), 9))
    assert all(m / 2 <= wait <= m for waits in (one, other) for wait, m in zip(waits, most, strict=True))
    assert one != other, "clients that lost the same server must not return at once"


def test_a_client_leaves_at_once_while_it_waits_for_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked = list[str]()
    monkeypatch.setattr("coterie.wire.client.back_off", lambda: iter([1e9]))

    def leave() -> None:
        if asked:
            raise InterruptedError

    def lost() -> None:
        raise ConnectionLost("away")

    connection = Connection(Endpoint(f"unix:{tmp_path}/s"), {}, asked.append)
    with closing(connection), pytest.raises(InterruptedError):
        connection.retry(lost, leave)


@pytest.mark.parametrize("address", ["10.0.0.1:5000", "0.0.0.0:5000", "learner.example.org:5000"])
def test_another_machine_needs_a_certificate(address: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"^wire\.cert: .* is on another machine"):
        open_channel(address)
    with pytest.raises(ConfigError, match=r"wire\.cert: cannot read"):
        open_channel(address, str(tmp_path / "none"))
    (tmp_path / "cert.pem").write_text("?")
    with pytest.raises(ConfigError, match=rf"^wire\.cert: {tmp_path}/cert.pem holds no certificate$"):
        open_channel(address, str(tmp_path / "cert.pem"))


def test_a_client_with_another_certificate_is_not_an_absent_learner(serve: Serve, tmp_path: Path):
    _, cert, key, *_ = map(str, make_keys(str(tmp_path / "keys"), ["localhost"]))
    served = serve(f"127.0.0.2:{free_port()}", token=TOKEN, credentials=server_credentials(cert, key))
    lines = list[str]()
    for given, kind, why in (cert, ConfigError, "for other hosts"), ("", CoterieError, "no learner"):
        one = Connection(Endpoint(served.address, TOKEN, given, patience=0.5), {}, lines.append)
        with closing(one), pytest.raises(kind, match=why):
            one.settings("Infer")
    (line,) = lines
    assert "(with TLS it needs --wire.cert)" in line


def test_a_server_that_ends_open_streams_logs_nothing(serve: Serve):
    """gRPC prints a traceback of a stream that is cancelled a second time while it ends."""
    servers = [serve(limits=Limits(streams=20)) for _ in range(4)]
    with ExitStack() as opened, ThreadPoolExecutor(len(servers)) as pool:
        channels = [opened.enter_context(channel_to(served.address)) for served in servers]
        for channel in channels:
            for _ in range(20):
                opened.callback(connect(channel).close)
        assert list(pool.map(lambda served: served.server.close(None), servers)) == [None] * 4
