"""Tokens: what each admits to, the handshake that proves them, and the token of this machine's own servers.

Neither end sends its token. Both prove that they know it, the server first, so that a client gives nothing to a server
that it does not know. `coterie keys` makes a token for the run, and from it one for each kind of client.
"""

from __future__ import annotations

import hmac
import os
import re
import socket
from contextlib import suppress

from coterie.errors import ConfigError, reason_of
from coterie.wire.auth import is_local, own_secret, read_token, split

SCOPES = {"Infer": "envs", "PushRollouts": "actor", "PullParameters": "actor", "Gossip": "peer"}  # by RPC
NONCE_BYTES = 32
KINDS = {"envs": "env hosts", "actor": "actors", "peer": "runs that gossip"}  # of clients
_SCOPED = re.compile(r"coterie-(envs|actor|peer)-[0-9a-f]{64}")


def scoped(token: str, scope: str) -> str:
    """The token for the clients of one kind: derived from the run's, or `token` itself if it is theirs already."""
    if (found := _SCOPED.fullmatch(token)) is None:
        return f"coterie-{scope}-{hmac.new(token.encode(), scope.encode(), 'sha256').hexdigest()}"
    if found[1] != scope:
        raise ConfigError(f"wire.token_file: this token is for {KINDS[found[1]]}, not for {KINDS[scope]}")
    return token


def proof(token: str, side: str, client: bytes, server: bytes) -> bytes:
    """What only one that knows `token` can send in answer to the nonces of both ends. `side`: client or server."""
    return hmac.digest(token.encode(), side.encode() + client + server, "sha256")


def own_token(address: str) -> str:
    """The token for HOST:PORT on this machine, from a file that only this user may read, made at its first use. Each
    port has another: a process in the place of a server cannot pass the handshake on to a second one.
    """
    try:
        path = own_secret(f"token-{socket.gethostname()}")  # machines may share home folders
    except (OSError, RuntimeError) as error:
        where = getattr(error, "filename", None) or "into the home folder"
        raise ConfigError(f"wire.token_file: give one: cannot write {where}: {reason_of(error)}") from None
    return f"{read_token(str(path))}:{split(address)[1]}"


def known_token(address: str, token: str) -> str:
    """The token with which a client verifies the server at `address`: `token` if there is one. At a loopback address it
    has one, and a unix socket of the same user needs none. Raises `ConfigError`.
    """
    if token:
        return token
    if not address.startswith("unix:"):
        if not is_local(address):
            raise ConfigError(f"wire.token_file: {address} is on another machine: give the run's token")
        return own_token(address)
    with suppress(FileNotFoundError):
        if os.stat(address.removeprefix("unix:")).st_uid not in (os.geteuid(), 0):
            raise ConfigError(f"wire.token_file: {address} is another user's: give the run's token")
    return ""
