"""Rates of the architectures on a machine with a GPU: Breakout, `coterie bench` for one case after the other.

    python benchmarks/gpu.py [--seconds 8] [--only NAME ...] [--out FILE.json]

Each case is a process of its own with a time limit, so that one that fails leaves the others.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

import torch

from coterie.runs.machine import describe

NATURE = "--env Breakout-v5 --model.torso nature"
MANY = "--algo.unroll-length 20 --central.batch-size 128 --env.num-envs 512"
CASES = {
    "a2c": f"a2c {NATURE} --env.num-envs 256",
    "a2c, V-trace": f"a2c {NATURE} --env.num-envs 512 --algorithm vtrace --algo.unroll-length 20",
    "ppo": f"ppo {NATURE} --env.num-envs 128 --ppo.batch-size 16384 --ppo.minibatch-size 2048 --ppo.epochs 4",
    "impala": f"impala {NATURE}",
    "seed-vtrace": f"seed-vtrace {NATURE} {MANY}",
    "seed-vtrace, 4 hosts": f"seed-vtrace {NATURE} {MANY} --actors 4",
    "gala-a2c, 4 learners": f"gala-a2c {NATURE} --learners 4 --env.num-envs 64",
    "impala-deep": "impala-deep --env Breakout-v5",
    "seed-vtrace, ResNet": "seed-vtrace --env Breakout-v5 --env.num-envs 512 --central.batch-size 64",
    "dqn": "dqn --env Breakout-v5 --replay.capacity 100000",
    "seed-r2d2": "seed-r2d2 --env Breakout-v5 --env.num-envs 128 --replay.capacity 100000",
}


def measure(options: str, seconds: float) -> dict[str, Any]:
    """The result of one bench, or its error."""
    command = [sys.executable, "-m", "coterie", "bench", *options.split(), "--seconds", str(seconds), "--json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=25 + 3 * seconds)
    except subprocess.TimeoutExpired as error:
        return {"error": f"not done in {error.timeout:g} s"}
    if done.returncode:
        return {"error": done.stderr[-2000:]}
    return dict(json.loads(done.stdout))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    found: dict[str, Any] = {"recorded": str(date.today()), "machine": describe(), "gpu": gpu, "cores": os.cpu_count()}
    found["cases"] = {}
    for name in options.only:
        found["cases"][name] = result = {"options": CASES[name], **measure(CASES[name], options.seconds)}
        if "error" in result:
            print(f"{name}: {result['error']}", flush=True)
        else:
            rates = (f"{k} {result[k]:,.0f}" for k in ("env_only", "acting", "training"))
            print(f"{name}: {', '.join(rates)}; {result['core_us_per_step']} {result['stages']}", flush=True)
        if options.out:
            options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
