"""The cost of replay on one core: prioritized inserts, samples, frames beside a plain copy, and its memory.

    python benchmarks/replay.py [--seconds 3] [--out FILE.json]

Rates without frames are of CartPole's four numbers, three-step returns, alpha 0.6; medians of alternating turns.
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

from coterie.parallel.hardware import keep_freed_memory
from coterie.replay.storage import Capacity
from coterie.replay.transitions import TransitionReplay
from coterie.types import ActionSpec, ObsSpec, Rollout, Spec

VECTOR = Spec("vector", {"": ObsSpec((4,), "float32")}, ActionSpec("categorical", (2,)))
ATARI = Spec("atari", {"": ObsSpec((4, 84, 84), "uint8")}, ActionSpec("categorical", (6,)))


def rollout(spec: Spec, t: int, b: int) -> Rollout:
    """Meaningless rows whose frame stacks are consecutive, like an env's."""
    rng = np.random.default_rng(0)
    if spec is ATARI:
        frames = rng.integers(0, 255, (t, b, 84, 84), np.uint8)
        obs = np.stack([frames[np.arange(i, i + t + 1) % t] for i in range(4)], 2)
    else:
        obs = rng.random((t + 1, b, 4), np.float32)
        obs[-1] = obs[0]  # the same rollout follows itself
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
    keep_freed_memory()  # as learners do
    found: dict[str, list[float]] = {}
    t, b = 20, 64
    vector = TransitionReplay(Capacity(VECTOR, b, 1_000_000), 0.99, 3, alpha=0.6)
    some = rollout(VECTOR, t, b)
    reward = some.reward.numpy()
    while vector.size < 900_000:
        vector.add(some, reward)
    frames = TransitionReplay(Capacity(ATARI, 16, 100_000, 4), 0.99, 3, alpha=0.6)
    stacks = rollout(ATARI, t, 16)
    while frames.size < 90_000:
        frames.add(stacks, stacks.reward.numpy())
    large, into = np.ones((25_000, 4, 84, 84), np.uint8), np.empty((1024, 4, 84, 84), np.uint8)
    other = np.empty_like(large)
    rng = np.random.default_rng(0)

    def insert() -> int:
        vector.add(some, reward)
        return t * b

    def draw(n: int) -> Callable[[], int]:
        def call() -> int:
            picks = vector.priorities.draw(n, 0.4)
            vector.gather(picks)
            vector.priorities.update(picks, np.ones(n))
            return n

        return call

    # n stacks, and the n that follow them.
    def gather(n: int) -> Callable[[], int]:
        def call() -> int:
            frames.gather(frames.priorities.draw(n, 0.4))
            return into[: 2 * n].nbytes

        return call

    def read(n: int) -> Callable[[], int]:
        some = [frames.priorities.draw(2 * n, 0.4).index for _ in range(64)]

        def call() -> int:
            frames.obs[""].read(some[int(rng.integers(64))])
            return into[: 2 * n].nbytes

        return call

    def copy(n: int) -> Callable[[], int]:
        def call() -> int:
            begin = int(rng.integers(len(large) - 2 * n))
            np.copyto(into[: 2 * n], large[begin : begin + 2 * n])
            return into[: 2 * n].nbytes

        return call

    def copy_all() -> int:
        np.copyto(other, large)
        return large.nbytes

    calls = {"inserts_per_s": insert, "copy_bytes_per_s_all": copy_all}
    for n in (32, 512):
        calls[f"draws_per_s_{n}"] = draw(n)
        calls[f"frames_bytes_per_s_{n}"], calls[f"read_bytes_per_s_{n}"] = gather(n), read(n)
        calls[f"copy_bytes_per_s_{n}"] = copy(n)
    for _ in range(3):
        for name, call in calls.items():
            found.setdefault(name, []).append(rate(call, options.seconds))
    results = {name: statistics.median(values) for name, values in found.items()}
    for n in (32, 512):
        for part in ("frames", "read"):  # with the drawing and the returns, and without them
            pairs = zip(found[f"{part}_bytes_per_s_{n}"], found[f"copy_bytes_per_s_{n}"], strict=True)
            results[f"{part}_over_copy_{n}"] = statistics.median(a / b for a, b in pairs)
    results["million_atari_rows_bytes"] = TransitionReplay.bytes_for(Capacity(ATARI, 16, 1_000_000, 4))
    print(json.dumps({k: float(f"{v:.4g}") for k, v in results.items()}, indent=1))
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
