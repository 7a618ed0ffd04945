"""The flight record: everything about a learner's life that is left to chance, so that it can be executed again.

    RUN/flight/learner_0.life_0

Env seeds, sampled actions and the order of additions are fixed by a run's config. What is not is the schedule: which
rollouts made a batch, which weights chose their actions, whose message was averaged when. The file begins with the
line `coterie flight 2`. Blocks follow: length and CRC-32 (4 bytes each, little-endian), then lines of JSON, compressed
with zlib. The first line is the header, the others are events (docs/reference/flight.md). The lines of the last second
are in a second file, `.tail`, behind the length of the first one to which they belong: a killed process leaves them.
"""

from __future__ import annotations

import errno
import json
import os
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from io import FileIO
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from coterie.errors import ConfigError, reason_of
from coterie.flight.life import RecordedLife

MAGIC = b"coterie flight 2\n"
EVERY_S = 1.0  # between two blocks
_FLUSH_S, _FIRST_S = 1.0, 5.0  # that `flush` waits for a disk that does not answer, the first time longer
_HEAD = struct.Struct("<II")
_MOST_LINES = 200_000  # that wait for the disk
_MOST_BYTES = 1 << 28  # of the lines of a block
_line = json.JSONEncoder(separators=(",", ":")).encode  # `dumps` with separators makes an encoder at each call


def path_of(folder: Path, rank: int, life_number: int, worker: int | None = None) -> Path:
    """The path of a learner's record, or of a child process's."""
    process = f"learner_{rank}" if worker is None else f"worker_{rank}_{worker}"
    return folder / "flight" / f"{process}.life_{life_number}"


def _tail(path: Path) -> Path:
    return path.with_name(f"{path.name}.tail")


class FlightRecorder:
    """Writes the record of one life in a thread, so that a disk that does not answer delays nothing. One that refuses a
    block ends the record, and not the run: `failed` then has the reason. `header`: None until it is whole.
    """

    def __init__(self, path: Path, header: Callable[[], dict[str, Any] | None]) -> None:
        self.path, self.failed = path, ""
        self._header, self._lines = header, deque[str]()
        self._open = list[str]()  # written to the tail only
        # Wakes the thread, cheaper at each rollout than an Event. An Event put here is set once all before is written.
        self._news, self._over = SimpleQueue[threading.Event | None](), False
        self._thread = threading.Thread(target=self._work, name="coterie-flight", daemon=True)
        self._starting, self._flushed = threading.Lock(), threading.Event()
        self._flushed.set()

    def note(self, *event: Any) -> None:
        """Add an event. Any thread may call this. Those of inference are many, and are written with others."""
        if self.failed or self._over:
            return
        self._lines.append(_line(event))
        if event[0] != "infer":
            self._news.put(None)
            if self._thread.ident is None:
                self._start()
        if len(self._lines) > _MOST_LINES:
            self.failed = "the disk does not answer"

    def _start(self) -> None:
        with self._starting:
            if self._thread.ident is None and self._header() is not None:
                self._thread.start()
                self.flush(_FIRST_S)  # a process killed at once would leave no record

    def flush(self, seconds: float = _FLUSH_S) -> None:
        """Wait until what this thread noted stays even if the process is killed. While the disk does not answer, one
        call waits `seconds`, and the others do not.
        """
        if self._thread.is_alive() and not self.failed and self._flushed.is_set():
            self._flushed = flushed = threading.Event()
            self._news.put(flushed)
            flushed.wait(seconds)

    def close(self, seconds: float = 10.0) -> None:
        """Write what was noted as a last block."""
        self._over = True
        self._news.put(None)
        if self._thread.ident is not None:
            self._thread.join(seconds)

    def _work(self) -> None:
        try:
            self.path.parent.mkdir(exist_ok=True)
            with self.path.open("wb", buffering=0) as file, _tail(self.path).open("wb", buffering=0) as tail:
                _write(file, MAGIC)
                self._open.append(json.dumps(self._header()))
                due = 0.0
                while not self.failed:
                    asked = [self._news.get()]
                    while not self._news.empty():
                        asked.append(self._news.get())
                    over, lines = self._over, [self._lines.popleft() for _ in range(len(self._lines))]
                    self._open += lines
                    if over or time.monotonic() >= due:
                        self._write_block(file, tail)
                        due = time.monotonic() + EVERY_S
                    else:
                        _write(tail, "".join(f"{line}\n" for line in lines).encode())
                    for flushed in filter(None, asked):
                        flushed.set()
                    if over:
                        return
        except OSError as error:
            self.failed = reason_of(error)
            self._flushed.set()

    def _write_block(self, file: FileIO, tail: FileIO) -> None:
        if not self._open:
            return
        body = zlib.compress("\n".join(self._open).encode(), 6)
        _write(file, _HEAD.pack(len(body), zlib.crc32(body)) + body)
        tail.truncate(0)
        tail.seek(0)
        _write(tail, b"%d\n" % file.tell())
        self._open.clear()


def _write(file: FileIO, data: bytes) -> None:
    """Raise an `OSError` where less is written, as on a disk that is nearly full."""
    if file.write(data) != len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def begun(path: Path) -> bool:
    """Whether there is a record with a header. A process that is killed at once may leave only a file's beginning."""
    return path.exists() and path.stat().st_size > len(MAGIC)


def read_life(path: Path) -> RecordedLife:
    """Read a record up to its end, or to the first block that is damaged. Raises `ConfigError` without a header."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {reason_of(error)}") from None
    if not data.startswith(MAGIC):
        raise ConfigError(f"{path} is not a flight record of this version")
    lines, at, damaged = list[Any](), len(MAGIC), False
    while at + _HEAD.size <= len(data):
        size, crc = _HEAD.unpack_from(data, at)
        body = data[at + _HEAD.size : at + _HEAD.size + size]
        if len(body) < size:  # its process was killed meanwhile
            break
        try:
            lines += _block(body, crc)
        except (zlib.error, ValueError):
            damaged = True
            break
        at += _HEAD.size + size
    start, more = _read_tail(path)
    damaged |= start > at
    try:
        lines += map(json.loads, more if start == at else ())
    except ValueError:
        damaged = True
    if not lines:
        raise ConfigError(f"{path} ends before its header")
    damage = f"the record is damaged from byte {at:,} of {len(data):,} on" if damaged else ""
    return RecordedLife(path, lines[0], lines[1:], damage)


def _block(body: bytes, crc: int) -> list[Any]:
    """The lines of a block. Raises `zlib.error` or `ValueError` if it is damaged."""
    unpacked = zlib.decompressobj()
    if zlib.crc32(body) != crc:
        raise ValueError
    text = unpacked.decompress(body, _MOST_BYTES)
    if not unpacked.eof:
        raise ValueError
    return [json.loads(line) for line in text.decode().split("\n")]


def _read_tail(path: Path) -> tuple[int, list[bytes]]:
    """The length that a record had when its tail was begun, and the tail's lines; 0 and none where it has none."""
    with suppress(OSError, ValueError):  # empty: the process was killed meanwhile, or the disk was full
        length, *more = _tail(path).read_bytes().split(b"\n")[:-1]
        return int(length), more
    return 0, []


def forget_from(folder: Path, number: int) -> None:
    """Remove the records of life `number` and later ones: what they trained is not in the checkpoint that the run goes
    on from. A life's number is the resumes + 1000 x the restarts before it.
    """
    for path in (folder / "flight").glob("*.life_*"):
        life = path.name.removesuffix(".tail").rpartition("_")[2]
        if life.isdecimal() and int(life) % 1000 >= number:
            with suppress(OSError):  # a disk that refuses this will refuse the new record, too
                path.unlink()


def lives(folder: Path, rank: int) -> list[RecordedLife]:
    """A learner's lives in a run folder, the first one first."""
    found = (folder / "flight").glob(f"learner_{rank}.life_*")
    each = [read_life(path) for path in found if path.suffix != ".tail" and begun(path)]
    return sorted(each, key=lambda life: float(life.header["began"]))
