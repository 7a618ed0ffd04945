"""The machine and the installed packages: for a run's machine.json, and for `coterie doctor`."""

from __future__ import annotations

import platform
import shlex
import sys
from collections.abc import Iterable
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from packaging.requirements import Requirement

from coterie.parallel.hardware import available_cores

_CORE = ["torch", "numpy", "envpool", "gymnasium"]  # reported even if coterie itself is not installed


def describe() -> dict[str, Any]:
    """Versions, processor, cores, GPUs, and the command line of this process."""
    name = Path(sys.argv[0]).name
    return {
        "system": platform.platform(),
        "processor": processor(),
        "cores": len(available_cores()),
        "gpus": torch.cuda.device_count(),  # their names would take a CUDA context in a process that needs none
        "versions": versions(("coterie", *(_required("coterie", "") or _CORE), "ray", "ale-py")),
        "command": shlex.join(["coterie" if name == "__main__.py" else name, *sys.argv[1:]]),
    }


def versions(packages: Iterable[str] = ("coterie", *_CORE, "ale-py")) -> dict[str, str]:
    """Versions of Python and of packages, such as those that step envs."""
    return {"python": platform.python_version()} | {p: v for p in packages if (v := version(p))}


def arithmetic(device: str) -> dict[str, str]:
    """What the arithmetic of a device depends on."""
    return {
        "torch": torch.__version__,
        "processor": processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "gpu": torch.cuda.get_device_name() if device == "cuda" and torch.cuda.is_available() else "none",
    }


def processor() -> str:
    """The processor's name; on x86 with family and model, as virtual machines give all generations one name."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
        found = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
        if name := found.get("model name"):
            return f"{name} (family {found['cpu family']}, model {found['model']})" if "cpu family" in found else name
    return platform.processor() or platform.machine()


def version(package: str) -> str | None:
    """The installed version of a package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def required() -> dict[str, list[str]]:
    """Required packages by extra of Coterie; those of every run under "". Empty if Coterie is not installed."""
    if version("coterie") is None:
        return {}
    always = _required("coterie", "")
    extras = metadata.metadata("coterie").get_all("Provides-Extra") or []
    return {"": always, **{extra: [p for p in _required("coterie", extra) if p not in always] for extra in extras}}


def _required(package: str, extra: str) -> list[str]:
    """Packages required by an extra on this machine (by the package itself for ""), including nested extras."""
    if version(package) is None:
        return []
    found = []
    for one in map(Requirement, metadata.requires(package) or []):
        always = one.marker is None or one.marker.evaluate({"extra": ""})
        if always != bool(extra) and (always or (one.marker is not None and one.marker.evaluate({"extra": extra}))):
            found += [one.name, *(name for inner in sorted(one.extras) for name in _required(one.name, inner))]
    return found
