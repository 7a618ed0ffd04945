"""What this machine tells of its own use: joules by Intel's and AMD's counters (RAPL) and NVIDIA's (NVML), and how
busy it is. All of it is the whole machine's, whoever uses it.
"""

from __future__ import annotations

import importlib
from contextlib import suppress
from pathlib import Path
from typing import Any

_RAPL = Path("/sys/class/powercap")
_STAT = Path("/proc/stat")


def _gpus() -> tuple[Any, list[Any]]:
    """NVML and a handle for each GPU; none without its driver or its package (nvidia-ml-py)."""
    with suppress(Exception):
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        return nvml, [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    return None, []


class Energy:
    """`joules()` since this object was made; None where nothing can be read, and `reason` says why."""

    def __init__(self, root: Path = _RAPL) -> None:
        self.reason = ""
        # A package's counter holds its cores and, on many machines, its memory; subdomains would count twice.
        self._packages = sorted(p for p in root.glob("intel-rapl:*") if p.name.count(":") == 1)
        self._last: dict[Path, int] = {}
        self._joules = 0.0
        for package in self._packages:
            with suppress(OSError, ValueError):
                self._last[package] = int((package / "energy_uj").read_text())
        if not self._last:
            self.reason = (
                f"{root} has no energy counter (a virtual machine, or no RAPL), and NVML tells of no GPU"
                if not self._packages
                else f"{self._packages[0]}/energy_uj cannot be read: it needs root"
            )
        self._nvml, handles = _gpus()
        self._gpus: list[tuple[Any, int]] = []
        with suppress(Exception):  # a GPU that does not count
            self._gpus = [(gpu, self._nvml.nvmlDeviceGetTotalEnergyConsumption(gpu)) for gpu in handles]

    def joules(self) -> float | None:
        if not self._last and not self._gpus:
            return None
        for package, before in self._last.items():
            with suppress(OSError, ValueError):
                now = int((package / "energy_uj").read_text())
                wrap = int((package / "max_energy_range_uj").read_text()) if now < before else 0
                self._joules += (now - before + wrap) / 1e6
                self._last[package] = now
        for i, (handle, before_mj) in enumerate(self._gpus):
            with suppress(Exception):  # a GPU that was lost
                now_mj = self._nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
                self._joules += (now_mj - before_mj) / 1e3
                self._gpus[i] = (handle, now_mj)
        return self._joules


class Busy:
    """Shares, 0 to 1, of what the machine can do; an empty dict where nothing can be read."""

    def __init__(self, stat: Path = _STAT) -> None:
        self._stat = stat
        self._nvml, self._gpus = _gpus()
        self._last = self._cores()

    def _cores(self) -> tuple[int, int]:
        """Ticks of all cores at work, and in all, but for those that another virtual machine had."""
        try:
            user, nice, system, idle, iowait, irq, softirq = map(int, self._stat.read_text().split(None, 8)[1:8])
        except (OSError, ValueError):
            return 0, 0
        work = user + nice + system + irq + softirq
        return work, work + idle + iowait

    def read(self) -> dict[str, float]:
        """`busy/cpu`: of the time of all cores since the last call. `busy/gpu`: of NVML's last sampling period (under a
        second), as a mean over the GPUs.
        """
        found = {}
        before, self._last = self._last, self._cores()
        if (ticks := self._last[1] - before[1]) > 0:
            found["busy/cpu"] = (self._last[0] - before[0]) / ticks
        with suppress(Exception):
            shares = [self._nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100 for gpu in self._gpus]
            found["busy/gpu"] = sum(shares) / len(shares)
        return found
