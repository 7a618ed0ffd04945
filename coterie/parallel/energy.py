"""Joules that this machine has used, where it can tell: Intel's and AMD's counters (RAPL), NVIDIA's (NVML)."""

from __future__ import annotations

import importlib
from contextlib import suppress
from pathlib import Path

_RAPL = Path("/sys/class/powercap")


class Energy:
    """`joules()` since this object was made; None where nothing can be read, and `reason` says why."""

    def __init__(self, root: Path = _RAPL) -> None:
        self.reason = ""
        # A package's counter holds its cores and, on many machines, its memory; subdomains would count twice.
        self._packages = sorted(p for p in root.glob("intel-rapl:*") if p.name.count(":") == 1)
        self._last: dict[Path, int] = {}
        self._gpus: list[tuple[object, object]] = []
        self._joules = 0.0
        for package in self._packages:
            with suppress(OSError, ValueError):
                self._last[package] = int((package / "energy_uj").read_text())
        if not self._last:
            self.reason = (
                f"{root} has no energy counter (a virtual machine, or no RAPL)"
                if not self._packages
                else f"{self._packages[0]}/energy_uj cannot be read: it needs root"
            )
        self._start_gpus()

    def _start_gpus(self) -> None:
        with suppress(Exception):
            nvml = importlib.import_module("pynvml")
            nvml.nvmlInit()
            for i in range(nvml.nvmlDeviceGetCount()):
                handle = nvml.nvmlDeviceGetHandleByIndex(i)
                self._gpus.append((handle, nvml.nvmlDeviceGetTotalEnergyConsumption(handle)))
            self._nvml = nvml

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
            now_mj = self._nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
            self._joules += (now_mj - before_mj) / 1e3
            self._gpus[i] = (handle, now_mj)
        return self._joules
