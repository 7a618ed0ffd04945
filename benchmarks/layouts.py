"""Rates of the architectures on Breakout, and of small networks (`vectors`): `coterie bench` for one case after the
other, on a CPU or on a GPU.

    python benchmarks/layouts.py cpu|vectors|gpu [--seconds 60] [--only NAME ...] [--out FILE.json] [--page]

Each case is a process of its own with a time limit, so that one that fails leaves the others. `--out` keeps what is in
the file of other cases, and a file of another machine under another name; `--page` writes the table of
docs/benchmarks/speed.md from it. Measure on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from datetime import date
from itertools import product
from pathlib import Path
from typing import Any

import torch
from marked import replaced

from coterie.runs.machine import describe

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks" / "speed.md"
NATURE = "--env Breakout-v5 --model.torso nature"
MANY = "--algo.unroll-length 20 --central.batch-size 128 --env.num-envs 512"
PLAIN = "--graphs False"
VTRACE = f"a2c {NATURE} --env.num-envs 512 --algorithm vtrace --algo.unroll-length 20"
PPO = f"ppo {NATURE} --env.num-envs 128 --ppo.batch-size 16384 --ppo.minibatch-size 2048 --ppo.epochs 4"
SHRINKING = "ppo --env Breakout-v5 --env.num-envs 32 --ppo.clip-schedule.kind linear"
SAC = "sac --env Pendulum-v1 --q.learn-start 2000"
DQN = "dqn --env Breakout-v5 --replay.capacity 100000"
GPU = {
    "a2c, V-trace": VTRACE,
    "a2c, V-trace, no graphs": f"{VTRACE} {PLAIN}",
    "ppo": PPO,
    "ppo, no graphs": f"{PPO} {PLAIN}",
    "ppo, 256 samples, a clip that shrinks": SHRINKING,
    "ppo, 256 samples, a clip that shrinks, no graphs": f"{SHRINKING} {PLAIN}",
    "sac": SAC,
    "sac, no graphs": f"{SAC} {PLAIN}",
    "dqn": DQN,
    "dqn, no graphs": f"{DQN} {PLAIN}",
    "a2c": f"a2c {NATURE} --env.num-envs 256",
    "impala": f"impala-paper {NATURE}",
    "seed-vtrace": f"seed-vtrace {NATURE} {MANY}",
    "seed-vtrace, 4 hosts": f"seed-vtrace {NATURE} {MANY} --actors 4",
    "gala-a2c, 4 learners": f"gala-a2c {NATURE} --learners 4 --env.num-envs 64",
    "impala-deep": "impala-deep --env Breakout-v5",
    "seed-vtrace, ResNet": "seed-vtrace --env Breakout-v5 --env.num-envs 512 --central.batch-size 64",
    "seed-r2d2": "seed-r2d2 --env Breakout-v5 --env.num-envs 128 --replay.capacity 100000 --q.learn-start 30000",
}
TWO = "--learners 2 --env.num-envs 64 --env.decorrelate 0"
LAYOUTS = {
    "inline": "a2c --learners 1 --env.num-envs 128",
    "gossip": "gala-a2c --learners 2 --env.num-envs 64 --algo.unroll-length 5",
    "hogwild": f"a2c {TWO} --exchange hogwild",
    "allreduce": f"a2c {TWO}",
    "decoupled (IMPALA)": "impala-paper",
    "central (SEED)": "seed-vtrace --algo.unroll-length 20",
}
CPU = {
    f"{layout}, {net}, {precision}": f"{options} --env Breakout-v5 --model.torso {net} --precision {precision}"
    for net, precision, (layout, options) in product(("a3c", "nature"), ("fp32", "bf16"), LAYOUTS.items())
}
VECTORS = {
    f"{preset}, {env}, fp32": f"{preset} --env {env} --precision fp32{'' if preset == 'impala' else ' --learners 1'}"
    for preset, env in (
        ("ppo", "LunarLander-v3"),
        ("ppo", "CartPole-v1"),
        ("ppo", "HalfCheetah-v5"),
        ("a2c", "LunarLander-v3"),
        ("impala", "LunarLander-v3"),
        ("dqn", "LunarLander-v3"),
    )
}
CASES = {"cpu": CPU, "vectors": VECTORS, "gpu": GPU}
PAGES = {"cpu": "layouts", "vectors": "vectors"}  # the table's name on the page, and that of its raw data


def measure(options: str, seconds: float) -> dict[str, Any]:
    """The result of one bench, or its error."""
    command = [sys.executable, "-m", "coterie", "bench", *options.split(), "--seconds", str(seconds), "--json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60 + 2 * seconds)
    except subprocess.TimeoutExpired as error:
        return {"error": f"not done in {error.timeout:g} s"}
    if done.returncode:
        return {"error": done.stderr[-2000:]}
    return dict(json.loads(done.stdout))


def describe_rates(result: dict[str, Any]) -> str:
    if "error" in result:
        return str(result["error"])
    rates = (f"{k} {result[k]:,.0f}" for k in ("env_only", "acting", "training", "ceiling"))
    reached = f"{result['training_over_ceiling']:.3f} of the ceiling, spread {result['spread']}"
    return f"{', '.join(rates)}; {reached}; {result['core_us_per_step']} {result['stages']}"


def table(found: dict[str, Any], page: str) -> str:
    machine, first = found["machine"], "layout | net" if page == "layouts" else "preset | env"
    lines = [
        f"{machine['processor']}, {machine['cores']} cores; {found['recorded']}; [raw data](data/{page}.json).",
        "",
        f"| {first}, precision | env only | acting | training (range) | / env only | / ceiling | spread | turns |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, r in found["cases"].items():
        layout, _, net = name.partition(", ")
        if "error" in r:
            lines.append(f"| {layout} | {net} | {r['error']} | | | | | | |")
            continue
        rates = r["rounds"]["training"]
        spread = "" if r["spread"] is None else f"{100 * r['spread']:.1f}%"
        lines.append(
            f"| {layout} | {net} | {r['env_only']:,.0f} | {r['acting']:,.0f} "
            f"| {r['training']:,.0f} ({min(rates):,.0f} to {max(rates):,.0f}) | {r['training_over_env_only']:.2f} "
            f"| {r['training_over_ceiling']:.2f} | {spread} | {len(rates)} of {r['turn_s']:.1f} s |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", choices=CASES)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--only", nargs="*", metavar="NAME", help="cases whose names have this in them")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--page", action="store_true")
    options = parser.parse_args()
    if options.page and not (options.out and options.cases in PAGES):
        parser.error("--page: the page's tables are those of `cpu` and `vectors`, from a file: give --out")
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    machine = {k: describe()[k] for k in ("processor", "cores", "versions")}
    found: dict[str, Any] = {"recorded": str(date.today()), "machine": machine, "gpu": gpu, "cores": os.cpu_count()}
    cases, aside = CASES[options.cases], None
    chosen = [name for name in cases if options.only is None or any(part in name for part in options.only)]
    if not chosen:
        parser.error(f"--only: none of {', '.join(cases)} has this in its name")
    before = json.loads(options.out.read_text()) if options.out and options.out.exists() else found
    if any(before.get(key) != found[key] for key in ("machine", "gpu")):
        aside = options.out.with_stem(f"{options.out.stem}-{before.get('recorded', 'earlier')}")
        if aside.exists():
            parser.error(f"--out: {options.out} was measured on another machine or GPU, or with other versions")
        before = found
    done = found["cases"] = dict(before.get("cases", {}))
    for name in chosen:
        done[name] = {"options": cases[name], **measure(cases[name], options.seconds)}
        print(f"{name}: {describe_rates(done[name])}", flush=True)
        if aside:
            print(f"{options.out} was measured on another machine or GPU, or with other versions: it is {aside} now")
            options.out.rename(aside)
            aside = None
        if options.out:
            options.out.write_text(json.dumps(found, indent=1) + "\n")
    if options.page:
        found["cases"] = {name: done[name] for name in cases if name in done}
        name, by = PAGES[options.cases], f"python benchmarks/layouts.py {options.cases} --page"
        PAGE.write_text(replaced(PAGE.read_text(), name, by, table(found, name)))


if __name__ == "__main__":
    main()
