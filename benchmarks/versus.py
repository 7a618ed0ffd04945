"""Coterie beside other frameworks on this machine, in alternating turns, so that drift affects both alike.

    python benchmarks/versus.py CASE [CASE ...] --peers DIR --scripts DIR [--seconds 60] [--turns 3] [--out FILE.json]

`--scripts` holds one script for each framework, which trains for SECONDS and prints `PEER name=.. sps=<env steps/s>` as
its last line; `--peers` holds their virtual environments (sb3, sf, rllib). Run it on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

# name: (arguments of ours: preset and options, (framework, script, its options), the target of our rate over theirs)
_MLP = ["--env", "LunarLander-v3", "--model.normalize-obs", "False", "--model.hidden", "64", "64"]
_PPO = ["--algo.unroll-length", "128", "--ppo.batch-size", "0", "--ppo.minibatch-size", "256", "--ppo.epochs", "4"]
_A2C = ["--algo.unroll-length", "5", "--algo.gae-lambda", "1.0"]
_ONE_PASS = ["--model.share", "yes", "--algo.unroll-length", "16", "--ppo.minibatch-size", "4096", "--ppo.epochs", "1"]
_TWO = ["--learners", "2", "--env.num-envs", "16"]  # 32 simulators in all
_SB3_PPO_ATARI = ("sb3", "sb3_bench.py", ["algo=ppo", "env=breakout", "envs=32", "nsteps=128", "batch=256", "epochs=4"])
_SB3_PPO = ("sb3", "sb3_bench.py", ["algo=ppo", "env=lunar", "envs=32", "nsteps=128", "batch=256", "epochs=4"])
_SB3_A2C = ("sb3", "sb3_bench.py", ["algo=a2c", "env=lunar", "envs=32", "nsteps=5"])
_SF = ("sf", "sample_factory_bench.py", ["env=lunar", "backend=envpool", "async=1", "epochs=1"])
_SF_ATARI = ("sf", "sample_factory_bench.py", ["env=breakout"])
_RLLIB = ("rllib", "rllib_bench.py", [])
_SB3_DQN = ("sb3", "sb3_bench.py", ["algo=dqn", "env=breakout", "envs=1", "vec=dummy"])
_DQN = ["--q.learn-start", "1000", "--replay.capacity", "100000"]
_BREAKOUT = ["--env", "Breakout-v5", "--model.torso", "nature"]
CASES: dict[str, tuple[list[str], tuple[str, str, list[str]], float]] = {
    "ppo-nature-breakout": (["ppo", *_BREAKOUT, *_PPO, "--env.num-envs", "32"], _SB3_PPO_ATARI, 1.8),
    "a2c-lunar": (["a2c", *_MLP, *_A2C, "--env.num-envs", "32"], _SB3_A2C, 3.0),
    "ppo-lunar": (["ppo", *_MLP, *_PPO, "--env.num-envs", "32"], _SB3_PPO, 3.0),
    "one-pass-lunar": (["ppo", *_MLP, *_ONE_PASS, "--env.num-envs", "256"], _SF, 1.5),
    # Two learners, one on each core.
    "gala-ppo-nature-breakout": (["gala-ppo", *_BREAKOUT, *_PPO, *_TWO], _SB3_PPO_ATARI, 2.2),
    "gala-ppo-lunar": (["gala-ppo", *_MLP, *_PPO, *_TWO], _SB3_PPO, 3.0),
    "gala-a2c-lunar": (["gala-a2c", *_MLP, *_A2C, *_TWO], _SB3_A2C, 3.0),
    "allreduce-ppo-lunar": (["ppo", *_MLP, *_PPO, *_TWO, "--ppo.minibatch-size", "128"], _SB3_PPO, 3.0),
    "allreduce-a2c-lunar": (["a2c", *_MLP, *_A2C, *_TWO], _SB3_A2C, 3.0),
    # Each env step is trained on 8 times. Learning begins at once.
    "dqn-nature-breakout": (["dqn", *_BREAKOUT, *_DQN, "--env.num-envs", "16"], _SB3_DQN, 2.6),
    "hogwild-dqn-nature-breakout": (
        ["dqn", *_BREAKOUT, *_DQN, "--env.num-envs", "8", "--learners", "2", "--exchange", "hogwild"],
        _SB3_DQN,
        3.0,
    ),
    # Decoupled actors, one pass over each sample. The learner is the bottleneck, so its actors need no second group.
    "impala-nature-breakout": (["impala", *_BREAKOUT, "--env.groups", "1"], _SF_ATARI, 2.0),
    "impala-nature-breakout-rllib": (["impala", *_BREAKOUT, "--env.groups", "1"], _RLLIB, 2.0),
    "one-pass-lunar-two": (
        ["gala-ppo", *_MLP, *_ONE_PASS, "--learners", "2", "--env.num-envs", "128", "--ppo.minibatch-size", "2048"],
        _SF,
        2.0,
    ),
}


def ours(seconds: float, args: list[str], warm: float = 10) -> float:
    """Train as a user does, for `seconds` after a warm-up; env steps/s from the run's own metrics."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        options = ["--steps", "1000000000000", "--out", str(out), "--log.every", "0.5", "--log.tensorboard", "False"]
        process = subprocess.Popen(
            [sys.executable, "-m", "coterie", "train", *args, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        try:
            process.communicate(timeout=warm + seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
        text = process.communicate()[0].decode()
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        marks = [(x["seconds"], x["env_steps"]) for x in lines if warm <= x["seconds"] <= warm + seconds]
        if len(marks) < 2:
            raise SystemExit(f"coterie train {' '.join(args)} gave no rate:\n{text[-2000:]}")
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
    options = parser.parse_args()
    results = {}
    for case in options.cases or CASES:
        _, (peer, script, extra), target = CASES[case]
        extra = [*extra, f"vec={options.vec}"] if options.vec and peer == "sb3" else extra
        rates: dict[str, list[float]] = {"coterie": [], peer: []}
        for _ in range(options.turns):
            rates["coterie"].append(round(ours(options.seconds, CASES[case][0])))
            python = str(options.peers / peer / "bin" / "python")
            rates[peer].append(turn([python, str(options.scripts / script), str(options.seconds), *extra]))
        ratio = statistics.median(a / b for a, b in zip(rates["coterie"], rates[peer], strict=True))
        results[case] = {
            "rates": rates,
            "ratio": round(ratio, 2),
            "target": target,
            "settings": [CASES[case][0], extra],
        }
        print(f"{case}: {ratio:.2f}x {peer} (target {target}) {rates}", flush=True)
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
