"""What replay costs on one core: prioritised inserts, draws, frames beside a plain copy, and its memory.

    python benchmarks/replay.py [--seconds 3] [--out FILE.json]

Rates without frames are of CartPole's four numbers, three-step returns, alpha 0.6; turns alternate, medians are told.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from coterie.replay.ring import Ring
from coterie.types import ActionSpec, ObsSpec, Rollout, Spec

VECTOR = Spec("vector", {"": ObsSpec((4,), "float32")}, ActionSpec("categorical", (2,)))
ATARI = Spec("atari", {"": ObsSpec((4, 84, 84), "uint8")}, ActionSpec("categorical", (6,)))


def rollout(spec: Spec, t: int, b: int) -> Rollout:
    """Rows of no meaning whose stacks go on, as an env's do."""
    rng = np.random.default_rng(0)
    if spec is ATARI:
        frames = rng.integers(0, 255, (t, b, 84, 84), np.uint8)
        obs = np.stack([frames[np.arange(i, i + t + 1) % t] for i in range(4)], 2)
    else:
        obs = rng.random((t + 1, b, 4), np.float32)
        obs[-1] = obs[0]  # the same rollout goes on from itself
    none, flags = torch.zeros(t + 1, b), torch.zeros(t, b, dtype=torch.bool)
    action = torch.zeros(t + 1, b, dtype=torch.long)
    return Rollout(
        torch.from_numpy(obs), torch.zeros(t + 1, b, dtype=torch.bool), action, none, action[1:], none[1:], flags,
        flags, none[1:], none, action[1:], torch.arange(b),
    )  # fmt: skip


def rate(call: Callable[[], int], seconds: float) -> float:
    call()
    begin, done = time.perf_counter(), 0
    while (spent := time.perf_counter() - begin) < seconds:
        done += call()
    return done / spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {}
    t, b = 20, 64
    vector = Ring(VECTOR, b, 1_000_000, 0.99, 3, alpha=0.6)
    some = rollout(VECTOR, t, b)
    reward = some.reward.numpy()
    while vector.size < 900_000:
        vector.add(some, reward)
    frames = Ring(ATARI, 16, 100_000, 0.99, 3, alpha=0.6, frames=4)
    stacks = rollout(ATARI, t, 16)
    while frames.size < 90_000:
        frames.add(stacks, stacks.reward.numpy())
    large, into = np.ones((25_000, 4, 84, 84), np.uint8), np.empty((64, 4, 84, 84), np.uint8)
    rng = np.random.default_rng(0)

    def insert() -> int:
        vector.add(some, reward)
        return t * b

    def draw(n: int) -> Callable[[], int]:
        def call() -> int:
            picks = vector.draw(n, 0.4)
            vector.gather(picks)
            vector.update(picks, np.ones(n))
            return n

        return call

    def gather() -> int:
        frames.gather(frames.draw(32, 0.4))
        return into.nbytes  # 32 stacks, and the 32 that follow them

    def copy() -> int:
        begin = int(rng.integers(24_900))
        np.copyto(into, large[begin : begin + 64])
        return into.nbytes

    calls = {
        "inserts_per_s": insert,
        "draws_per_s_32": draw(32),
        "draws_per_s_512": draw(512),
        "frames_bytes_per_s": gather,
        "copy_bytes_per_s": copy,
    }
    for _ in range(3):
        for name, call in calls.items():
            found.setdefault(name, []).append(rate(call, options.seconds))
    told = {name: statistics.median(values) for name, values in found.items()}
    told["frames_over_copy"] = statistics.median(
        a / b for a, b in zip(found["frames_bytes_per_s"], found["copy_bytes_per_s"], strict=True)
    )
    told["million_atari_rows_bytes"] = Ring.bytes_for(ATARI, 16, 1_000_000, 4)
    print(json.dumps({k: float(f"{v:.4g}") for k, v in told.items()}, indent=1))
    if options.out:
        options.out.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
