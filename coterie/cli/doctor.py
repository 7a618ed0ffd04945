"""`coterie doctor`: the machine, what is installed, which precision is fast and correct here, and what to install."""

from __future__ import annotations

import os
import platform
import shutil
import time
from argparse import Namespace
from importlib.util import find_spec

import torch

from coterie import __version__
from coterie.build.precision import ROUNDING, bf16_pays, measure
from coterie.config import Atari, Env
from coterie.envs.make import make_envs
from coterie.envs.pool import modules
from coterie.errors import CoterieError
from coterie.extras import EXTRAS, install
from coterie.parallel.hardware import available_cores, machine_memory
from coterie.runs.machine import required, version

_WIDTH = 10  # of the first column


def doctor(_: Namespace) -> int:
    """Print what is here; returns 0 if that is everything that a run needs."""
    packages = required()
    absent = [name for name in packages.get("", []) if version(name) is None]
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    free, policy = shutil.disk_usage(".").free / 2**30, os.environ.get("OMP_WAIT_POLICY", "")
    rate, broken = _env_rate()
    rows = [
        ("coterie", f"{__version__}, Python {platform.python_version()}, torch {torch.__version__}"),
        ("system", platform.platform()),
        ("cores", f"{len(available_cores())} of {os.cpu_count()} may be used"),
        ("memory", f"{machine_memory() / 2**30:.0f} GiB"),
        ("disk", f"{free:.0f} GiB free here" + ("" if free > 1 else ": TOO LITTLE for checkpoints")),
        ("gpu", ", ".join(gpus) or "none: runs use the CPU"),
        *((f"{device} bf16", _precision(device)) for device in ["cpu"] + ["cuda"] * bool(gpus)),
        ("envpool", rate),
    ]
    if not packages:
        rows.append(("WARNING", "coterie is not installed, so its requirements are unknown: pip install -e ."))
    if absent:
        rows.append(("MISSING", f"{', '.join(absent)}: install coterie again"))
    if policy.lower() not in ("", "passive"):
        rows.append(("SLOW", f"OMP_WAIT_POLICY={policy}: idle torch threads take cores from the envs; unset it"))
    lines = [f"{name:{_WIDTH}}{text}" for name, text in rows]
    if packages:
        lines += ["", f"{'extra':{_WIDTH + 2}}{'':14}what it is for"]
    for extra, use in EXTRAS.items() if packages else ():
        found = all(version(name) is not None for name in packages.get(extra, []))
        lines.append(f"{extra:{_WIDTH + 2}}{'installed' if found else 'not installed':14}{use}")
    if packages:
        lines += ["", f"Install an extra, or all, with: {install('NAME')}"]
    print("\n".join(lines))
    return int(bool(absent or broken))


def _precision(device: str) -> str:
    """bf16 beside fp32, measured now, and what runs choose by the measurement that they keep."""
    found, chosen = measure(device), "bf16" if bf16_pays(device) else "fp32"
    verdict = "correct" if found.error < ROUNDING else "NOT ACCURATE enough to train with"
    compared = f"{found.speed:.1f} times the speed of fp32, largest difference {found.error:.1%}"
    return f"{compared}: {verdict}; --precision auto takes {chosen} for images"


def _env_rate() -> tuple[str, bool]:
    """The rate of Pong without a policy, and whether it is broken."""
    if not modules():
        atari = "Atari only through ale-py (ALE/...)" if find_spec("ale_py") else "there is no Atari"
        return f"not installed: environments run in worker processes (slower), and {atari}", False
    try:
        with make_envs(Env(id="Pong-v5", num_envs=8), Atari(), seed=0, threads=len(available_cores())) as envs:
            ts, begin, steps = envs.recv(0), time.perf_counter(), 0
            while time.perf_counter() - begin < 1:
                envs.send(0, ts.env_id * 0)
                ts = envs.recv(0)
                steps += len(ts.reward)
    except CoterieError as error:
        return f"BROKEN: Pong-v5: {error}", True
    return f"Pong-v5 runs at {steps / (time.perf_counter() - begin):,.0f} env steps/s without a policy", False
