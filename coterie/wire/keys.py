"""The files that `coterie keys` makes."""

from __future__ import annotations

import datetime
import ipaddress
import os
import secrets
from pathlib import Path

from coterie.errors import ConfigError, reason_of
from coterie.extras import needs
from coterie.wire.tokens import KINDS, scoped

TOKEN, CERT, KEY = "token", "cert.pem", "key.pem"
_DAYS = 825  # that a certificate is valid


def token_file(kind: str) -> str:
    return f"{kind}.token"


def make_keys(folder: str, hosts: list[str]) -> list[Path]:
    """Write the run's token, a self-signed certificate for these host names and addresses, its key, and the tokens for
    the clients of each kind.
    """
    with needs("keys", "keys"):
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID

    out = Path(folder)
    paths = [out / name for name in (TOKEN, CERT, KEY, *map(token_file, KINDS))]
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
            if not host or {*host} & {*":/[] "}:
                raise ConfigError(f"keys: {host!r} is no name or address alone, without port or brackets") from None
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
        token = secrets.token_urlsafe(32)
        tokens = [f"{one}\n".encode() for one in (token, *(scoped(token, kind) for kind in KINDS))]
        contents = (tokens[0], cert.public_bytes(serialization.Encoding.PEM), secret, *tokens[1:])
        for path, content in zip(paths, contents, strict=True):
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(content)
    except OSError as error:
        raise ConfigError(f"keys: cannot write into {out}: {reason_of(error)}") from None
    return paths
