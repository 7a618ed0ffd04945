"""Cores and threads: how many this process may use, and what the hardware can do."""

from __future__ import annotations

import os
from pathlib import Path


def available_cores() -> list[int]:
    """Cores that this process may run on, limited by a container's CPU quota (cgroup v2) where one is set."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    if quota == "max":
        return cores
    return cores[: max(1, round(int(quota) / int(period)))]


def rss_mb() -> float | None:
    """Resident memory of this process in MiB; None where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def bf16_is_fast(device: str) -> bool:
    """Whether bfloat16 matrix work runs in hardware (AVX-512 BF16 or AMX on x86, BF16 on Arm, Ampere or newer GPU)."""
    if device == "cuda":
        import torch

        return torch.cuda.get_device_capability()[0] >= 8
    try:
        flags = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return False
    return any(flag in flags for flag in ("avx512_bf16", "amx_bf16", "bf16"))
