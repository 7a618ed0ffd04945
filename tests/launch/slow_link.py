"""A network link of this machine whose frames can be delayed, throttled and dropped: two TAP devices and a thread."""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import time
from collections import deque
from multiprocessing.connection import wait

_TUNSETIFF, _TAP, _NO_PI = 0x400454CA, 0x0002, 0x1000
_ROOM = 1 << 18  # bytes on their way in each direction; what comes on top is dropped, as by a router


class SlowLink:
    """A link between the devices of these two names, which may be moved into network namespaces afterwards."""

    def __init__(self, one: str, other: str) -> None:
        self.delay, self.rate, self.down = 0.0, 0.0, False  # seconds; bytes/s, 0: any
        self.dropped = 0
        self._ends = [_tap(one), _tap(other)]
        self._queues: list[deque[tuple[float, bytes]]] = [deque(), deque()]  # from each end: when due, and the frame
        self._waiting, self._free = [0, 0], [0.0, 0.0]
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while not self._closed.is_set():
            now = time.monotonic()
            due = [queue[0][0] for queue in self._queues if queue]
            ready = wait(self._ends, min([0.1, *(max(0.0, x - now) for x in due)]))
            for k, end in enumerate(self._ends):
                if end in ready:
                    self._take(k, os.read(end, 1 << 16))
            now = time.monotonic()
            for k, queue in enumerate(self._queues):
                while queue and queue[0][0] <= now:
                    frame = queue.popleft()[1]
                    self._waiting[k] -= len(frame)
                    try:
                        os.write(self._ends[1 - k], frame)
                    except OSError:  # the device is not up (yet)
                        self.dropped += 1

    def _take(self, k: int, frame: bytes) -> None:
        if self.down or self._waiting[k] > _ROOM:
            self.dropped += 1
            return
        now = time.monotonic()
        self._free[k] = max(now, self._free[k]) + (len(frame) / self.rate if self.rate else 0.0)
        self._queues[k].append((self._free[k] + self.delay, frame))
        self._waiting[k] += len(frame)

    def close(self) -> None:
        """The devices are gone with it."""
        self._closed.set()
        self._thread.join(5.0)
        for end in self._ends:
            os.close(end)


def _tap(name: str) -> int:
    end = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH", name.encode(), _TAP | _NO_PI))
    return end
