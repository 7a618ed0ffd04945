"""Whether bf16 pays on this machine's processor: measured with a network for images, once, and kept in the user's cache
folder, so that all processes and later runs choose alike.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from coterie.algorithms.base import Compute
from coterie.config import Model
from coterie.models.torsos import build_torso
from coterie.parallel.threads import making
from coterie.runs import machine
from coterie.types import ObsSpec

_SAMPLES, _TURNS = 128, 4
_GAIN = 1.1  # bf16 must be that many times as fast to be chosen
# Its 8 bits change outputs and gradients of this network by 0.6% of the largest. A wrong kernel changes them by more;
# without AVX-512, torch adds up weight gradients in bf16, which changes them by 6%.
ROUNDING = 0.05


class Bf16(NamedTuple):
    """bf16 beside float32."""

    speed: float  # of a forward and backward pass; that of float32 is 1
    error: float  # largest difference of outputs and gradients, as a share of the largest value

    @property
    def pays(self) -> bool:
        return self.speed > _GAIN and self.error < ROUNDING


def bf16_pays(device: str) -> bool:
    """Whether `--precision auto` takes bf16 for images: on a GPU from compute capability 8 on, on a CPU as measured."""
    if device == "cuda":
        return torch.cuda.get_device_capability()[0] >= 8
    return _kept()


def measure(device: str) -> Bf16:
    """Passes of the Nature torso in both precisions, by turns, on one thread; half a second on a CPU."""
    with making():
        torso = build_torso({"": ObsSpec((4, 84, 84), "uint8")}, Model(torso="nature")).to(device)
        frames = torch.randint(0, 256, (_SAMPLES, 4, 84, 84), dtype=torch.uint8).to(device)
        seconds: dict[torch.dtype, list[float]] = {torch.float32: [], torch.bfloat16: []}
        found: dict[torch.dtype, list[torch.Tensor]] = {}
        for _ in range(_TURNS):
            for dtype, taken in seconds.items():
                begin = time.perf_counter()
                with Compute(dtype, device=torch.device(device)).autocast():
                    out = torso(frames)
                gradients = torch.autograd.grad(out.float().square().mean(), tuple(torso.parameters()))
                found[dtype] = [y.detach().float().cpu() for y in (out, *gradients)]  # waits for a GPU
                taken.append(time.perf_counter() - begin)
    pairs = zip(found[torch.float32], found[torch.bfloat16], strict=True)
    errors = torch.stack([(a - b).abs().max() / a.abs().max() for a, b in pairs])  # a NaN is the largest
    return Bf16(min(seconds[torch.float32]) / min(seconds[torch.bfloat16]), float(errors.max()))


@functools.cache
def _kept() -> bool:
    """What was measured on this processor with this torch. Where there is no file and none can be made, or it is
    damaged, what the processor's instructions promise, so that the processes of a run choose alike.
    """
    with suppress(OSError, RuntimeError, ValueError, TypeError, KeyError):  # RuntimeError: no home folder
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "coterie")
        about, flags = machine.arithmetic("cpu"), _instructions()
        key = json.dumps([about, sorted(flags), os.environ.get("ONEDNN_MAX_CPU_ISA", "")])
        path = cache / f"bf16-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
        with suppress(FileNotFoundError):
            return _read(path)
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=cache) as file:
            json.dump({**about, **measure("cpu")._asdict()}, file)
            file.flush()
            os.fsync(file.fileno())  # or a power cut leaves an empty file, which stays
            with suppress(FileExistsError):  # another process was faster: its measurement counts
                os.link(file.name, path)
        return _read(path)
    return bool(_instructions() & {"avx512_bf16", "amx_bf16", "bf16"})


def _read(path: Path) -> bool:
    kept = json.loads(path.read_text())
    return Bf16(float(kept["speed"]), float(kept["error"])).pays


def _instructions() -> set[str]:
    """The names of the processor's instructions."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return {name for line in lines if line.startswith(("flags", "Features")) for name in line.split()[2:]}
    return set()
