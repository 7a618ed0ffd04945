"""The connection to a server of a run."""

from __future__ import annotations

import grpc

from coterie.errors import ConfigError
from coterie.wire.auth import is_local, read_pem

MOST_BYTES = 1 << 30  # of a frame that the server may declare


def open_channel(address: str, cert: str = "") -> grpc.Channel:
    """A connection to unix:PATH or HOST:PORT; `cert`: path of the certificate (PEM) that the server must have."""
    if not cert and not is_local(address):
        raise ConfigError(f"wire.cert: {address} is on another machine, so it needs TLS: give its certificate")
    options = [
        ("grpc.max_receive_message_length", MOST_BYTES),
        ("grpc.max_send_message_length", -1),
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.ping_timeout_ms", 10_000),  # gRPC takes the larger of the two, by default a minute
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 10_000),  # despite its name: time-out of one attempt to connect, with TLS
        ("grpc.max_reconnect_backoff_ms", 1_000),
        ("grpc.use_local_subchannel_pool", 1),  # share no connection with other clients in this process
    ]
    if cert:
        return grpc.secure_channel(address, grpc.ssl_channel_credentials(read_pem(cert, "wire.cert")), options)
    return grpc.insecure_channel(address, options)
