"""A machine of a cluster, for one part of a run: a `coterie` command, its output and its folder."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from contextlib import closing, suppress
from typing import NamedTuple

from coterie import __version__
from coterie.launch.ray import sync, watchdog
from coterie.parallel.processes import scratch_folder
from coterie.types import CoterieError

_TRIES = 100  # for ports in a row that nobody has


class News(NamedTuple):
    """Since the last time: what the command printed, and what changed in its folder. `code`: None while it works."""

    code: int | None
    lines: list[str]
    changes: sync.Changes


class Node:
    """One command at a time on this machine. `{here}` in its arguments and files is the folder that is its own."""

    def __init__(self, version: str) -> None:
        if version != __version__:
            raise CoterieError(f"this machine has coterie {__version__}, the one that started the run {version}")
        self.here = scratch_folder()
        self.run = self.here / "run"
        self.process: subprocess.Popen[bytes] | None = None
        self.printed = 0

    def started(self) -> bool:
        """Whether there is a command: one that has been started anew by Ray has none."""
        return self.process is not None

    def open(self, host: str, ports: int) -> tuple[str, int]:
        """An address, and the first of so many ports in a row that are free there. HOST: or this machine's, as Ray has
        it.
        """
        if not host:
            from ray.util import get_node_ip_address

            host = str(get_node_ip_address())
        return host, _free_ports(host, ports)

    def start(self, args: list[str], files: dict[str, bytes], folder: sync.Changes | None = None) -> sync.Stamps:
        """Run `coterie ARGS`, with `files` beside it and, to resume, the run's `folder`: returns that one's stamps."""
        self.end()
        shutil.rmtree(self.run, ignore_errors=True)
        here = str(self.here)
        for name, content in files.items():
            with open(os.open(self.here / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(content.replace(b"{here}", here.encode()))
        if folder is not None:
            self.run.mkdir()
            sync.take(self.run, folder)
            (self.run / "config.json").write_bytes((self.here / "config.json").read_bytes())
        stamps = sync.changes(self.run, {}).stamps if folder is not None else {}
        command = [sys.executable, watchdog.__file__, sys.executable, "-m", "coterie"]
        with (self.here / "output.txt").open("wb") as output:
            self.process = subprocess.Popen(
                [*command, *(arg.replace("{here}", here) for arg in args)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self.here,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(x for x in sys.path if x)},  # of code that Ray brought
            )
        self.printed = 0
        return stamps

    def news(self, known: sync.Stamps) -> News:
        """`known`: the stamps of what the other side has of the folder."""
        assert self.process is not None
        code = self.process.poll()  # before the rest: nothing comes after it
        with (self.here / "output.txt").open("rb") as file:
            file.seek(self.printed)
            new = file.read()
        whole = len(new) if code is not None else new.rfind(b"\n") + 1
        self.printed += whole
        return News(code, new[:whole].decode(errors="replace").splitlines(), sync.changes(self.run, known))

    def stop(self) -> None:
        """Ask for an end in good order; asked again, at once."""
        if self.process is not None and self.process.stdin is not None:
            with suppress(OSError):  # it has ended
                self.process.stdin.write(b".")
                self.process.stdin.flush()

    def end(self) -> None:
        """Let go of the command: it ends in good order, or is killed after a while."""
        if self.process is None:
            return
        if self.process.stdin is not None:
            with suppress(OSError):
                self.process.stdin.close()
        try:
            self.process.wait(watchdog.GRACE_S + 10.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.process = None

    def close(self) -> None:
        self.end()
        shutil.rmtree(self.here, ignore_errors=True)


def _free_ports(host: str, count: int) -> int:
    for _ in range(_TRIES):
        with closing(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)) as first:
            first.bind((host, 0))
            port: int = first.getsockname()[1]
        if port + count < 65536 and all(_is_free(host, port + k) for k in range(count)):
            return port
    raise CoterieError(f"no {count} free ports in a row at {host}")


def _is_free(host: str, port: int) -> bool:
    with closing(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)) as one:
        try:
            one.bind((host, port))
        except OSError:
            return False
        return True
