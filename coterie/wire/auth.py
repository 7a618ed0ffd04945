"""Access to servers: addresses, and the files of tokens and TLS."""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from tempfile import NamedTemporaryFile

from coterie.config import Config, Refusal
from coterie.types import ConfigError, reason_of


def is_local(address: str) -> bool:
    """Whether an address is a unix socket or loopback, which other machines cannot reach."""
    if address.startswith("unix:"):
        return True
    host = split(address)[0]
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def without_keys(field: str) -> Refusal:
    """Refuses an address for other machines, in the config's `field`, before the run has a folder."""

    def applies(config: Config, spec: object) -> bool:
        address, wire = attrgetter(field)(config), config.wire
        return bool(address) and not is_local(address) and not (wire.token_file and wire.cert and wire.key)

    return Refusal(applies, field, "needs wire.token_file, wire.cert and wire.key: other machines can reach it")


def split(address: str) -> tuple[str, int]:
    """Host and port of HOST:PORT, with an IPv6 host in brackets."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"address: {address!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


def offset(address: str, by: int) -> str:
    """The address of learner `by`: PORT + `by`, or the socket PATH.`by`."""
    if address.startswith("unix:"):
        if address == "unix:":
            raise ConfigError("address: 'unix:' needs a path")
        return f"{address}.{by}" if by else address
    host, port = split(address)
    return join(host, port + by)


def check_free(address: str, field: str) -> None:
    """Raise a `ConfigError` about an option if nothing can listen at its address."""
    if address.startswith("unix:"):
        return
    with suppress(socket.gaierror):  # the server says so
        family, *_, place = socket.getaddrinfo(*split(address), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        try:
            socket.create_server(place[:2], family=family).close()
        except OSError as error:
            reason = os.strerror(error.errno or 0)
            raise ConfigError(f"{field}: cannot listen at {address}: {reason}") from None


def join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def own_secret(name: str) -> Path:
    """A file with a random token that only this user may read, made at its first use: `name` in the state folder,
    unless it is an absolute path. Raises `OSError`, or `RuntimeError` where there is no home folder.
    """
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    path = Path(state, "coterie", name)
    if not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with NamedTemporaryFile("w", dir=path.parent) as file:
            file.write(secrets.token_urlsafe(32))
            file.flush()
            os.fsync(file.fileno())
            with suppress(FileExistsError):  # another process was faster
                os.link(file.name, path)
    return path


def read_token(path: str) -> str:
    """The token in a file that only its owner may read. Raises `ConfigError`."""
    try:
        token = Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"wire.token_file: cannot read {path}: {reason_of(error)}") from None
    if len(token) < 16 or not token.isascii() or not token.isprintable():
        raise ConfigError(f"wire.token_file: {path} must hold a token of at least 16 printable ASCII characters")
    _check_private(path, "wire.token_file")
    return token


def _check_private(path: str, what: str) -> None:
    if os.stat(path).st_mode & 0o077:
        raise ConfigError(f"{what}: others may read {path}; use chmod 600")


def read_pem(path: str, what: str) -> bytes:
    """The bytes of a certificate, or of a key, which only its owner may read. Raises `ConfigError`."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{what}: cannot read {path}: {reason_of(error)}") from None
    if what == "wire.key":
        _check_private(path, what)
    return data
