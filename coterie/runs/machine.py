"""Where a run was made and with what, for whoever wants to make it again."""

from __future__ import annotations

import platform
import shlex
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from coterie.parallel.affinity import available_cores
from coterie.runs.versions import needed, version

_LEAST = ["torch", "numpy", "envpool", "gymnasium"]  # of sources that nobody installed
_ENTRIES = ("cli.py", "__main__.py")  # of `python -m coterie`


def describe() -> dict[str, Any]:
    """Versions, processor, cores, GPUs, and the command line of this process."""
    packages = ["coterie", *needed().get("", _LEAST), "ray", "ale-py"]
    versions = {name: found for name in packages if (found := version(name))}
    name = Path(sys.argv[0]).name
    return {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": len(available_cores()),
        "gpus": torch.cuda.device_count(),  # their names would take a CUDA context in a process that needs none
        "versions": {"python": platform.python_version(), **versions},
        "command": shlex.join(["coterie" if name in _ENTRIES else name, *sys.argv[1:]]),
    }


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
