"""A TCP proxy in a thread: delays, throttles and cuts what goes through it."""

from __future__ import annotations

import random
import socket
import threading
import time
from contextlib import suppress
from multiprocessing.connection import wait  # select() fails above 1,023 descriptors

_CHUNK = 1 << 14


class Proxy:
    """Listens at `port` and passes everything on to `target`; its settings may change at any time."""

    def __init__(self, target: int) -> None:
        self.target, self.rng = target, random.Random(0)
        self.delayed = self.delay = 0.0  # share of the chunks that come late, and by how many seconds
        self.rate = 0.0  # bytes per second of each direction of a connection; 0: no limit
        self.deaf = False  # who connects is turned away
        self.frozen = threading.Event()  # while it is set nothing goes through, not even an end
        self.connections = self.cuts = self.late = self.bytes = 0
        self._open: list[tuple[socket.socket, socket.socket]] = []
        self._closed = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(0.1)
        self.port: int = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self.cut()
        for thread in self._threads:
            thread.join(5.0)
        self._listener.close()

    def cut(self, after: int = 0) -> int:
        """Cut every connection, `after` so many more bytes in either direction; returns how many there were."""
        end, start = time.monotonic() + 5.0, self.bytes
        while after and self.bytes < start + after and time.monotonic() < end:
            time.sleep(0.001)
        pairs, self._open = self._open, []
        for one in (one for pair in pairs for one in pair):
            with suppress(OSError):
                # Reset, not closed: what is on its way is lost in the middle of a frame.
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        self.cuts += len(pairs)
        return len(pairs)

    def _accept(self) -> None:
        while not self._closed.is_set():
            with suppress(OSError):
                client, _ = self._listener.accept()
                if self.deaf:
                    client.close()
                    continue
                try:
                    server = socket.create_connection(("127.0.0.1", self.target), 2.0)
                except OSError:
                    client.close()
                    continue
                self.connections += 1
                for one in (client, server):
                    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    one.settimeout(5.0)
                self._open = [*self._open, (client, server)]
                for pair in ((client, server), (server, client)):
                    self._threads.append(threading.Thread(target=self._pass_on, args=pair, daemon=True))
                    self._threads[-1].start()

    def _pass_on(self, source: socket.socket, to: socket.socket) -> None:
        with suppress(OSError, ValueError):
            while not self._closed.is_set():
                if self.frozen.is_set() or not wait([source], 0.1):
                    time.sleep(0.01 * self.frozen.is_set())
                    continue
                data = source.recv(_CHUNK if not self.rate else max(1, min(_CHUNK, int(self.rate / 20))))
                if not data:
                    break
                if self.rng.random() < self.delayed:
                    self.late += 1
                    self._closed.wait(self.delay)
                if self.rate:
                    self._closed.wait(len(data) / self.rate)
                # Halves, so that a cut falls into the middle of a frame.
                half = len(data) // 2
                for part in (data[:half], data[half:]):
                    to.sendall(part)
                    self.bytes += len(part)
        for one in (source, to):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        source.close()
        self._open = [pair for pair in self._open if source not in pair]
