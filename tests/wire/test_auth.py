"""Access to servers: addresses, token files, and the files of `coterie keys`."""

from __future__ import annotations

import ipaddress
import os
import socket
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, rsa

import coterie
from coterie import presets
from coterie.errors import ConfigError, CoterieError
from coterie.wire.auth import check_free, check_pair, is_local, offset, read_token, split
from coterie.wire.keys import make_keys
from coterie.wire.server import Server, server_credentials
from tests.support.net import free_port
from tests.support.wire import TOKEN, EchoService


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("unix:/tmp/x", True),
        ("127.0.0.1:5000", True),
        ("[::1]:5000", True),
        ("0.0.0.0:5000", False),
        ("[::]:5000", False),
        ("[fe80::1]:5000", False),
        ("127.0.0.1.example.org:5000", False),
        ("127.1:5000", False),  # not a canonical address: the system may resolve it differently
    ],
)
def test_loopback_and_unix_sockets_are_local(address: str, local: bool):
    assert is_local(address) is local


@pytest.mark.parametrize(
    "address",
    [
        "",
        ":",
        "host",
        "host:",
        ":5000",
        "host:port",
        "host:0",
        "host:65536",
        "host:-1",
        "host:²",
        "host:5 ",
        "a..b:5000",
        "::1",
        "::1:5000",
        "[::1:5000",
        "[host]:5000",
    ],
)
def test_an_address_is_host_and_port(address: str):
    for reads in (split, is_local, lambda x: offset(x, 1)):
        with pytest.raises(ConfigError, match="is not HOST:PORT"):
            reads(address)


def test_learner_k_listens_k_ports_further():
    assert split("[::1]:5000") == ("::1", 5000)
    assert split("host:5000") == ("host", 5000)
    assert offset("host:5000", 0) == "host:5000"
    assert offset("host:5000", 2) == "host:5002"
    assert offset("[::1]:5000", 2) == "[::1]:5002"
    assert offset("unix:/tmp/x", 0) == "unix:/tmp/x"
    assert offset("unix:/tmp/x", 2) == "unix:/tmp/x.2"


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("x" * 120, "AF_UNIX path too long"),
        ("none/s", r".*/none is not a writable folder"),
        ("file/s", r".*/file is not a writable folder"),
        ("file", "the file there is not a socket"),
    ],
)
def test_a_socket_that_cannot_be_made_is_refused_with_the_reason(tmp_path: Path, path: str, why: str):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=rf"^wire\.bind: cannot listen at unix:{tmp_path}/{path}: {why}$"):
        check_free(f"unix:{tmp_path}/{path}", "wire.bind")


def test_an_unknown_host_is_refused(monkeypatch: pytest.MonkeyPatch):
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(ConfigError, match=r"^wire\.bind: cannot listen at nohost:5000: Name or service not known$"):
        check_free("nohost:5000", "wire.bind")


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_token_is_read(tmp_path: Path, mode: int):
    path = tmp_path / "token"
    path.write_text(f"  {TOKEN}\n")
    path.chmod(mode)
    assert read_token(str(path)) == TOKEN


@pytest.mark.parametrize(
    ("content", "mode", "why"),
    [
        (TOKEN.encode(), 0o644, "others may read"),
        (TOKEN.encode(), 0o602, "others may read"),
        (b"short", 0o600, "at least 16"),
        (TOKEN.encode() + "ü".encode(), 0o600, "at least 16"),
        (TOKEN.encode() + b"\n" + TOKEN.encode(), 0o600, "at least 16"),
        (TOKEN.encode() + b"\x80", 0o600, "cannot read"),
    ],
)
def test_a_token_file_that_is_public_or_has_no_token_is_refused(tmp_path: Path, content: bytes, mode: int, why: str):
    path = tmp_path / "token"
    path.write_bytes(content)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=why) as caught:
        read_token(str(path))
    assert "\n" not in str(caught.value)
    assert TOKEN not in str(caught.value)


def test_keys_hold_a_token_and_a_certificate_for_the_hosts(tmp_path: Path):
    folder = tmp_path / "some" / "keys"
    token, cert, key, *others = make_keys(str(folder), ["10.1.2.3", "learner.example.org", "::1", "localhost"])
    for path in (token, cert, key, *others):
        assert path.parent == folder
        assert os.stat(path).st_mode & 0o777 == 0o600
    assert len(read_token(str(token))) >= 32
    names = x509.load_pem_x509_certificate(cert.read_bytes()).extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    )
    assert names.value.get_values_for_type(x509.DNSName) == ["learner.example.org", "localhost"]
    addresses = names.value.get_values_for_type(x509.IPAddress)
    assert addresses == [ipaddress.ip_address(x) for x in ("10.1.2.3", "::1", "127.0.0.1")]
    assert read_token(str(make_keys(str(tmp_path / "others"), [])[0])) != read_token(str(token))


def test_a_private_key_that_others_may_read_is_refused(tmp_path: Path):
    _, cert, key, *_ = map(str, make_keys(str(tmp_path / "keys"), []))
    server_credentials(cert, key)
    os.chmod(cert, 0o644)
    server_credentials(cert, key)
    os.chmod(key, 0o640)
    with pytest.raises(ConfigError, match=f"^wire.key: others may read {key}; use chmod 600$"):
        server_credentials(cert, key)


def test_a_certificate_needs_its_key(tmp_path: Path):
    cert, key, other = "a/cert.pem", "a/key.pem", "b/key.pem"
    for folder in "ab":
        make_keys(str(tmp_path / folder), [])
    (tmp_path / "empty").touch(0o600)

    def check(cert: str, key: str) -> None:
        check_pair(str(tmp_path / cert), str(tmp_path / key))

    check(cert, key)
    for wrong in (other, cert, "empty"):
        with pytest.raises(
            ConfigError,
            match=f"^wire.key: {tmp_path}/{wrong} does not hold the key of {tmp_path}/{cert}, without a password$",
        ):
            check(cert, wrong)
    for wrong in (key, "empty"):
        with pytest.raises(ConfigError, match=f"^wire.cert: {tmp_path}/{wrong} holds no certificate$"):
            check(wrong, key)


def test_a_short_key_is_accepted_as_by_grpc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ec, "generate_private_key", lambda curve: rsa.generate_private_key(65537, 1024))
    _, cert, key, *_ = map(str, make_keys(str(tmp_path), []))
    check_pair(cert, key)


def test_a_key_of_another_certificate_is_refused_before_the_run_has_a_folder(tmp_path: Path):
    access = {"wire.bind": f"unix:{tmp_path}/s"}
    for folder, name in (("a", "cert"), ("b", "key")):
        make_keys(str(tmp_path / folder), [])
        access[f"wire.{name}"] = str(tmp_path / folder / f"{name}.pem")
    config = presets.impala("CartPole-v1", steps=500, out=str(tmp_path / "run"), **access)
    with pytest.raises(ConfigError, match=r"^wire\.key: .* does not hold the key of"):
        coterie.train(config, quiet=True)
    assert not (tmp_path / "run").exists()
    credentials = server_credentials(access["wire.cert"], access["wire.key"])
    with pytest.raises(CoterieError, match=r"is wire\.key the key of wire\.cert\?$"):
        Server(f"127.0.0.1:{free_port()}", {}, token=TOKEN, credentials=credentials)


@pytest.mark.parametrize("there", ["token", "cert.pem", "key.pem", "actor.token"])
def test_keys_are_never_overwritten(tmp_path: Path, there: str):
    (tmp_path / there).write_text("mine")
    with pytest.raises(ConfigError, match="exists; name another folder"):
        make_keys(str(tmp_path), [])
    assert [p.name for p in tmp_path.iterdir()] == [there]
    assert (tmp_path / there).read_text() == "mine"


def test_keys_that_cannot_be_made_are_refused(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write"):
        make_keys(str(tmp_path / "file" / "keys"), [])
    with pytest.raises(ConfigError, match="münchen"):
        make_keys(str(tmp_path / "keys"), ["münchen"])
    for host in ("learner.example:8765", "https://learner.example", "[::1]", ""):
        with pytest.raises(ConfigError, match="is no name or address alone"):
            make_keys(str(tmp_path / "keys"), [host])


def test_a_missing_token_or_certificate_is_refused(tmp_path: Path):
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError, match="cannot read"):
            read_token(str(path))
    with pytest.raises(ConfigError, match=r"wire\.key: cannot read"):
        server_credentials(str(tmp_path / "cert.pem"), str(tmp_path / "key.pem"))


@pytest.mark.parametrize("address", ["0.0.0.0:5000", "[::]:5000", "10.0.0.1:5000", "learner.example.org:5000"])
def test_a_server_for_other_machines_needs_tls_and_a_token(tmp_path: Path, address: str):
    _, cert, key, *_ = make_keys(str(tmp_path), [])
    credentials = server_credentials(str(cert), str(key))
    for token, tls in (("", None), (TOKEN, None), ("", credentials)):
        with pytest.raises(ConfigError, match=r"^wire\.bind: .* needs TLS and a token$"):
            Server(address, {"Infer": EchoService()}, token=token, credentials=tls)
