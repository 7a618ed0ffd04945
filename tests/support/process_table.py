"""Processes as the operating system sees them."""

from __future__ import annotations

from contextlib import suppress

import psutil


def gone(pid: int) -> bool:
    """Whether a process has ended, also where its parent has not waited for it yet."""
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return True


def family(pid: int) -> list[int]:
    """A process and all its descendants."""
    return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]


def tagged(key: str, value: str) -> dict[int, str]:
    """The command lines of processes with this variable in their environment."""
    found = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(key) == value and not gone(process.pid):
                found[process.pid] = " ".join(process.cmdline())[:120]
    return found


def named_memory(pid: int) -> list[str]:
    """Shared memory of a process that has a name, and could be left behind."""
    paths = [entry.path for entry in psutil.Process(pid).memory_maps()]
    return [path for path in paths if path.startswith("/dev/shm") and not path.endswith("(deleted)")]
