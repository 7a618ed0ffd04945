"""Whether bf16 pays on this machine: measured with a network for images, once, and kept in the user's cache folder."""

from __future__ import annotations

import functools
import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from coterie.algorithms.base import autocast
from coterie.config import Model
from coterie.models.torsos import build_torso
from coterie.runs import machine
from coterie.runs.files import write_whole
from coterie.types import ObsSpec

_SAMPLES = 32
_GAIN = 1.1  # times the speed of float32 that outweigh fewer digits
ROUNDING = 0.05  # a larger difference, as a share of the largest value, is not that of 8 bits


class Bf16(NamedTuple):
    """bf16 beside float32."""

    speed: float  # of a forward and backward pass, float32 is 1
    error: float  # largest difference of outputs and gradients, as a share of the largest value

    @property
    def pays(self) -> bool:
        return self.speed > _GAIN and self.error < ROUNDING


def bf16_pays(device: str) -> bool:
    """Whether `--precision auto` takes bf16 for images."""
    if device == "cuda":
        return torch.cuda.get_device_capability()[0] >= 8
    return _kept().pays


def measure(device: str) -> Bf16:
    """Passes of the Nature torso in both precisions, by turns, on one thread; 0.3 s. Leaves torch's random numbers."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            torso = build_torso({"": ObsSpec((4, 84, 84), "uint8")}, Model(torso="nature")).to(device)
            frames = torch.randint(0, 256, (_SAMPLES, 4, 84, 84), dtype=torch.uint8).to(device)
        taken: dict[torch.dtype, list[float]] = {torch.float32: [], torch.bfloat16: []}
        found: dict[torch.dtype, list[torch.Tensor]] = {}
        for _ in range(5):
            for dtype, seconds in taken.items():
                begin = time.perf_counter()
                with autocast(torch.device(device), dtype)():
                    out = torso(frames)
                gradients = torch.autograd.grad(out.float().square().mean(), tuple(torso.parameters()))
                found[dtype] = [y.detach().float().cpu() for y in (out, *gradients)]  # waits for a GPU
                seconds.append(time.perf_counter() - begin)
    finally:
        torch.set_num_threads(threads)
    pairs = zip(found[torch.float32], found[torch.bfloat16], strict=True)
    error = max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs)
    return Bf16(min(taken[torch.float32]) / min(taken[torch.bfloat16]), error)


@functools.cache
def _kept() -> Bf16:
    """The measurement of this processor and this torch; made, and kept if that is possible, where there is none."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    path, about = Path(cache, "coterie", "bf16.json"), machine.arithmetic("cpu")
    with suppress(OSError, ValueError, TypeError, KeyError):
        kept = json.loads(path.read_text())
        if kept["machine"] == about:
            return Bf16(float(kept["speed"]), float(kept["error"]))
    made = measure("cpu")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps({"machine": about, **made._asdict()}), durable=False)
    return made
