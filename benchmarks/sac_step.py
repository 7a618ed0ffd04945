"""CPU time of one optimizer step of SAC on Hopper-v5: Coterie's, Stable-Baselines3's, and a minimal loop's.

    make peers
    python benchmarks/sac_step.py [--turns 9] [--out docs/benchmarks/data/sac-step.json]

All have two layers of 256 units, batches of 256, one torch thread, and an optimizer step for every env step. Each is a
process of its own; they take turns of 112 steps, in reversed order every other time. CPU time counts all threads of a
process: other work on the machine prolongs it through the caches only. `loop`: with env steps, acting and replay;
`train`: of Stable-Baselines3, `train` alone; `minimal`: forward and backward passes, Adam and target on one fixed
batch, hand-written, no replay, no checks.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
STEPS, WARM = 112, 224  # a turn's optimizer steps, in whole rollouts of Coterie (16), and those before the first turn
KINDS = ("coterie fp32", "coterie bf16", "sb3 loop", "sb3 train", "minimal")


def answer(seconds: float) -> None:
    """Tell the parent, and wait until it is this process's turn again."""
    print("turn", seconds, flush=True)
    sys.stdin.readline()


def repeat(call: Callable[[], object], steps: int) -> None:
    while True:
        begin = time.process_time()
        call()
        answer((time.process_time() - begin) / steps)


def coterie(precision: str) -> None:
    from coterie import presets
    from coterie.build.resources import resolve_config
    from coterie.roles.learner_process import LearnerProcess

    options: dict[str, Any] = {"q.learn_start": 2_000, "steps": 10**9, "device": "cpu", "precision": precision}
    process = LearnerProcess(resolve_config(presets.sac("Hopper-v5", **options)))
    begin, done = time.process_time(), 0

    def on_rollout(rollout: object) -> bool:
        nonlocal begin, done
        steps = process.progress.learner_steps
        if steps - done >= (STEPS if done else WARM):
            answer((time.process_time() - begin) / (steps - done))
            begin, done = time.process_time(), steps
        return False

    process.run(on_rollout)


def sb3(part: str) -> None:
    import torch
    from stable_baselines3 import SAC  # type: ignore[import-not-found]

    torch.set_num_threads(1)
    model = SAC("MlpPolicy", "Hopper-v5", device="cpu", learning_starts=2_000)
    model.learn(2_000 + WARM)
    loop = part == "loop"
    repeat(lambda: model.learn(STEPS, reset_num_timesteps=False) if loop else model.train(STEPS, 256), STEPS)


def minimal() -> None:
    import torch
    import torch.nn.functional as F
    from torch import nn

    torch.set_num_threads(1)
    obs_size, actions, n = 11, 3, 256

    def mlp(inputs: int, outputs: int) -> nn.Sequential:
        layers = [nn.Linear(inputs, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, outputs)]
        return nn.Sequential(*layers)

    policy, critics, targets = mlp(obs_size, 2 * actions), *([mlp(obs_size + actions, 1) for _ in "12"] for _ in "12")
    weights: list[torch.Tensor] = [p for q in critics for p in q.parameters()]
    followers: list[torch.Tensor] = [p for q in targets for p in q.parameters()]
    log_alpha = torch.zeros((), requires_grad=True)
    adam = torch.optim.Adam([*policy.parameters(), *weights, log_alpha], lr=3e-4, fused=True)
    obs, after, action = torch.randn(n, obs_size), torch.randn(n, obs_size), torch.rand(n, actions) * 2 - 1
    reward = torch.randn(n)

    def sample(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, log_std = policy(x).chunk(2, -1)
        log_std, noise = log_std.clamp(-20, 2), torch.randn(n, actions)
        y = mean + log_std.exp() * noise
        slope = 2 * (math.log(2) - y - F.softplus(-2 * y))
        return y.tanh(), (-0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi) - slope).sum(-1)

    def least(of: list[nn.Sequential], x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        both = torch.cat((x, a), -1)
        return torch.minimum(of[0](both), of[1](both))[:, 0]

    def step() -> None:
        alpha = log_alpha.exp().detach()
        with torch.no_grad():
            then, log_prob = sample(after)
            wanted = reward + 0.99 * (least(targets, after, then) - alpha * log_prob)
        pair = torch.cat((obs, action), -1)
        loss = sum(0.5 * F.mse_loss(q(pair)[:, 0], wanted) for q in critics)
        now, log_prob = sample(obs)
        for p in weights:
            p.requires_grad_(False)
        loss = loss + (alpha * log_prob - least(critics, obs, now)).mean()
        for p in weights:
            p.requires_grad_(True)
        (loss - (log_alpha * (log_prob.detach() - actions)).mean()).backward()  # type: ignore[no-untyped-call]
        adam.step()
        adam.zero_grad(set_to_none=False)
        with torch.no_grad():
            torch._foreach_lerp_(followers, weights, 0.005)

    def steps() -> None:
        for _ in range(STEPS):
            step()

    repeat(steps, STEPS)


def child(kind: str) -> None:
    what, _, part = kind.partition(" ")
    if what == "coterie":
        coterie(part)
    elif what == "sb3":
        sb3(part)
    else:
        minimal()


def read(process: subprocess.Popen[str]) -> float:
    """What the process answers next, in milliseconds."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("turn"):
            return float(line.split()[1]) * 1e3
    raise SystemExit("a process has ended")


def turn(process: subprocess.Popen[str]) -> float:
    print(file=process.stdin, flush=True)
    return read(process)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    o = parser.parse_args()
    if o.child:
        return child(o.child)
    from coterie.runs import machine

    processes = {}
    for kind in KINDS:
        python = ROOT / ".peers" / "sb3" / "bin" / "python" if kind.startswith("sb3") else sys.executable
        command = [str(python), __file__, "--child", kind]
        processes[kind] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        read(processes[kind])  # of the steps before the first turn
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for i in range(o.turns):
        for kind in list(KINDS)[:: -1 if i % 2 else 1]:
            found[kind].append(round(turn(processes[kind]), 3))
    for process in processes.values():
        process.kill()
    for kind, times in found.items():
        print(f"{kind}: {statistics.median(times):.2f} ms ({min(times):.2f} to {max(times):.2f})")
    if o.out:
        about = {"date": time.strftime("%Y-%m-%d"), "processor": machine.describe()["processor"], "steps": STEPS}
        o.out.write_text(json.dumps({**about, "cpu_ms_per_optimizer_step": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
