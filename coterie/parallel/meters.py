"""Energy and load of the whole machine: joules by Intel's and AMD's counters (RAPL) and NVIDIA's (NVML), and how busy
its cores and GPUs are.
"""

from __future__ import annotations

import importlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

_RAPL = Path("/sys/class/powercap")
_WORK, _IDLE = ("user", "nice", "system", "irq", "softirq"), ("idle", "iowait")  # fields of `psutil.cpu_times`


def _gpus() -> tuple[Any, list[Any]]:
    """NVML and a handle for each GPU; none without its driver or its package (nvidia-ml-py)."""
    with suppress(Exception):
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        return nvml, [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    return None, []


class Energy:
    """`joules()` since this object was made; None where no counter can be read, for the `reason` given."""

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
                f"{root} has no energy counter (a virtual machine, or no RAPL), and NVML finds no GPU"
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

    def summary(self, frames: int) -> dict[str, Any]:
        """The joules, and how many of `frames` a kilojoule has paid for."""
        joules = self.joules()
        if not joules:
            return {"frames_per_kj": None, "joules": None, "reason": self.reason}
        return {"frames_per_kj": frames / (joules / 1e3), "joules": joules, "reason": ""}


class Busy:
    """How much of the machine is in use, as shares from 0 to 1."""

    def __init__(self) -> None:
        self._nvml, self._gpus = _gpus()
        self._last = psutil.cpu_times()

    def read(self) -> dict[str, float]:
        """`busy/cpu`: of the time of all cores since the last call, without what other virtual machines had (steal).
        `busy/gpu`: of NVML's last sampling period (under a second), as a mean over the GPUs.
        """
        found: dict[str, float] = {}
        try:
            before, self._last = self._last, psutil.cpu_times()
        except OSError:  # no descriptor is left
            return found
        work, idle = (
            sum(getattr(self._last, name, 0.0) - getattr(before, name, 0.0) for name in names)
            for names in (_WORK, _IDLE)
        )
        if work + idle > 0:
            found["busy/cpu"] = work / (work + idle)
        with suppress(Exception):
            shares = [self._nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100 for gpu in self._gpus]
            found["busy/gpu"] = sum(shares) / len(shares)
        return found
