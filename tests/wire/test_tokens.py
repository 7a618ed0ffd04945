"""Tokens: neither end sends one, each kind of client has its own, and loopback has one by itself."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import StatusCode

from coterie.errors import ConfigError, CoterieError
from coterie.wire.auth import read_token
from coterie.wire.client import Connection, Endpoint, Stream
from coterie.wire.codec import Frame
from coterie.wire.keys import make_keys
from coterie.wire.server import SERVICE, Server
from coterie.wire.service import Limits
from coterie.wire.tokens import KINDS, SCOPES, known_token, own_token, proof, scoped
from tests.support.net import free_port
from tests.support.waiting import wait_until
from tests.support.wire import (
    LAYOUT,
    TOKEN,
    WAIT_S,
    EchoService,
    Raw,
    arrays,
    channel_to,
    fake_server,
    hello_frame,
    works,
)
from tests.wire.conftest import Serve

SECRET, NONCE = scoped(TOKEN, "envs"), b"c" * 32


def proof_frame(content: bytes) -> bytes:
    return Frame(proof=content).SerializeToString()


def answered(channel: grpc.Channel, answer: Any) -> Raw:
    """A client that says hello, and then `answer`, made of the challenge."""
    raw = Raw(channel, hello_frame(nonce=NONCE))
    raw.out.put(answer(raw.next().challenge))
    return raw


@pytest.mark.parametrize("nonce", [b"", b"c" * 31, b"c" * 33])
def test_a_client_without_a_nonce_is_refused(serve: Serve, nonce: bytes):
    served = serve(token=TOKEN)
    with channel_to(served.address) as channel:
        end = Raw(channel, hello_frame(nonce=nonce)).end()
    assert end == (StatusCode.UNAUTHENTICATED, "the run's clients need its token")
    assert not served.service.streams
    assert works(served.address, token=TOKEN)


def test_only_a_proof_of_this_token_for_this_stream_is_taken(serve: Serve):
    served, seen = serve(token=TOKEN), list[bytes]()

    def right(challenge: Any) -> bytes:
        seen.append(proof_frame(proof(SECRET, "client", NONCE, challenge.nonce)))
        return seen[-1]

    wrong: list[Any] = [
        lambda challenge: seen[0],  # of another stream
        lambda challenge: proof_frame(challenge.proof),  # the server's own
        lambda challenge: proof_frame(proof(SECRET, "client", challenge.nonce, NONCE)),
        lambda challenge: proof_frame(proof(TOKEN, "client", NONCE, challenge.nonce)),
        lambda challenge: proof_frame(b""),
        lambda challenge: None,  # it leaves
    ]
    with channel_to(served.address) as channel:
        raw = answered(channel, right)
        assert raw.next().WhichOneof("kind") == "welcome"
        assert raw.end()[0] == StatusCode.OK
        for answer in wrong:
            assert answered(channel, answer).end() == (StatusCode.UNAUTHENTICATED, "not the run's token")
        assert answered(channel, lambda challenge: hello_frame()).end()[0] == StatusCode.INVALID_ARGUMENT
    assert len(served.service.streams) == 1
    assert served.server.refused == {"unix": len(wrong) + 1}


def test_a_client_that_does_not_answer_the_challenge_is_refused(serve: Serve):
    served = serve(token=TOKEN, limits=Limits(hello_s=0.2))
    with channel_to(served.address) as channel:
        raw = Raw(channel, hello_frame(nonce=NONCE))
        assert raw.next().WhichOneof("kind") == "challenge"
        with pytest.raises(grpc.RpcError):
            next(raw.call)
        assert raw.end() == (StatusCode.UNAVAILABLE, "no proof for 0.2 s")


def test_a_client_that_was_too_slow_once_gets_in(serve: Serve, monkeypatch: pytest.MonkeyPatch):
    """It was stopped, or had no processor, between the challenge and its proof."""
    served, first = serve(token=TOKEN, limits=Limits(hello_s=0.2)), list[bool]()

    def slow(token: str, side: str, one: bytes, other: bytes) -> bytes:
        if not first:
            first.append(True)
            wait_until(lambda: served.lines, what="the server gives up")
        return proof(token, side, one, other)

    monkeypatch.setattr("coterie.wire.client.proof", slow)
    with closing(Connection(Endpoint(served.address, TOKEN, patience=WAIT_S), {})) as connection:
        connection.retry(lambda: connection.stream("Infer", LAYOUT, lambda: None), lambda: None).close()
    assert served.lines == ["refused unix: no proof for 0.2 s"]


def test_messages_of_unknown_clients_are_read_a_few_at_a_time(serve: Serve):
    """gRPC takes in a message of up to `message_bytes` before the server sees it."""
    served = serve(token=TOKEN, limits=Limits(handshakes=2, hello_s=0.5))
    with channel_to(served.address) as channel:
        silent = [Raw(channel, hello_frame(nonce=NONCE)) for _ in range(2)]
        assert all(raw.next().WhichOneof("kind") == "challenge" for raw in silent)
        late = Raw(channel, hello_frame(nonce=NONCE))
        wait_until(lambda: served.server._streams.total() == 3)
        taken = served.server.bytes_in
        assert all(raw.end()[0] == StatusCode.UNAUTHENTICATED for raw in silent)
        assert late.next().WhichOneof("kind") == "challenge"
        assert served.server.bytes_in > taken
        late.end()
    assert works(served.address, token=TOKEN)


@pytest.mark.parametrize(
    "answer",
    [
        {"challenge": {"nonce": NONCE, "proof": proof("another token", "server", NONCE, NONCE)}},
        {"challenge": {"nonce": NONCE}},
        {"welcome": {"number": 1, "sends": LAYOUT.message()}},
    ],
    ids=["wrong", "none", "welcome"],
)
def test_a_client_sends_nothing_to_a_server_that_does_not_know_the_token(tmp_path: Path, answer: dict[str, Any]):
    address, frame = f"unix:{tmp_path}/s", Frame(**answer).SerializeToString()
    with (
        fake_server(address, lambda asked: (frame for _ in asked)) as (headers, frames),
        channel_to(address) as channel,
        pytest.raises(CoterieError, match="does not know the token"),
    ):
        Stream(channel, "Infer", {"envs": 1}, LAYOUT, token=TOKEN, silence=WAIT_S)
    assert [Frame.FromString(frame).WhichOneof("kind") for frame in frames] == ["hello"]
    sent = repr(headers).encode() + b"".join(frames)
    assert TOKEN.encode() not in sent
    assert SECRET.encode() not in sent


def test_each_kind_of_client_has_its_own_token(tmp_path: Path, serve: Serve):
    run, _, _, *files = make_keys(str(tmp_path / "keys"), [])
    token, tokens = read_token(str(run)), dict(zip(KINDS, (read_token(str(x)) for x in files), strict=True))
    assert [path.name for path in files] == ["envs.token", "actor.token", "peer.token"]
    assert len({token, *tokens.values()}) == 4
    for rpc, kind in SCOPES.items():
        service = EchoService()
        with closing(Server(f"unix:{tmp_path}/{rpc}", {rpc: service}, token=token)) as server:
            for given in KINDS:
                with channel_to(server.address) as channel:
                    if given == kind:
                        Stream(channel, rpc, {}, LAYOUT, token=tokens[given], silence=WAIT_S).close()
                        continue
                    why = f"wire.token_file: this token is for {KINDS[given]}, not for {KINDS[kind]}"
                    with pytest.raises(ConfigError, match=f"^{why}$"):
                        Stream(channel, rpc, {}, LAYOUT, token=tokens[given])
                    # Even if the client does not look.
                    raw = Raw(channel, hello_frame(nonce=NONCE), method=f"/{SERVICE}/{rpc}")
                    challenge = raw.next().challenge
                    raw.out.put(proof_frame(proof(tokens[given], "client", NONCE, challenge.nonce)))
                    assert raw.end() == (StatusCode.UNAUTHENTICATED, "not the run's token")
            assert len(service.streams) == 1
            wait_until(lambda server=server: not server._streams)  # type: ignore[misc]
    with pytest.raises(ConfigError, match="this token is for actors, not for env hosts"):
        Server(f"unix:{tmp_path}/s", {"Infer": EchoService()}, token=tokens["actor"])


def test_a_loopback_address_has_a_token_that_only_this_user_finds(serve: Serve, monkeypatch, tmp_path: Path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    served = serve(f"127.0.0.1:{free_port()}")
    [file] = (tmp_path / "state" / "coterie").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    with channel_to(served.address) as channel:
        assert Raw(channel, hello_frame()).end()[0] == StatusCode.UNAUTHENTICATED
    with closing(Connection(Endpoint(served.address, patience=1.0), {})) as connection:  # as `coterie envs --connect`
        stream = connection.stream("Infer", LAYOUT, lambda: None)
        stream.send(arrays())
        assert stream.receive()[1] == 7
        stream.close()
    assert works(served.address.replace("127.0.0.1", "localhost"))
    other = serve(f"127.0.0.1:{free_port()}")
    with channel_to(other.address) as channel, pytest.raises(CoterieError, match="not the run's token"):
        Stream(channel, "Infer", {}, LAYOUT, token=own_token(served.address), silence=WAIT_S)


def test_a_loopback_token_that_cannot_be_kept_is_asked_for(monkeypatch, tmp_path: Path):
    (tmp_path / "state").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with pytest.raises(ConfigError, match=r"^wire\.token_file: give one: cannot write .*: Not a directory$"):
        Server(f"127.0.0.1:{free_port()}", {"Infer": EchoService()})


def test_a_unix_socket_is_for_its_owner(serve: Serve, monkeypatch):
    served = serve()
    path = served.address.removeprefix("unix:")
    assert os.stat(path).st_mode & 0o777 == 0o700
    assert known_token(served.address, "") == ""
    uid = os.stat(path).st_uid
    os.chown(path, 12345, -1) if uid == 0 else monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    with pytest.raises(ConfigError, match=r"^wire\.token_file: unix:.* is another user's: give the run's token$"):
        known_token(served.address, "")
    assert known_token(served.address, TOKEN) == TOKEN
