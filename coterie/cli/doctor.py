"""`doctor`: what this machine can do, and what is missing, in plain lines."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import time

import torch

from coterie import __version__
from coterie.parallel.affinity import available_cores, bf16_is_fast
from coterie.runs.versions import needed, version
from coterie.types import CoterieError

_EXTRAS = {
    "video": "watch, and videos on pages",
    "gym": "gymnasium's Box2D and MuJoCo envs",
    "wandb": "--log.wandb",
    "plots": "report, compare, dashboard, reproduce",
    "ray": "--launch ray",
    "gpu": "energy and use of NVIDIA GPUs",
    "export": "export",
}


def report() -> tuple[list[str], bool]:
    """Lines, and whether everything that a run needs is there."""
    lines = [f"coterie {__version__}, Python {platform.python_version()}, {platform.platform()}"]
    healthy = sys.version_info >= (3, 11)
    packages = needed()
    if not packages:
        lines.append("odd      these sources are not installed, so what they need is not known: pip install -e .")
    for name in packages.get("", []):
        found = version(name)
        lines.append(f"ok       {name} {found}" if found else f"MISSING  {name}: pip install coterie again")
        healthy &= found is not None
    for extra, what in _EXTRAS.items() if packages else ():
        missing = [name for name in packages.get(extra, []) if version(name) is None]
        lines.append(
            f"optional {what}: pip install 'coterie[{extra}]' (for {', '.join(missing)})"
            if missing
            else f"ok       {what}"
        )
    lines.append(f"cores    {len(available_cores())} of {os.cpu_count()} may be used")
    lines.append(f"bf16     {'in hardware' if bf16_is_fast('cpu') else 'not in hardware: auto means fp32 on the CPU'}")
    if torch.cuda.is_available():
        lines += [f"gpu      {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())]
    else:
        lines.append("gpu      none: runs use the CPU")
    free = shutil.disk_usage(".").free / 2**30
    lines.append(f"{'ok      ' if free > 1 else 'LOW     '} disk: {free:.1f} GiB free here")
    policy = os.environ.get("OMP_WAIT_POLICY", "")
    if policy.lower() != "passive":
        lines.append(
            f"SLOW     OMP_WAIT_POLICY is {policy!r}: idle torch threads will take the env threads' cores; unset it"
        )
    lines.append(_step_an_env())
    healthy &= not lines[-1].startswith("BROKEN")
    return lines, healthy


def _step_an_env() -> str:
    from coterie.config import Atari, Env
    from coterie.envs.make import make_envs

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
