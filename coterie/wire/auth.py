"""Access to servers: local addresses, tokens, TLS, and the files that `coterie keys` makes."""

from __future__ import annotations

import datetime
import hmac
import ipaddress
import os
import secrets
from operator import attrgetter
from pathlib import Path

from coterie.config import Config, Refusal
from coterie.extras import needs
from coterie.types import ConfigError, reason_of

_DAYS = 825  # that a certificate is valid
TOKEN, CERT, KEY = "token", "cert.pem", "key.pem"  # files of `coterie keys`


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


def join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def read_token(path: str) -> str:
    """The token in a file that only its owner may read. Raises `ConfigError`."""
    try:
        token = Path(path).read_text().strip()
        open_to_others = os.stat(path).st_mode & 0o077
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"wire.token_file: cannot read {path}: {reason_of(error)}") from None
    if len(token) < 16 or not token.isascii() or not token.isprintable():
        raise ConfigError(f"wire.token_file: {path} must hold a token of at least 16 printable ASCII characters")
    if open_to_others:
        raise ConfigError(f"wire.token_file: others may read {path}; use chmod 600")
    return token


def is_token(given: str, token: str) -> bool:
    """Compare in constant time. `given` may have any characters."""
    return hmac.compare_digest(given.encode(errors="surrogatepass"), token.encode())


def read_pem(path: str, what: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{what}: cannot read {path}: {reason_of(error)}") from None


def make_keys(folder: str, hosts: list[str]) -> list[Path]:
    """Write a token, and a key with a self-signed certificate for these host names and addresses."""
    with needs("keys", "keys"):
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID

    out = Path(folder)
    paths = [out / name for name in (TOKEN, CERT, KEY)]
    for path in paths:
        if path.exists():
            raise ConfigError(f"keys: {path} exists; name another folder")
    key = ec.generate_private_key(ec.SECP256R1())
    names: list[x509.GeneralName] = []
    for host in dict.fromkeys([*hosts, "localhost", "127.0.0.1"]):
        if not host.isascii():
            raise ConfigError(f"keys: {host!r} is not ASCII; give its DNS form (xn--...)")
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError:
            names.append(x509.DNSName(host))
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "coterie")])
    now = datetime.datetime.now(datetime.UTC)
    cert = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=_DAYS))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    try:
        out.mkdir(parents=True, exist_ok=True)
        contents = (secrets.token_urlsafe(32).encode() + b"\n", cert.public_bytes(serialization.Encoding.PEM), secret)
        for path, content in zip(paths, contents, strict=True):
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(content)
    except OSError as error:
        raise ConfigError(f"keys: cannot write into {out}: {reason_of(error)}") from None
    return paths
