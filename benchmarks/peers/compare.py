"""Coterie beside other frameworks on this machine, in alternating turns, so that drift affects all alike.

    make peers
    python benchmarks/peers/compare.py [CASE ...] [--seconds 60] [--turns 5] [--out FILE.json] [--page]

Run it on an otherwise idle machine. Each case has one net and one number of passes over each sample. All frameworks
train in fp32; Coterie is also measured in bf16 where that is its default. The median of the turns counts. `--page`
writes the tables of docs/benchmarks/speed.md and docs/benchmarks/data/peers.json. Results of another processor in that
file are moved to one with their date in its name.
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
import time
from pathlib import Path
from typing import Any, NamedTuple

from coterie.build.precision import bf16_pays
from coterie.runs import machine

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))
from marked import replaced  # noqa: E402

DATA, PAGE = ROOT / "docs" / "benchmarks" / "data" / "peers.json", ROOT / "docs" / "benchmarks" / "speed.md"
OURS, START_S, WARM_S, BY = "Coterie", 120, 10, "python benchmarks/peers/compare.py --page"


class Entry(NamedTuple):
    name: str
    simulator: str
    precision: str
    command: list[str]  # of Coterie: what follows `coterie train`; of a peer: environment, script, arguments


def coterie(name: str, precision: str, *args: str) -> Entry:
    return Entry(f"{OURS} {name}", "EnvPool", precision, [*args, "--precision", precision])


def peer(name: str, simulator: str, *command: str) -> Entry:
    return Entry(name, simulator, "fp32", list(command))


_MLP = ("--env", "LunarLander-v3", "--model.normalize-obs", "False", "--model.hidden", "64", "64")
_PPO = ("--algo.unroll-length", "128", "--ppo.batch-size", "0", "--ppo.minibatch-size", "256", "--ppo.epochs", "4")
_TWO = ("--learners", "2", "--env.num-envs", "16")  # 32 envs in all
_NATURE = ("--env", "Breakout-v5", "--model.torso", "nature")
_64 = ("--env.num-envs", "64")
_DQN = ("dqn", *_NATURE, "--env.num-envs", "16", "--replay.capacity", "20000", "--q.learn-start", "1000")
_SIXTEEN, _ONE, _MANY = ("--envs", "16"), ("--envs", "1"), ("--envs", "128")
CASES: dict[str, tuple[str, list[Entry]]] = {
    "lunar-ppo": (
        "PPO, LunarLander, 64-64, 4 epochs",
        [
            coterie("gala-ppo, 2 learners", "fp32", "gala-ppo", *_MLP, *_PPO, *_TWO),
            coterie("ppo", "fp32", "ppo", *_MLP, *_PPO, "--env.num-envs", "32"),
            peer("one file, as in CleanRL", "EnvPool", "sb3", "single_file.py", "lunar"),
            peer("Stable-Baselines3 PPO", "EnvPool", "sb3", "sb3.py", "lunar", "ppo", "envpool"),
            peer("Stable-Baselines3 PPO", "gymnasium", "sb3", "sb3.py", "lunar", "ppo", "gymnasium"),
            peer("Sample Factory APPO", "EnvPool", "sample-factory", "appo.py", "lunar", "--epochs", "4"),
        ],
    ),
    "breakout-dqn": (
        "DQN, Breakout, Nature CNN, each env step trained on 8 times",
        [
            coterie("dqn", "bf16", *_DQN),
            coterie("dqn", "fp32", *_DQN),
            peer("Stable-Baselines3 DQN, 16 envs", "EnvPool", "sb3", "sb3.py", "breakout", "dqn", "envpool", *_SIXTEEN),
            peer("Stable-Baselines3 DQN, 1 env", "gymnasium", "sb3", "sb3.py", "breakout", "dqn", "gymnasium", *_ONE),
        ],
    ),
    "breakout-one-pass": (
        "Actor-critic, Breakout, Nature CNN, one pass",
        [
            coterie("gala-a2c, 2 learners", "bf16", "gala-a2c", *_NATURE, *_64, "--learners", "2"),
            coterie("gala-a2c, 2 learners", "fp32", "gala-a2c", *_NATURE, *_64, "--learners", "2"),
            coterie("impala-paper, 2 actors", "bf16", "impala-paper", *_NATURE),
            coterie("impala-paper, 2 actors", "fp32", "impala-paper", *_NATURE),
            coterie("a2c, 128 envs", "fp32", "a2c", *_NATURE, "--env.num-envs", "128"),
            peer("Sample Factory APPO", "EnvPool", "sample-factory", "appo.py", "breakout"),
            peer("Stable-Baselines3 A2C", "EnvPool", "sb3", "sb3.py", "breakout", "a2c", "envpool"),
            peer("Stable-Baselines3 A2C, 128 envs", "EnvPool", "sb3", "sb3.py", "breakout", "a2c", "envpool", *_MANY),
            peer("Stable-Baselines3 A2C", "gymnasium", "sb3", "sb3.py", "breakout", "a2c", "gymnasium"),
            peer("RLlib IMPALA", "gymnasium", "rllib", "impala.py", "breakout"),
        ],
    ),
}


def ours(args: list[str], seconds: float) -> float:
    """Train as a user does; env steps/s after the warm-up, from the run's own metrics."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        options = ["--steps", "1000000000000", "--out", str(out), "--log.every", "0.5", "--log.tensorboard", "False"]
        command = [sys.executable, "-m", "coterie", "train", *args, *options]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        metrics, asked = out / "metrics.jsonl", time.monotonic()
        while process.poll() is None and not metrics.exists() and time.monotonic() - asked < START_S:
            time.sleep(0.1)  # 128 Atari envs take seconds to make, and each takes up to 200 random steps
        try:
            process.communicate(timeout=WARM_S + seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
        text = process.communicate()[0]
        lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    marks = [(x["seconds"], x["env_steps"]) for x in lines if x["seconds"] >= WARM_S]
    if len(marks) < 2:
        raise SystemExit(f"coterie train {' '.join(args)} gave no rate:\n{text[-2000:]}")
    (t0, n0), (t1, n1) = marks[0], marks[-1]
    return float((n1 - n0) / (t1 - t0))


def theirs(command: list[str], seconds: float) -> float:
    env, script, *args = command
    python = ROOT / ".peers" / env / "bin" / "python"
    call = [str(python), str(Path(__file__).parent / script), *args, "--seconds", str(seconds)]
    done = subprocess.run(call, capture_output=True, text=True, timeout=seconds + 300, check=False)
    found = re.search(r'"steps_per_s": (\d+)', done.stdout)
    if found is None:
        raise SystemExit(f"{' '.join(call)} gave no rate:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return float(found[1])


def tables(data: dict[str, Any]) -> str:
    """A table for each case, the fastest first."""
    parts = [f"Two cores of {data['processor']}; [raw data](data/peers.json)."]
    for case in data["cases"].values():
        parts += [f"{case['title']}; {case['date']}, {case['turns']} turns of {case['seconds']:.0f} s:"]
        lines = ["| framework | simulator | precision | env steps/s, median | range |", "|---|---|---|---|---|"]
        for row in sorted(case["rows"], key=lambda row: -row["median"]):
            least, most = min(row["rates"]), max(row["rates"])
            rates = f"{row['median']:,.0f} | {least:,.0f} to {most:,.0f}"
            lines.append(f"| {row['name']} | {row['simulator']} | {row['precision']} | {rates} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--page", action="store_true")
    options = parser.parse_args()
    if options.page and options.out:
        parser.error("--page: its tables are those of docs/benchmarks/data/peers.json: leave out --out")
    cases = options.cases or list(CASES)
    if unknown := sorted(set(cases) - CASES.keys()):
        parser.error(f"CASE: {unknown[0]} is not one of {', '.join(CASES)}")
    peers = {e.command[0] for case in cases for e in CASES[case][1] if not e.name.startswith(OURS)}
    if absent := sorted(peer for peer in peers if not (ROOT / ".peers" / peer / "installed").exists()):
        parser.error(f"{', '.join(absent)} is not installed: make peers")
    out = options.out or DATA
    before = json.loads(out.read_text()) if out.exists() else {}
    about = {"processor": machine.describe()["processor"]}
    results, aside = before.get("cases", {}), None
    if before and before["processor"] != about["processor"]:
        aside = out.with_stem(f"{out.stem}-{max(case['date'] for case in results.values())}")
        if aside.exists():
            parser.error(f"--out: {out} is of another processor, and {aside.name} exists")
        results = {}
    for case in cases:
        title, entries = CASES[case][0], [e for e in CASES[case][1] if e.precision == "fp32" or bf16_pays("cpu")]
        rates: list[list[float]] = [[] for _ in entries]
        for turn in range(options.turns):
            order = list(range(len(entries)))
            for i in order if turn % 2 == 0 else reversed(order):
                entry = entries[i]
                measure = ours if entry.name.startswith(OURS) else theirs
                rates[i].append(round(measure(entry.command, options.seconds)))
                print(f"{case}: {entry.name}, {entry.simulator}, {entry.precision}: {rates[i][-1]:,.0f}", flush=True)
        rows = [
            {**entry._asdict(), "rates": rate, "median": statistics.median(rate)}
            for entry, rate in zip(entries, rates, strict=True)
        ]
        how = {"date": time.strftime("%Y-%m-%d"), "seconds": options.seconds, "turns": options.turns}
        results[case] = {"title": title, **how, "rows": rows}
        results = {name: results[name] for name in CASES if name in results}
        if aside and out.exists():
            out.rename(aside)
        aside = None
        out.write_text(json.dumps({**about, "cases": results}, indent=1) + "\n")
    if options.page:
        PAGE.write_text(replaced(PAGE.read_text(), "peers", BY, tables({**about, "cases": results})))


if __name__ == "__main__":
    main()
