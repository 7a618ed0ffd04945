"""Processes that a run starts: on their own cores, never outliving their parent, and never silent about their end.

Children are forked from a server that has torch loaded already (multiprocessing's forkserver), so that sixty of them
start in seconds and share its memory; never from the caller, whose threads and locks a fork would copy half-way.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing import resource_tracker, util
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

from coterie.types import ConfigError, CoterieError

Post = Callable[[str, Any], None]  # (kind, content) to the parent
_END_S = 5.0  # for a child whose pipe has closed to be gone


class PeerLost(CoterieError):
    """A learner cannot go on because another one is gone: the other's end is the reason to show."""


class Child:
    """A started process that runs `target(post, *args)`; its messages and its end come from `listen`."""

    def __init__(self, name: str, cores: Sequence[int], target: Callable[..., None], args: tuple[Any, ...]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["coterie.roles.preload"])
        self.name = name
        self.conn, theirs = context.Pipe()
        self.process = context.Process(target=_enter, args=(theirs, list(cores), target, args), name=name, daemon=True)
        # A server that is only starting must not die of a signal to its group: roles/preload.py unblocks them.
        _short_paths()
        resource_tracker.ensure_running()  # it would unblock them, if it were the server that started it
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            with _no_main():
                self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()

    def kill(self) -> None:
        """End it at once."""
        with contextlib.suppress(ValueError, OSError):
            self.process.kill()
        self.end()

    def end(self) -> str:
        """After its pipe has closed, or a kill: how it ended."""
        self.conn.close()
        self.process.join(_END_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        code = self.process.exitcode or 0
        if code == -signal.SIGKILL:
            return "was killed by SIGKILL (the kernel does so when memory runs out)"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def listen(children: Iterable[Child], seconds: float) -> Iterator[tuple[Child, str, Any]]:
    """Messages that arrive within `seconds`; kind "end" with the manner of it is a child's last."""
    by_conn = {child.conn: child for child in children}
    for conn in wait(list(by_conn), seconds):
        child = by_conn[cast(Connection, conn)]
        try:
            while True:
                kind, content = child.conn.recv()
                yield child, kind, content
                if not child.conn.poll():
                    break
        except (EOFError, OSError):
            yield child, "end", child.end()


def found_by(children: Sequence[Child], within: float, others: Sequence[Child] = ()) -> list[Any]:
    """What each of `children` posts as "found", in their order; `others` serve them. All are the caller's to kill.

    Raises `CoterieError` with the first failure of any of them, or where somebody has found nothing `within` seconds.
    """
    found: dict[str, Any] = {}
    end = time.monotonic() + within
    while len(found) < len(children):
        if time.monotonic() > end:
            late = ", ".join(child.name for child in children if child.name not in found)
            raise CoterieError(f"{late}: nothing for {within:.0f} s")
        for child, kind, content in listen([c for c in (*children, *others) if c.name not in found], 0.5):
            if kind == "found":
                found[child.name] = content
            elif kind != "acted" and child.name not in found:  # who has been heard may end at once
                raise CoterieError(f"{child.name}: {content if kind == 'end' else content[0]}")
    return [found[child.name] for child in children]


def own_folder(where: str | None = None) -> Path:
    """A new temporary folder with its owner in its name; those of owners that were killed are removed first."""
    base, owner = Path(where or tempfile.gettempdir()), pid_space()
    for folder in base.glob(f"coterie-{owner}-*-*"):
        with contextlib.suppress(OSError, ValueError):  # somebody else's, or gone meanwhile
            if folder.stat().st_uid == os.getuid() and not exists(int(folder.name.split("-")[2])):
                shutil.rmtree(folder, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"coterie-{owner}-{os.getpid()}-", dir=base))


def pid_space() -> str:
    """The pid namespace: in a container that shares the folder with others, their processes are not to be seen."""
    try:
        return f"{os.stat('/proc/self/ns/pid').st_ino:x}"
    except OSError:
        return "0"


def where() -> str:
    """Where this process's pid means this process."""
    return f"{socket.gethostname()} {pid_space()}"


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is another user's
        return True
    return True


def _short_paths() -> None:
    """The fork server's socket is in the temporary folder, and a socket's path has 107 bytes at most."""
    config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    if "tempdir" not in config and len(os.fsencode(tempfile.gettempdir())) > 70:
        config["tempdir"] = folder = str(own_folder("/tmp"))
        util.Finalize(None, shutil.rmtree, args=(folder, True), exitpriority=-100)


@contextlib.contextmanager
def _no_main() -> Iterator[None]:
    """A child must not run the caller's script again: it would start a run of its own where there is no main guard."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _enter(conn: Connection, cores: list[int], target: Callable[..., None], args: tuple[Any, ...]) -> None:
    """A child's life: signals are the parent's to handle, and with the parent the child is gone."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    lock = threading.Lock()

    def post(kind: str, content: Any) -> None:
        with lock:
            conn.send((kind, content))

    threading.Thread(target=_die_with_parent, args=(conn,), name="coterie-parent-watch", daemon=True).start()
    code = 0
    try:
        target(post, *args)
    except BaseException as error:  # whatever it is, the parent says it
        code = 1
        kind = "config" if isinstance(error, ConfigError) else "peer" if isinstance(error, PeerLost) else "error"
        text = " ".join(str(error).split())
        line = text if isinstance(error, CoterieError) else f"{type(error).__name__}: {text}"
        with contextlib.suppress(OSError):
            post(kind, (line, "" if isinstance(error, CoterieError) else traceback.format_exc()))
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)  # threads of simulators must not keep it


def _die_with_parent(conn: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        conn.recv()
    os._exit(1)
