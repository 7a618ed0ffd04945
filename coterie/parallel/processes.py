"""Child processes: on cores of their own, never outliving their parent, and their end is always reported.

Children are forked from a server that has torch loaded already (multiprocessing's forkserver), so that sixty of them
start in seconds and share its memory. A fork of the caller would copy its threads and locks half-way.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import multiprocessing
import os
import pickle
import resource
import shutil
import signal
import socket
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, cast

import psutil

from coterie.errors import ConfigError, CoterieError, one_line
from coterie.parallel.clock import awake
from coterie.parallel.signals import HANDLED, blocked_signals, end_with_parent, ignore_signals, name_of

_END_S = 5.0  # for a child whose socket has closed to end
_HEAD = 8  # bytes before a message: its length
_DESCRIPTORS = 1 << 16  # at most, where the system allows more
_LOCK = ".lock"
_LOCKS: dict[Path, int] = {}  # of scratch folders, open while this process lives


class PeerLost(CoterieError):
    """A process cannot go on without another one that is gone. The end of the other is the reason to show."""


def descriptors() -> int:
    """How many descriptors this process may have, after raising the limit as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):  # macOS allows less than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
    return most if soft == resource.RLIM_INFINITY else soft


def start_server() -> None:
    """Start the server that children are forked from, if it is not running. It loads torch while the caller goes on."""
    if multiprocessing.current_process().daemon:
        workers = "such as a worker of multiprocessing.Pool; use a ProcessPoolExecutor"
        raise ConfigError(f"this run has child processes, and a daemonic process can have none, {workers}")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["coterie.roles.preload"])
    # A server that is only starting must not die of a signal to its group: roles/preload.py unblocks them.
    _socket_folder()
    with blocked_signals(), _no_main():
        resource_tracker.ensure_running()  # which unblocks some of them here
        signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
        forkserver.ensure_running()


def _forget_server() -> None:
    """A fork is not the parent of the server, and must not keep it alive."""
    server: Any = forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
    server.__init__()


os.register_at_fork(after_in_child=_forget_server)


def exited(code: int) -> str:
    """How a process that was not killed has ended."""
    return f"ended with exit code {code}"


class Child:
    """A started process that runs `target(post, *args)`; its messages and its end come from `listen`."""

    def __init__(self, name: str, cores: Sequence[int], target: Callable[..., None], args: tuple[Any, ...]) -> None:
        start_server()
        self.name = name
        self.socket, far_end = socket.socketpair()
        self.socket.setblocking(False)
        self._received = bytearray()
        call = (far_end, list(cores), dict(os.environ), target, args)
        context = multiprocessing.get_context("forkserver")
        self.process = context.Process(target=_enter, args=call, name=name, daemon=True)
        try:
            with _no_main():
                self.process.start()
        except (OSError, EOFError):
            self.socket.close()
            raise
        finally:
            far_end.close()

    def kill(self) -> None:
        """End it at once."""
        with contextlib.suppress(ValueError, OSError):
            self.process.kill()
        self.end()

    def end(self) -> str:
        """Wait for its end, after its socket has closed or it was killed; returns how it ended."""
        self.socket.close()
        self.process.join(_END_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(_END_S)  # the kernel may not let it go: a disk that does not answer
        if (code := self.process.exitcode) is None:
            return "was killed, but is still there"
        if code == -signal.SIGKILL:
            return "was killed by SIGKILL (the kernel does so when memory runs out)"
        return f"was killed by {name_of(-code)}" if code < 0 else exited(code)

    def messages(self) -> Iterator[tuple[str, Any]]:
        """The messages that have arrived whole. Never blocks: a child may be stopped in the middle of one."""
        ended = False
        try:
            while chunk := self.socket.recv(1 << 16):
                self._received += chunk
            ended = True
        except BlockingIOError:
            pass
        except OSError:
            ended = True
        while len(self._received) >= (end := _HEAD + int.from_bytes(self._received[:_HEAD], "big")):
            body = bytes(self._received[_HEAD:end])
            del self._received[:end]
            yield pickle.loads(body)
        if ended:
            yield "end", self.end()


def listen(children: Iterable[Child], seconds: float) -> Iterator[tuple[Child, str, Any]]:
    """Messages that arrive within `seconds`; a child's last has the kind "end" and says how it ended."""
    by_socket = {child.socket: child for child in children}
    for ready in wait(list(by_socket), seconds):
        child = by_socket[cast(socket.socket, ready)]
        for kind, content in child.messages():
            yield child, kind, content


def gather(children: Sequence[Child], within: float, others: Sequence[Child] = ()) -> list[Any]:
    """What each of `children` posts as "result", in their order; `others` serve them. The caller kills all of them.

    Raises `CoterieError` with the first failure of any of them, or where a result takes longer than `within` seconds.
    """
    results: dict[str, Any] = {}
    end = awake() + within
    while len(results) < len(children):
        if awake() > end:
            late = ", ".join(child.name for child in children if child.name not in results)
            raise CoterieError(f"{late}: no result within {within:.0f} s")
        for child, kind, content in listen([c for c in (*children, *others) if c.name not in results], 0.5):
            if kind == "result":
                results[child.name] = content
            elif kind != "acted" and child.name not in results:  # after its result a child may end
                raise CoterieError(f"{child.name}: {content if kind == 'end' else content[0]}")
    return [results[child.name] for child in children]


def scratch_folder(where: str | None = None) -> Path:
    """A new temporary folder. Its name has its owner, which keeps a lock in it. Those of killed owners are removed."""
    base, owner = Path(where or tempfile.gettempdir()), hashlib.sha256(location().encode()).hexdigest()[:8]
    for folder in base.glob(f"coterie-{owner}-*-*"):
        with contextlib.suppress(OSError, ValueError):  # another user's, already gone, or locked
            if folder.stat().st_uid == os.getuid() and not psutil.pid_exists(int(folder.name.split("-")[2])):
                with (folder / _LOCK).open("a") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
    for folder in [folder for folder in _LOCKS if not folder.exists()]:
        os.close(_LOCKS.pop(folder))
    folder = Path(tempfile.mkdtemp(prefix=f"coterie-{owner}-{os.getpid()}-", dir=base))
    _LOCKS[folder] = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    with contextlib.suppress(OSError):  # some file systems have no locks: there the pid must do
        fcntl.flock(_LOCKS[folder], fcntl.LOCK_EX | fcntl.LOCK_NB)
    return folder


def location() -> str:
    """Where a pid means the same process: the host, this boot of it (clones have one name), and the pid namespace
    (containers may share a folder).
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
        return f"{socket.gethostname()} {boot} {os.stat('/proc/self/ns/pid').st_ino:x}"
    except OSError:
        return socket.gethostname()


def _socket_folder() -> None:
    """The fork server's socket is in a folder that multiprocessing makes once for each process, and removes at its end.
    In a scratch folder it also goes if the process is killed. A socket's path has 107 bytes at most.
    """
    size = len(os.fsencode(tempfile.gettempdir()))
    made = multiprocessing.current_process()._config.get("tempdir") is not None  # type: ignore[attr-defined]
    if not made and not 40 < size <= 70:  # there is room for two folders, or for none
        folder = scratch_folder("/tmp" if size > 70 else None)
        util.Finalize(None, shutil.rmtree, (folder, True), exitpriority=-200)  # after its own
        before, tempfile.tempdir = tempfile.tempdir, str(folder)
        try:
            util.get_temp_dir()
        finally:
            tempfile.tempdir = before


@contextlib.contextmanager
def _no_main() -> Iterator[None]:
    """A child must not run the caller's script again: without a main guard that would start a second run."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _enter(
    parent: socket.socket, cores: list[int], environ: dict[str, str], target: Callable[..., None], args: tuple[Any, ...]
) -> None:
    """The main function of a child. Its parent handles signals, and the child ends when its parent does."""
    ignore_signals()
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # envs may have children
    os.environ.clear()  # the fork server has the variables of this Python process's first run
    os.environ.update(environ)
    end_with_parent(grace=False)  # the fork server, which ends with the process of the run
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    lock = threading.Lock()

    def post(kind: str, content: Any) -> None:
        body = pickle.dumps((kind, content))
        with lock:
            parent.sendall(len(body).to_bytes(_HEAD, "big") + body)

    threading.Thread(target=_die_with_parent, args=(parent,), name="coterie-parent-watch", daemon=True).start()
    code = 0
    try:
        target(post, *args)
    except BaseException as error:  # every reason is reported to the parent
        code = 1
        kind = "config" if isinstance(error, ConfigError) else "peer" if isinstance(error, PeerLost) else "error"
        with contextlib.suppress(OSError):
            trace = error.trace if isinstance(error, CoterieError) else traceback.format_exc()
            post(kind, (one_line(error), trace))
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    for own in multiprocessing.active_children():  # of an env that has not closed them, or of a callback
        if own.daemon:
            own.kill()
    os._exit(code)  # threads of simulators must not keep it


def _die_with_parent(parent: socket.socket) -> None:
    with contextlib.suppress(OSError):
        parent.recv(1)  # the parent sends nothing: this returns when it is gone
    os._exit(1)
