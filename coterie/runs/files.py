"""Files of a run folder: replaced whole or not at all, and by one process at a time."""

from __future__ import annotations

import fcntl
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from coterie.types import ConfigError, CoterieError, reason_of

_LOCK = ".lock"


@contextmanager
def writing(folder: Path, option: str = "") -> Iterator[None]:
    """Turn an OSError (a full disk, a missing folder) into one line, which begins with the `option` at fault."""
    try:
        yield
    except OSError as error:
        raise CoterieError(f"{option}cannot write to {folder}: {reason_of(error)}") from None


def write_whole(path: Path, data: str | bytes, durable: bool = True) -> None:
    """Replace a file atomically. `durable`: a crash of the machine, too, leaves the old file or the new one."""
    draft = path.with_name(f".{path.name}")
    try:
        with draft.open("wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        draft.rename(path)
        if durable:
            sync(path.parent)
    finally:
        draft.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Write a file or a folder's names through to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class Journal:
    """A file to which lines are added. What the disk refuses is kept, and written before the next line."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        self._left = bytearray()

    def write(self, text: str) -> None:
        """Raises `OSError` where it is not written yet."""
        self._left += text.encode()
        while self._left:  # the kernel may take a part of a line
            del self._left[: os.write(self._fd, self._left)]

    def close(self) -> None:
        try:
            self.write("")
        finally:
            os.close(self._fd)


def refuse_run(folder: Path) -> None:
    """Raise a one-line error if the folder holds a run."""
    try:
        if (folder / "config.json").exists():
            raise ConfigError(
                f"out: {folder} already holds a run; go on with `coterie resume {folder}` or name another"
            )
    except OSError as error:
        raise CoterieError(f"out: cannot read {folder}: {reason_of(error)}") from None


@contextmanager
def sole_writer(folder: Path, new: bool = False) -> Iterator[None]:
    """Hold the lock of a run folder. The kernel frees it with this process, whatever ends that. A file system without
    locks has none, which is said on stderr: a file in its place could as well be one that a crash has left.

    Raises `ConfigError` with the pid and host of another process that holds it, or where another one has made a run in
    a folder that is to be `new`.
    """
    with writing(folder, "out: "):
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / _LOCK).open("a+")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.2)  # the other one may have only just taken it, and not yet written its name
            lock.seek(0)
            raise ConfigError(f"{folder} is being trained by {lock.read().strip() or 'another process'}") from None
        except OSError as error:
            line = f"{folder} has no lock ({reason_of(error)}): make sure that no other process trains this run"
            print(f"coterie: {line}", file=sys.stderr, flush=True)
        with suppress(OSError):  # a full disk; the text is only a hint
            lock.truncate(0)
            lock.write(f"pid {os.getpid()} on {socket.gethostname()}\n")
            lock.flush()
        if new:
            refuse_run(folder)
        yield
