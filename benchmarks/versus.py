"""Coterie beside other frameworks on this machine, in alternating turns, so that drift meets both alike.

    python benchmarks/versus.py CASE [CASE ...] --peers DIR --scripts DIR [--seconds 60] [--turns 3] [--out FILE.json]

`--scripts` holds one script for each framework, which trains for SECONDS and prints `PEER name=.. sps=<env steps/s>` as
its last line; `--peers` holds their virtual environments (sb3, sf). Run it on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

# name: (arguments of ours: preset and options, (framework, script, its options), the ratio that is asked for)
_MLP = ["--env", "LunarLander-v3", "--model.normalize-obs", "False", "--model.hidden", "64", "64"]
CASES: dict[str, tuple[list[str], tuple[str, str, list[str]], float]] = {
    "ppo-nature-breakout": (
        [
            *("ppo", "--env", "Breakout-v5", "--model.torso", "nature", "--env.num-envs", "32"),
            *("--algo.unroll-length", "128", "--ppo.batch-size", "0", "--ppo.minibatch-size", "256"),
        ],
        ("sb3", "sb3_bench.py", ["algo=ppo", "env=breakout", "envs=32", "nsteps=128", "batch=256", "epochs=4"]),
        1.8,
    ),
    "a2c-lunar": (
        ["a2c", *_MLP, "--env.num-envs", "32", "--algo.unroll-length", "5", "--algo.gae-lambda", "1.0"],
        ("sb3", "sb3_bench.py", ["algo=a2c", "env=lunar", "envs=32", "nsteps=5"]),
        3.0,
    ),
    "ppo-lunar": (
        [
            *("ppo", *_MLP, "--env.num-envs", "32", "--algo.unroll-length", "128"),
            *("--ppo.minibatch-size", "256", "--ppo.epochs", "4"),
        ],
        ("sb3", "sb3_bench.py", ["algo=ppo", "env=lunar", "envs=32", "nsteps=128", "batch=256", "epochs=4"]),
        3.0,
    ),
    "one-pass-lunar": (
        [
            *("ppo", *_MLP, "--model.share", "yes", "--env.num-envs", "256", "--algo.unroll-length", "16"),
            *("--ppo.minibatch-size", "4096", "--ppo.epochs", "1"),
        ],
        ("sf", "sample_factory_bench.py", ["env=lunar", "backend=envpool", "async=1", "epochs=1"]),
        1.5,
    ),
}


def ours(seconds: float, args: list[str], warm: float) -> float:
    """Train in this process for `seconds` after a warm-up; env steps/s."""
    from coterie.cli import _train_config
    from coterie.roles import InlineLearner

    learner = InlineLearner(_train_config(args))
    begin, marks = time.perf_counter(), []

    def on_rollout(rollout: object) -> bool:
        now = time.perf_counter() - begin
        if now >= warm:
            marks.append((now, learner.progress.env_steps))
        return now >= warm + seconds

    learner.run(on_rollout)
    (t0, n0), (t1, n1) = marks[0], marks[-1]
    return (n1 - n0) / (t1 - t0)


def turn(command: list[str]) -> float:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.findall(r"sps=(\d+)", done.stdout)
    if not found:
        raise SystemExit(f"{' '.join(command)} gave no rate:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return float(found[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []])
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--scripts", type=Path)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--vec", default="", help="Stable-Baselines3's vectorisation: dummy or subproc")
    parser.add_argument("--ours", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ours:
        print(f"sps={ours(options.seconds, CASES[options.ours][0], warm=8):.0f}")
        return
    results = {}
    for case in options.cases or CASES:
        _, (peer, script, extra), asked = CASES[case]
        extra = [*extra, f"vec={options.vec}"] if options.vec and peer == "sb3" else extra
        rates: dict[str, list[float]] = {"coterie": [], peer: []}
        for _ in range(options.turns):
            rates["coterie"].append(turn([sys.executable, __file__, "--ours", case, "--seconds", str(options.seconds)]))
            python = str(options.peers / peer / "bin" / "python")
            rates[peer].append(turn([python, str(options.scripts / script), str(options.seconds), *extra]))
        ratio = statistics.median(a / b for a, b in zip(rates["coterie"], rates[peer], strict=True))
        results[case] = {"rates": rates, "ratio": round(ratio, 2), "asked": asked, "settings": [CASES[case][0], extra]}
        print(f"{case}: {ratio:.2f}x {peer} (asked {asked}) {rates}", flush=True)
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
