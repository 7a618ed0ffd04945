"""Closes connections that send nothing. Gloo and the TCP store take any number, and wait for them without a limit: a
process that opened as many as this one may have descriptors would end it. (Linux; elsewhere none is closed.)
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from contextlib import suppress
from typing import Any

import psutil

from coterie.parallel.clock import awake
from coterie.wire.auth import received


class SilentConnections:
    """In a thread: shuts the connections that have sent no byte within `seconds`, to the ports that this process opens
    from now on. The machines of a group, and the clients of its store, send something at once.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds, self.closed = seconds, 0
        self._since: dict[tuple[object, object], float] = {}  # when a silent one was first seen, by its addresses
        self._others = {port for one in _found() if (port := _listening(one))}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="coterie-silent-connections", daemon=True)
        if sys.platform == "linux":
            self._thread.start()

    def _work(self) -> None:
        while not self._over.wait(self.seconds / 10):
            with suppress(psutil.Error, OSError):  # no descriptor may be left for a moment
                self._check()

    def _check(self) -> None:
        """Close those that have been silent for too long."""
        found, now, since = _found(), awake(), {}
        ports = {port for one in found if (port := _listening(one))} - self._others
        for one in found:
            if one.status == psutil.CONN_ESTABLISHED and one.laddr.port in ports:
                key = one.laddr, one.raddr
                begin = self._since.get(key, now)
                if self._is_silent(one, now - begin >= self.seconds):
                    since[key] = begin
        self._since = since

    def _is_silent(self, one: Any, close: bool) -> bool:
        """Whether this connection has sent nothing; `close`: then it is shut."""
        with suppress(OSError), socket.socket(one.family, one.type, 0, os.dup(one.fd)) as connection:
            if connection.getpeername()[1] != one.raddr.port:  # the descriptor is another one's by now
                return False
            if received(connection) == 0:
                if close:
                    connection.shutdown(socket.SHUT_RDWR)  # its owner finds it closed
                    self.closed += 1
                return True
        return False

    def close(self) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(self.seconds)


def _found() -> list[Any]:
    """This process's connections, and the ports where it listens."""
    return list(psutil.Process().net_connections("tcp"))


def _listening(one: Any) -> int:
    """Its port, if it takes connections, else 0."""
    return int(one.laddr.port) if one.status == psutil.CONN_LISTEN else 0
