"""Free ports on loopback."""

from __future__ import annotations

import socket
from contextlib import ExitStack, suppress


def free_ports(count: int) -> int:
    """The first of `count` consecutive free ports."""
    for _ in range(100):
        with ExitStack() as held, suppress(OSError):
            first: int = held.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            for k in range(1, count):
                held.enter_context(socket.create_server(("127.0.0.1", first + k)))
            return first
    raise AssertionError(f"no {count} consecutive free ports")


def free_port() -> int:
    return free_ports(1)
