"""Access to servers: addresses, and the files of tokens and TLS."""

from __future__ import annotations

import errno
import ipaddress
import os
import secrets
import socket
import ssl
import sys
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from tempfile import NamedTemporaryFile

from coterie.config import Config, Refusal
from coterie.errors import ConfigError, reason_of


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


def both_ends(section: str) -> Refusal:
    """Refuses a run that would both listen for others and connect to one."""
    bind, connect = attrgetter(f"{section}.bind"), attrgetter(f"{section}.connect")
    reason = f"cannot be combined with {section}.bind: a run either listens or connects"
    return Refusal(lambda c, s: bool(bind(c) and connect(c)), f"{section}.connect", reason)


def split(address: str) -> tuple[str, int]:
    """Host and port of HOST:PORT. An IPv6 host, and no other, is in brackets."""
    host, _, port = address.rpartition(":")
    bare = host[1:-1] if host[:1] + host[-1:] == "[]" else host
    with suppress(UnicodeError):  # a part of the name is empty or too long
        named = bare.encode("idna") and (":" in bare) == (bare != host)
        if named and port.isdecimal() and 0 < int(port) < 65536:
            return bare, int(port)
    raise ConfigError(f"address: {address!r} is not HOST:PORT")


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
    try:
        if address.startswith("unix:"):
            _check_socket(Path(address.removeprefix("unix:")))
        else:
            found = socket.getaddrinfo(*split(address), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            socket.create_server(found[4][:2], family=found[0]).close()
    except OSError as error:
        reason = reason_of(error).partition(" (while ")[0]  # `create_server` adds the address
        raise ConfigError(f"{field}: cannot listen at {address}: {reason}") from None


def _check_socket(path: Path) -> None:
    """Raise an `OSError` if gRPC cannot make a socket here, or would replace that of a running server."""
    if not os.access(f"{path.parent}/", os.W_OK):
        raise OSError(f"{path.parent} is not a writable folder")
    if os.path.lexists(path) and not path.is_socket():
        raise OSError("the file there is not a socket")
    with socket.socket(socket.AF_UNIX) as client:
        client.setblocking(False)
        if client.connect_ex(str(path)) not in (errno.ENOENT, errno.ECONNREFUSED):  # refused: its server is gone
            raise OSError(os.strerror(errno.EADDRINUSE))


def received(connection: socket.socket) -> int | None:
    """How many bytes came in by a TCP connection, as Linux counts them; None where the system does not say."""
    with suppress(AttributeError, OSError):
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
        return int.from_bytes(info[128:], sys.byteorder) if len(info) == 136 else None
    return None


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
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=data.decode("ascii", "ignore"))
    except (ssl.SSLError, ValueError):
        raise ConfigError(f"{what}: {path} holds no certificate") from None
    return data


def check_pair(cert: str, key: str) -> None:
    """Raise a `ConfigError` if the certificate has another key, or one of the two files holds none."""
    for path, what in ((cert, "wire.cert"), (key, "wire.key")):
        read_pem(path, what)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_ciphers("ALL:@SECLEVEL=0")  # gRPC takes short keys
    try:
        context.load_cert_chain(cert, key, "")  # without a password it would ask for one
    except ssl.SSLError:
        raise ConfigError(f"wire.key: {key} does not hold the key of {cert}, without a password") from None
