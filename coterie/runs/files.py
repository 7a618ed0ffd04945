"""Files of a run folder: replaced whole or not at all, and by one process at a time."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from shlex import quote
from typing import TypeVar

from coterie.errors import ConfigError, CoterieError, reason_of
from coterie.parallel.clock import awake

T = TypeVar("T")
_LOCK = ".lock"
ANSWER_S = 10.0  # for a few small files
_given_up: list[threading.Thread] = []  # that wait for a disk; changed under its lock
_given_up_lock = threading.Lock()


@contextmanager
def writing(folder: Path, option: str = "") -> Iterator[None]:
    """Turn an OSError (a full disk, a missing folder) into one line, which begins with the `option` at fault."""
    try:
        yield
    except OSError as error:
        kind = ConfigError if option else CoterieError
        raise kind(f"{option}cannot write to {folder}: {reason_of(error)}") from None


def answered(call: Callable[[], T], seconds: float = ANSWER_S) -> T:
    """What `call` returns. A disk may never answer, such as a network's whose server is gone: then raises `OSError`
    after `seconds`, and at once as long as that call waits on in its thread.
    """
    late = TimeoutError(errno.ETIMEDOUT, "the disk does not answer")
    if _waiting():
        raise late
    future = Future[T]()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=work, name="coterie-disk", daemon=True)
    thread.start()
    end = awake() + seconds
    while not wait([future], 0.5).done:
        if awake() > end:
            with _given_up_lock:
                _given_up.append(thread)
            raise late
    return future.result()


def _waiting() -> list[threading.Thread]:
    with _given_up_lock:
        _given_up[:] = [thread for thread in _given_up if thread.is_alive()]
        return list(_given_up)


def read(path: Path, call: Callable[[], T], seconds: float = ANSWER_S) -> T:
    """What `call` reads of `path`, or one line where the disk does not answer in `seconds`, earlier calls included."""
    end = awake() + seconds
    for thread in _waiting():
        thread.join(max(0.0, end - awake()))
    try:
        return answered(call, max(0.0, end - awake()))
    except OSError as error:
        raise CoterieError(f"{path} cannot be read: {reason_of(error)}") from None


def read_json(path: Path, kind: type[T]) -> T | None:
    """The dict or list in a JSON file; None if the file cannot be read or holds something else."""
    with suppress(OSError, ValueError):
        found = json.loads(path.read_text())
        return found if isinstance(found, kind) else None
    return None


def write_whole(path: Path, data: str | bytes, durable: bool = True) -> None:
    """Replace a file atomically. `durable`: a crash of the machine, too, leaves the old file or the new one."""
    if path.exists() and not path.is_file():  # /dev/stdout, for example
        path.write_bytes(data.encode() if isinstance(data, str) else data)
        return
    path = path.resolve()  # a link stays one
    draft = unlinked(path.with_name(f".{path.name}"))
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


def save(path: Path, data: str | bytes, option: str, durable: bool = False) -> Path:
    """Write the file that an `option` asks for, and the folders above it. Raises `ConfigError` with the reason."""
    with writing(path, f"{option}: "):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, data, durable)
    return path


def unlinked(path: Path) -> Path:
    """A file that is about to be written into a run's folder, where it must not be a link: that may lead anywhere."""
    if path.is_symlink():
        path.unlink()
    return path


def discard(folder: Path, *names: str) -> None:
    """Remove files of a folder, those that can be."""
    for name in names:
        with suppress(OSError):
            (folder / name).unlink()


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
        answered(self._flush)

    def close(self) -> None:
        answered(self._close)

    def _flush(self) -> None:
        while self._left:  # the kernel may take a part of a line
            del self._left[: os.write(self._fd, bytes(self._left))]

    def _close(self) -> None:
        try:
            self._flush()
        finally:
            os.close(self._fd)


def refuse_run(folder: Path) -> None:
    """Raise a one-line error if the folder holds a run."""
    try:
        if (folder / "config.json").exists():
            goes_on = any((folder / "checkpoints").glob("step_*"))
            does = f"go on with `coterie resume {quote(str(folder))}` or" if goes_on else "without a checkpoint so far:"
            raise ConfigError(f"out: {folder} already holds a run{';' if goes_on else ','} {does} name another")
    except OSError as error:
        raise CoterieError(f"out: cannot read {folder}: {reason_of(error)}") from None


def was_killed(folder: Path) -> bool:
    """Whether the process that trained a run is gone, though it left no summary. False if it was another machine's."""
    with suppress(OSError, ValueError):
        pid, _, host = (folder / _LOCK).read_text().removeprefix("pid ").strip().partition(" on ")
        return host == socket.gethostname() and not Path(f"/proc/{int(pid)}").exists() and Path("/proc/self").exists()
    return False


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
