"""Shared storage: the only way in which files travel between the machines of a run. It is `ray.storage`, or else the
run folder itself, on a file system that all machines mount.

A site writes to its machine's own disk and copies what changed to the storage. Only complete checkpoints are copied,
their manifests last, so that a machine that is lost at any moment leaves a folder that can be resumed.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from coterie.errors import CoterieError, reason_of
from coterie.parallel.clock import awake
from coterie.runs.trust import SIGNATURE

LEASE = "lease.json"  # of the command that works in a storage
OF_THE_RUN = ("config.json", SIGNATURE, "ray.txt", LEASE)  # files in the run folder that are not its first site's
_CHECKPOINTS, _MANIFEST, _BEST = "checkpoints", "manifest.json", "best.json"
_OLD = ".old"  # a checkpoint while another one takes its name
_LOCAL_S, _REMOTE_S = 1.0, 10.0  # between updates of a local path and of a URL
STORED_S = 300.0  # for the target to have all files at the end
ENDED_S = 60.0  # for an update to end


def site_url(storage: str, site: int) -> str:
    """The folder of a site of the run in `storage`; the first site has the run's folder."""
    return f"{storage}/sites/{site}" if site else storage


class Mirror:
    """Copies of a run folder: `target` is kept like `source`, except for the names in `skip`. Both are paths or URLs
    that fsspec accepts. A checkpoint that `source` no longer has is removed from `target`; other files stay.
    """

    def __init__(self, source: str | Path, target: str | Path, skip: Collection[str] = ()) -> None:
        self.target, self._skip = str(target), skip
        try:
            (self._from, self._source), (self._to, self._target) = map(url_to_fs, (str(source), str(target)))
        except (ImportError, ValueError) as error:
            raise CoterieError(f"ray.storage: cannot use {target}: {reason_of(error)}") from None
        self._local = isinstance(self._to, LocalFileSystem)
        self._known: dict[str, str] = {}  # a stamp of each file of `target`
        self._thread: threading.Thread | None = None
        self._begun, self._failures, self._reported, self._stopped = 0.0, deque[str](), False, False
        self.updated = 0.0  # when the last update that succeeded began, on the clock of `awake`

    def take_as_equal(self) -> None:
        """Take `target` to have all files of `source`, as after a copy in the other direction."""
        self._known = self._stamps()

    def has(self, name: str) -> bool:
        """Whether `target` has a file. Raises `CoterieError` if that cannot be told."""
        try:
            self._to.info(f"{self._target}/{name}")
        except FileNotFoundError:
            return False
        except Exception as error:  # every file system of fsspec's has its own
            raise CoterieError(f"ray.storage: cannot read {self.target}: {reason_of(error)}") from None
        return True

    def update(self) -> None:
        """Copy what changed since the last update."""
        begun = awake()
        try:
            found = self._stamps()
            if self._known and not found:
                raise FileNotFoundError(f"{self._source} is gone")  # unmounted, perhaps: `target` keeps what it has
            changed = [name for name, stamp in found.items() if self._known.get(name) != stamp]
            for checkpoint in _checkpoints(changed) & _checkpoints(self._known):
                self.remove(f"{checkpoint}/{_MANIFEST}")  # it is incomplete until its files are copied
            for name in sorted(changed, key=lambda x: (x.endswith(_BEST), x.endswith(_MANIFEST), x)):
                if self.copy(name):
                    self._known[name] = found[name]
            for checkpoint in _checkpoints(self._known) - _checkpoints(found):
                if not any(self._from.exists(f"{self._source}/{checkpoint}{end}") for end in ("", _OLD)):
                    self.remove(checkpoint)
            self._known = {name: stamp for name, stamp in self._known.items() if name in found}
        except Exception as error:  # every file system of fsspec's has its own
            raise CoterieError(f"ray.storage: cannot update {self.target}: {reason_of(error)}") from None
        self.updated, self._reported = begun, False

    def poll(self, now: bool = False) -> list[str]:
        """Update in the background when that is due, or `now`. Returns a line if it fails, once for each failure."""
        due = self._begun + (0 if now else _LOCAL_S if self._local else _REMOTE_S)
        if (self._thread is None or not self._thread.is_alive()) and awake() >= due:
            self._begun = awake()
            self._thread = threading.Thread(target=self._update_quietly, name="coterie-storage", daemon=True)
            self._thread.start()
        return [self._failures.popleft() for _ in range(len(self._failures))]

    def stop(self, timeout: float) -> None:
        """Wait for the update in the background, then allow none. From here on `source` may be removed without loss to
        `target`, even if the update takes longer than `timeout` seconds.
        """
        if self._thread is not None:
            self._thread.join(timeout)
        self._stopped = True

    def _update_quietly(self) -> None:
        try:
            self.update()
        except CoterieError as error:
            if not self._reported:
                self._failures.append(str(error))
            self._reported = True

    def copy(self, name: str) -> bool:
        """Copy one file; False if it no longer exists. A local one is replaced at once."""
        self._check()
        source, target = f"{self._source}/{name}", f"{self._target}/{name}"
        folder, _, last = target.rpartition("/")
        draft = f"{folder}/.{last}.new" if self._local else target
        self._to.makedirs(folder, exist_ok=True)
        try:
            with self._from.open(source, "rb") as read, self._to.open(draft, "wb") as write:
                shutil.copyfileobj(read, write, 1 << 20)
        except FileNotFoundError:
            if self._from.exists(source):
                raise
            return False
        if self._local:
            Path(draft).rename(target)
        return True

    def remove(self, name: str) -> None:
        """Remove a file or a folder of `target`, if it exists."""
        self._check()
        with suppress(FileNotFoundError):
            self._to.rm(f"{self._target}/{name}", recursive=True)

    def _check(self) -> None:
        if self._stopped:
            raise CoterieError("ended")

    def _stamps(self) -> dict[str, str]:
        """The files of `source` to be copied. A stamp (size, times, version) changes whenever its file does."""
        if isinstance(self._from, LocalFileSystem):
            found = dict(_listed(self._source))
        else:
            self._from.invalidate_cache()
            infos: dict[str, Any] = self._from.find(self._source, detail=True)
            found = {path[len(self._source) + 1 :]: str(info) for path, info in infos.items()}
        return {
            name: stamp
            for name, stamp in found.items()
            if name.split("/")[0] not in self._skip
            and (not (checkpoint := _checkpoint(name)) or f"{checkpoint}/{_MANIFEST}" in found)
            and not any(part.startswith(".") or part.endswith(_OLD) for part in name.split("/"))
        }


def fetch(url: str, folder: Path) -> None:
    """Get a run's folder from its storage."""
    draft = folder.with_name(f".{folder.name}.new")
    try:
        if not Mirror(folder, url).has("config.json"):
            raise FileNotFoundError("it has no config.json")
        if folder.exists():
            raise FileExistsError(f"{folder} exists: resume it, or remove it")
        shutil.rmtree(draft, ignore_errors=True)
        Mirror(url, draft, skip=(LEASE,)).update()
        draft.rename(folder)
    except Exception as error:  # every file system of fsspec's has its own
        raise CoterieError(f"RUN: cannot get {url}: {reason_of(error)}") from None


def _listed(folder: str) -> Iterator[tuple[str, str]]:
    """The files of a local folder and their stamps. What cannot be read is an error: fsspec would leave it out."""

    def fail(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    for place, _, names in os.walk(folder, onerror=fail):
        for path in (os.path.join(place, name) for name in names):
            with suppress(FileNotFoundError):
                info = os.stat(path)
                yield os.path.relpath(path, folder), f"{info.st_ino} {info.st_size} {info.st_mtime_ns}"


def _checkpoints(names: Iterable[str]) -> set[str]:
    return {_checkpoint(name) for name in names} - {""}


def _checkpoint(name: str) -> str:
    """The folder of the checkpoint that a file belongs to; empty for other files."""
    parts = name.split("/")
    at = parts.index(_CHECKPOINTS) if _CHECKPOINTS in parts else len(parts)
    return "/".join(parts[: at + 2]) if len(parts) > at + 2 else ""
