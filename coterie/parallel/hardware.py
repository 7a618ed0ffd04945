"""Cores and memory that this process may use, and what the hardware can do."""

from __future__ import annotations

import ctypes
import os
import socket
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

CGROUP = Path("/sys/fs/cgroup")  # the limits of a container (cgroup v2)


def available_cores(cgroup: Path = CGROUP) -> list[int]:
    """Cores that this process may run on. Where a container has a CPU quota they are that many, from another one on
    for each host name: containers of one machine would share its first cores.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    try:
        quota, period = map(int, (cgroup / "cpu.max").read_text().split())
        first = zlib.crc32(socket.gethostname().encode()) % len(cores)
        return sorted((cores[first:] + cores[:first])[: max(1, round(quota / period))])
    except (OSError, ValueError, ZeroDivisionError):  # also "max"
        return cores


def machine_memory(cgroup: Path = CGROUP) -> int:
    """Bytes of the machine's memory, limited by a container's where that is set."""
    whole = int(psutil.virtual_memory().total)
    try:
        return min(whole, int((cgroup / "memory.max").read_text()))
    except (OSError, ValueError):
        return whole


class CoreAssignment(NamedTuple):
    """Where a learner runs. On a GPU its first core is for driving it."""

    cores: tuple[int, ...]
    gpu: int = -1  # -1: none


def assign_cores(learners: int, cores: Sequence[int], gpus: int) -> list[CoreAssignment]:
    """Disjoint cores for each learner, round robin where there are more learners than cores.

    With GPUs, learners take them in turns, cores are split evenly among the GPUs, and the first core of each split is
    kept for driving its GPU (Accelerated Methods 2.2).
    """
    if gpus == 0:
        return [CoreAssignment(tuple(share)) for share in _shares(learners, cores)]
    used, places = min(gpus, learners), dict[int, CoreAssignment]()
    for gpu, (driving, *stepping) in enumerate(_shares(used, cores)):
        ranks = range(gpu, learners, used)
        for rank, share in zip(ranks, _shares(len(ranks), stepping or [driving]), strict=True):
            places[rank] = CoreAssignment(tuple(dict.fromkeys([driving, *share])), gpu)
    return [places[rank] for rank in range(learners)]


def _shares(n: int, cores: Sequence[int]) -> list[list[int]]:
    c = len(cores)
    if n > c:
        return [[cores[i % c]] for i in range(n)]
    return [list(cores[c * i // n : c * (i + 1) // n]) for i in range(n)]


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = (256 << 20, 32 << 20)  # allocations up to this size; glibc below 2.35 accepts the second at most


def keep_freed_memory() -> None:
    """Let glibc's malloc keep freed memory for the next allocation. Other allocators are left alone.

    By default it returns large blocks to the system at once, and each training step gets its activations as fresh pages
    again: 3,100 page faults, 5 of 36 ms, in a step of DQN; 20,000 in 640 samples of Nature in float32 if only blocks
    up to 32 MiB are kept, 17% of the time.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    if any(mallopt(_M_MMAP_THRESHOLD, size) == 1 for size in _KEPT_BYTES):
        mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


def rss_mb(pid: int | None = None) -> float | None:
    """Resident memory of a process (this one by default) in MiB; None where it is gone, or no descriptor is left."""
    try:
        return float(psutil.Process(pid).memory_info().rss / 2**20)
    except (psutil.Error, OSError):
        return None
