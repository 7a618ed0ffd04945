"""`coterie doctor`: what this machine can do and what is missing, in plain lines."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import time

import torch

from coterie import __version__
from coterie.config import Atari, Env
from coterie.envs.make import make_envs
from coterie.extras import EXTRAS
from coterie.parallel.affinity import available_cores, bf16_is_fast
from coterie.runs.machine import required, version
from coterie.types import CoterieError


def report() -> tuple[list[str], bool]:
    """Lines, and whether everything that a run needs is there."""
    packages = required()
    lines = [f"coterie {__version__}, Python {platform.python_version()}, {platform.platform()}"]
    if not packages:
        lines.append("odd      coterie is not installed, so its requirements are unknown: pip install -e .")
    for name in packages.get("", []):
        found = version(name)
        lines.append(f"ok       {name} {found}" if found else f"MISSING  {name}: pip install coterie again")
    for extra, use in EXTRAS.items() if packages else ():
        missing = ", ".join(name for name in packages.get(extra, []) if version(name) is None)
        install = f"optional {use}: pip install 'coterie[{extra}]' (for {missing})"
        lines.append(install if missing else f"ok       {use}")
    lines.append(f"cores    {len(available_cores())} of {os.cpu_count()} may be used")
    lines.append(f"bf16     {'in hardware' if bf16_is_fast('cpu') else 'not in hardware: auto means fp32 on the CPU'}")
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    lines += [f"gpu      {name}" for name in gpus] or ["gpu      none: runs use the CPU"]
    free = shutil.disk_usage(".").free / 2**30
    lines.append(f"{'ok      ' if free > 1 else 'LOW     '} disk: {free:.1f} GiB free here")
    policy = os.environ.get("OMP_WAIT_POLICY", "")
    if policy.lower() != "passive":
        lines.append(f"SLOW     OMP_WAIT_POLICY is {policy!r}: idle torch threads take cores of env threads; unset it")
    lines.append(_step_an_env())
    return lines, sys.version_info >= (3, 11) and not any(x.startswith(("MISSING", "BROKEN")) for x in lines)


def _step_an_env() -> str:
    try:
        with make_envs(Env(id="Pong-v5", num_envs=8), Atari(), seed=0, threads=len(available_cores())) as envs:
            ts, begin, steps = envs.recv(0), time.perf_counter(), 0
            while time.perf_counter() - begin < 1:
                envs.send(0, ts.env_id * 0)
                ts = envs.recv(0)
                steps += len(ts.reward)
    except CoterieError as error:
        return f"BROKEN   Pong-v5: {error}"
    return f"ok       Pong-v5 steps: {steps / (time.perf_counter() - begin):,.0f} env steps/s with no policy"
