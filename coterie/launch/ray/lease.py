"""One command at a time works in a storage: two would mix their checkpoints.

A local path is locked like a run folder. A URL has no locks, so the command keeps a file there and writes it again and
again. A file that no longer changes is that of a command that is gone; the clocks of two machines are never compared.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs

from coterie.errors import ConfigError, CoterieError, reason_of
from coterie.launch.ray.mirror import LEASE
from coterie.parallel.clock import awake
from coterie.runs.files import sole_writer

_BEAT_S = 10.0  # between writes
_SETTLE_S = 2.0  # before it is read again, where two commands may have begun at once
_GONE_S = 90.0  # without a change: its command is gone, and its nodes have noticed (node.py, `_SILENT_S`)
_ENDED = "a command that has ended"  # and removed its file

Check = Callable[[], None]


class LeaseLost(CoterieError):
    """Another command works in the storage now."""


@contextmanager
def lease(storage: str, doing: Callable[[str], None]) -> Iterator[Check]:
    """Hold a storage. `doing` receives what this waits for: `_GONE_S`, where a command was killed there. Yields a
    function that raises `LeaseLost` once another command has taken the storage.

    Raises `ConfigError` with the pid and host of another command that works in it.
    """
    if "://" not in storage:
        try:
            lock = ExitStack()
            lock.enter_context(sole_writer(Path(storage)))
        except ConfigError as error:
            raise ConfigError(f"ray.storage: {str(error).removeprefix('out: ')}") from None
        with lock:
            yield lambda: None
        return
    held = _Lease(storage)
    try:
        held.take(doing)
    except CoterieError:
        raise
    except Exception as error:  # every file system of fsspec's has its own
        raise CoterieError(f"ray.storage: cannot use {storage}: {reason_of(error)}") from None
    try:
        yield held.check
    finally:
        held.close()


class _Lease:
    def __init__(self, storage: str) -> None:
        self._storage = storage
        self._fs, root = url_to_fs(storage)
        self._root, self._path = root, f"{root}/{LEASE}"
        self._mine = {"id": uuid.uuid4().hex, "by": f"pid {os.getpid()} on {socket.gethostname()}"}
        self._beats, self._lost = 0, ""  # the command that has taken it
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="coterie-lease", daemon=True)

    def take(self, doing: Callable[[str], None]) -> None:
        first, end = self._read(), awake() + _GONE_S
        if first:
            doing(f"waiting {_GONE_S:.0f} s, to see whether {first['by']} still trains {self._storage}")
        while (found := self._read()) and awake() < end:
            if found != first:
                raise ConfigError(f"ray.storage: {self._storage} is being trained by {found['by']}")
            self._over.wait(min(1.0, _BEAT_S))
        self._write()
        self._over.wait(_SETTLE_S)
        if not self._is_mine(found := self._read()):
            other = found.get("by", _ENDED)
            raise ConfigError(f"ray.storage: {self._storage} is being trained by {other}")
        self._thread.start()

    def check(self) -> None:
        if self._lost:
            raise LeaseLost(f"ray.storage: {self._storage} was taken by {self._lost}, which goes on with this run")

    def close(self) -> None:
        self._over.set()
        self._thread.join(_BEAT_S)
        with suppress(Exception):
            if self._is_mine(self._read()):
                self._fs.rm(self._path)

    def _renew(self) -> None:
        while not self._over.wait(_BEAT_S):
            with suppress(Exception):  # the storage may be out of reach for a while
                found = self._read()
                if not self._is_mine(found):
                    self._lost = found.get("by", _ENDED)
                    return
                self._write()

    def _is_mine(self, found: dict[str, Any]) -> bool:
        return found.get("id") == self._mine["id"]

    def _read(self) -> dict[str, Any]:
        """The lease that the storage holds; empty if it has none."""
        self._fs.invalidate_cache()
        try:
            found: dict[str, Any] = json.loads(self._fs.cat_file(self._path))
        except FileNotFoundError:
            return {}
        except ValueError:  # cut short
            return {"by": "another command"}
        return found

    def _write(self) -> None:
        self._beats += 1
        self._fs.makedirs(self._root, exist_ok=True)
        self._fs.pipe_file(self._path, json.dumps({**self._mine, "beats": self._beats}).encode())
