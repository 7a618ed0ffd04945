"""A forward and backward pass of the image networks on one core: as it is, and as it was.

    python benchmarks/torso_step.py [--turns 5] [--out docs/benchmarks/data/torso-step.json]

Milliseconds for each sample of random frames, 84x84x4, medians of alternating turns; a turn is the fastest of four
passes. *Before*: the first layer is a plain convolution, in bf16 with the channels first, and malloc keeps freed blocks
of up to 32 MiB only.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.algorithms.base import Compute
from coterie.build.precision import bf16_pays
from coterie.config import Model
from coterie.models.mlp import compute_dtype
from coterie.models.torsos import Frames, build_torso
from coterie.parallel import hardware
from coterie.parallel.hardware import available_cores, keep_freed_memory
from coterie.runs import machine
from coterie.types import ObsSpec

CASES = [(torso, n, p) for torso in ("a3c", "nature", "impala") for n in (32, 320) for p in ("fp32", "bf16")]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def plain(self: Frames, x: Tensor) -> Tensor:
    """`Frames.forward` as it was."""
    dtype = compute_dtype(self.conv.weight)
    layout = torch.channels_last if dtype == torch.float32 else torch.contiguous_format
    weight = self.conv.weight * (1 / 255)
    return F.conv2d(x.to(dtype, memory_format=layout), weight, self.conv.bias, self.conv.stride, self.conv.padding)


def passes(torso: str, samples: int, precision: str, before: bool) -> tuple[float, float]:
    """Milliseconds of a sample: forward and backward, and forward alone without a graph."""
    if before:
        hardware._KEPT_BYTES = hardware._KEPT_BYTES[-1:]  # type: ignore[assignment]
        Frames.forward = plain  # type: ignore[method-assign]
    torch.set_num_threads(1)
    keep_freed_memory()
    net = build_torso({"": ObsSpec((4, 84, 84), "uint8")}, Model(torso=torso))
    acting = build_torso({"": ObsSpec((4, 84, 84), "uint8")}, Model(torso=torso)).to(DTYPES[precision])
    frames = torch.randint(0, 256, (samples, 4, 84, 84), dtype=torch.uint8)
    compute, taken = Compute(DTYPES[precision]).autocast, [list[float](), list[float]()]
    for _ in range(5):
        begin = time.perf_counter()
        with compute():
            out = net(frames)
        out.float().square().mean().backward()
        middle = time.perf_counter()
        with torch.inference_mode():
            acting(frames)
        taken[0].append(middle - begin)
        taken[1].append(time.perf_counter() - middle)
    step, act = (1e3 * min(x[1:]) / samples for x in taken)
    return step, act


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        torso, samples, precision, before = options.one
        print(*passes(torso, int(samples), precision, before == "before"))
        return
    os.sched_setaffinity(0, available_cores()[:1])
    rows = []
    for torso, samples, precision in CASES:
        if precision == "bf16" and not bf16_pays("cpu"):
            continue
        found: dict[str, list[list[float]]] = {"before": [], "now": []}
        for when in list(found) * options.turns:
            call = [sys.executable, __file__, "--one", torso, str(samples), precision, when]
            done = subprocess.run(call, capture_output=True, text=True, check=True)
            found[when].append([float(x) for x in done.stdout.split()])
        middle = {
            f"{when}_{kind}": statistics.median(x[k] for x in found[when])
            for when in found
            for k, kind in ((0, "step"), (1, "act"))
        }
        rows.append({"torso": torso, "samples": samples, "precision": precision, **middle, "turns": found})
        ratios = [statistics.median(a[k] / b[k] for a, b in zip(*found.values(), strict=True)) for k in (0, 1)]
        rates = " ".join(f"{k} {x:.3f}" for k, x in middle.items())
        print(f"{torso} {samples} {precision}: {rates}; {ratios[0]:.2f} and {ratios[1]:.2f} times as fast", flush=True)
    if options.out:
        about = {"processor": machine.processor(), "date": str(date.today())}
        options.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
