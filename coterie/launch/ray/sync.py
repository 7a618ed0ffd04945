"""A run's folder kept up to date on another machine: what changed since the last time, and taking that in.

Files that only grow are sent from where they had ended; a checkpoint is sent whole, when it is complete, and appears
whole. Drafts and whatever else nobody reads stay where they are.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from coterie.types import CoterieError

_CHECKPOINTS, _MANIFEST = "checkpoints", "manifest.json"
Stamps = dict[str, tuple[int, int, int]]  # of each file by its name: bytes, time of change in ns, inode


class Changes(NamedTuple):
    """`files`: bytes by name, with the place where they begin. `gone`: checkpoints that were there before."""

    files: dict[str, tuple[int, bytes]]
    gone: list[str]
    stamps: Stamps

    def __bool__(self) -> bool:
        return bool(self.files or self.gone)


def _grows(name: str) -> bool:
    return name.endswith((".jsonl", ".txt")) or "tfevents" in name


def _files(folder: Path, skip: tuple[str, ...]) -> Iterable[str]:
    for path, folders, names in os.walk(folder):
        if Path(path) == folder:
            folders[:], names[:] = ([x for x in found if x not in skip] for found in (folders, names))
        folders[:] = [x for x in folders if not x.startswith(".") and not x.endswith(".old")]
        here = Path(path).relative_to(folder)
        if here.parts[:1] == (_CHECKPOINTS,) and len(here.parts) == 2 and _MANIFEST not in names:
            folders.clear()
            continue
        yield from ((here / name).as_posix() for name in names if not name.startswith("."))


def changes(folder: Path, known: Mapping[str, tuple[int, int, int]], skip: tuple[str, ...] = ()) -> Changes:
    """What is new in `folder`, but for `skip` in it, since it had the stamps `known` ({}: everything). What vanishes
    meanwhile is left out.
    """
    stamps: Stamps = {}
    for name in sorted(_files(folder, skip)):
        with suppress(FileNotFoundError):
            there = (folder / name).stat()
            stamps[name] = there.st_size, there.st_mtime_ns, there.st_ino
    whole = {_checkpoint(name) for name, stamp in stamps.items() if known.get(name) != stamp} - {""}
    files, torn = dict[str, tuple[int, bytes]](), set[str]()
    for name, stamp in list(stamps.items()):
        if known.get(name) == stamp and _checkpoint(name) not in whole:
            continue
        size, _, inode = stamp
        before, _, same = known.get(name, (0, 0, inode))
        begin = before if _grows(name) and size > before and same == inode else 0  # else it is another file by now
        try:
            with (folder / name).open("rb") as file:
                file.seek(begin)
                files[name] = begin, file.read(size - begin)
        except FileNotFoundError:  # a checkpoint that is pruned just now goes as a whole
            torn.add(_checkpoint(name) or name)
    for name in [name for name in stamps if (_checkpoint(name) or name) in torn]:
        del stamps[name]
        files.pop(name, None)
    gone = sorted({_checkpoint(name) for name in known} - {_checkpoint(name) for name in stamps} - {""})
    return Changes(files, gone, stamps)


def _checkpoint(name: str) -> str:
    """The checkpoint that a file belongs to; empty: none."""
    parts = name.split("/")
    return parts[1] if parts[0] == _CHECKPOINTS and len(parts) > 2 else ""


def take(folder: Path, new: Changes, skip: tuple[str, ...] = ()) -> None:
    """Take changes in; files named in `skip` stay as they are here."""
    try:
        parts: dict[str, dict[str, bytes]] = {}
        later: dict[str, bytes] = {}
        for name, (begin, content) in new.files.items():
            if name in skip:
                continue
            if checkpoint := _checkpoint(name):
                parts.setdefault(checkpoint, {})[name] = content
            elif begin:
                _append(_inside(folder, name), begin, content)
            else:
                later[name] = content
        for checkpoint, files in parts.items():
            draft = folder / _CHECKPOINTS / f".draft-{checkpoint}"
            shutil.rmtree(draft, ignore_errors=True)
            for name, content in files.items():
                path = _inside(folder, name)
                place = draft / path.relative_to(folder / _CHECKPOINTS / checkpoint)
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(content)
            shutil.rmtree(folder / _CHECKPOINTS / checkpoint, ignore_errors=True)
            draft.rename(folder / _CHECKPOINTS / checkpoint)
        for name, content in later.items():  # best.json names a checkpoint that is there by now
            path = _inside(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            draft = path.with_name(f".{path.name}.new")
            draft.write_bytes(content)
            draft.rename(path)
        for checkpoint in new.gone:
            shutil.rmtree(_inside(folder, f"{_CHECKPOINTS}/{checkpoint}"), ignore_errors=True)
    except OSError as error:
        raise CoterieError(f"out: cannot write to {folder}: {error.strerror or error}") from None


def store(url: str, new: Changes, folder: Path) -> None:
    """Bring the copy of `folder` at a path or URL of fsspec's up to date. A checkpoint's manifest comes last."""
    import fsspec

    try:
        system, root = fsspec.core.url_to_fs(url)
        for name in sorted(new.files, key=lambda name: (name.endswith(_MANIFEST), name)):
            at = f"{root}/{name}"
            system.makedirs(at.rpartition("/")[0], exist_ok=True)
            system.pipe_file(at, (folder / name).read_bytes())
        for checkpoint in new.gone:
            with suppress(FileNotFoundError):
                system.rm(f"{root}/{_CHECKPOINTS}/{checkpoint}", recursive=True)
    except Exception as error:  # every kind of storage has its own
        raise CoterieError(f"ray.storage: cannot write to {url}: {' '.join(str(error).split()) or error!r}") from None


class Storage:
    """Copies of folders at paths or URLs. Where those are away, that is said once, and tried again; where they do not
    answer, nobody waits for them.
    """

    def __init__(self, pairs: list[tuple[Path, str]], skip: tuple[str, ...] = ()) -> None:
        self.pairs, self.skip = pairs, skip
        self.stamps: dict[str, Stamps] = {}
        self.tried, self.warned = time.monotonic(), False
        self._lines = deque[str]()
        self._work: threading.Thread | None = None

    def bring(self, within: float) -> list[str]:
        """Bring all up to date, in the background where that takes longer than `within` seconds; returns what there is
        to say.
        """
        end = time.monotonic() + within
        if self._work is not None:
            self._work.join(within)
        if self._work is None or not self._work.is_alive():
            self._work = threading.Thread(target=self._bring, name="coterie-storage", daemon=True)
            self._work.start()
            self._work.join(max(0.0, end - time.monotonic()))
        if self._work.is_alive():
            self._warn(f"ray.storage: {self.pairs[0][1]} takes longer than {within:g} s")
        self.tried = time.monotonic()
        return [self._lines.popleft() for _ in range(len(self._lines))]

    def _bring(self) -> None:
        try:
            for folder, url in self.pairs:
                new = changes(folder, self.stamps.get(url, {}), self.skip)
                store(url, new, folder)
                self.stamps[url] = new.stamps
            self.warned = False
        except (CoterieError, OSError) as error:
            self._warn(str(error))

    def _warn(self, line: str) -> None:
        if not self.warned:
            self.warned = True
            self._lines.append(line)


def fetch(url: str, folder: Path) -> None:
    """Get a run's folder from where `store` has put it."""
    import fsspec

    try:
        system, root = fsspec.core.url_to_fs(url)
        if not system.exists(f"{root}/config.json"):
            raise FileNotFoundError("there is no config.json")
        if folder.exists():
            raise FileExistsError(f"{folder} is there already: resume that, or remove it")
        draft = folder.with_name(f".{folder.name}.new")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        system.get(f"{root}/", f"{draft}/", recursive=True)
        draft.rename(folder)
    except Exception as error:
        raise CoterieError(f"RUN: cannot get {url}: {' '.join(str(error).split()) or error!r}") from None


def _append(path: Path, begin: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(begin)
        file.write(content)
        file.truncate()


def _inside(folder: Path, name: str) -> Path:
    """Names come from another machine: none may lead out of the folder."""
    if name.startswith("/") or ".." in name.split("/"):
        raise CoterieError(f"a machine of the run names a file outside of it: {name[:100]!r}")
    return folder / name
