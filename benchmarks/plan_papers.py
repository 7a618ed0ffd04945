"""`coterie plan`'s simulation beside the papers: fit one row of a table, predict the others.

    python benchmarks/plan_papers.py [--out FILE.json]

What is assumed is printed with the figures. Everything is simulated; nothing is measured on this machine.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from coterie.config import Central, Config, Gossip, Store
from coterie.tools.plan.layout import Hardware, RunLayout
from coterie.tools.plan.services import Costs, LinearCost, Services
from coterie.tools.plan.simulate import simulate

KINDS = ("solo", "allreduce", "hogwild", "store", "gossip")
FREE = dict.fromkeys(KINDS, 0.0)

ASSUMED = {
    "IMPALA, Table 1": [
        "frames are 4 env steps' (the action repeat of DeepMind Lab), unrolls 100, batches 32, one env in each actor",
        "a forward on a CPU costs a tenth of an env step, training a sample three forwards, batches are no cheaper",
        "on a CPU all 48 cores share a batch's forward and training perfectly; a GPU takes no time for either",
        "an A3C worker uses one core at a time; distributed actors have one core each and a network without delay",
        "env steps vary with a coefficient of variation of 0.5, or (second prediction) one fitted to the row "
        "'A2C, sync step' of each task",
        "the paper's distributed rows name no task: both are compared with the same figure",
    ],
    "Accelerated Methods, Table 3": [
        "8 learners of 4 sampling cores and a GPU each, two alternating groups, unrolls of 5, nothing is trained",
        "sync: the learners wait for one another after each unroll; async: never",
        "a forward takes 0.3 ms of the GPU however many envs there are; a fifth core drives the GPU and is not short",
        "env step and its spread are fitted to the row of 64 simulators: two unknowns, two figures",
    ],
    "Accelerated Methods, Table 2": [
        "env step, spread and forward as fitted to Table 3; 16 simulators (PPO: 8) and 4 sampling cores for each GPU",
        "training time of a sample is fitted to the column of 1 GPU, of A2C and of PPO; it does not depend on how many",
        "an all-reduce between two GPUs takes 1 ms (3.6 MB at about 4 GB/s), a store's update 1 ms in 3 chunks",
        "PPO: 2048 samples and minibatches of 512 among all GPUs, 4 epochs; APPO: the same without waiting",
    ],
    "SEED RL, stated ratios": [
        "IMPALA's GPU trains all the time and SEED's trains and acts all the time: the slowdown 1.58 is what fits "
        "how long acting takes beside training",
        "a core's env step and forward from IMPALA's own rows: 80K frames/s of 150 shallow actors, 30K of 150 deep",
        "prices: 0.0475 dollars for a core and hour, 1.46 for a P100 (what we think the paper used; not verified)",
        "as many host cores as SEED's GPU can use; TPU cores are alike, and their all-reduce is free",
    ],
}


def layout(acting: str, exchange: str, hardware: Hardware, **own: Any) -> RunLayout:
    found: dict[str, Any] = {"unroll": 100, "batches": 3, **own}
    found.setdefault("samples", float(found.get("batch", 1) * found["unroll"]))
    chunks = int(found.pop("chunks", 1))
    config = Config(central=Central(wait=0.0), store=Store(chunks=chunks), gossip=Gossip(mix_every=1))
    return RunLayout(acting=acting, exchange=exchange, config=config, hardware=hardware, **found)


def bisect(call: Callable[[float], float], target: float, low: float, high: float) -> float:
    """Where a falling `call` meets `target`."""
    for _ in range(14):
        middle = (low + high) / 2
        low, high = (middle, high) if call(middle) > target else (low, middle)
    return (low + high) / 2


# IMPALA, Table 1: (what, task 1, task 2); the distributed rows have one figure.
MACHINE = Hardware(cores=48)
WITH_GPU = Hardware(cores=48, gpus=1)
SYNC_STEP = {"width": 48, "batch": 48, "env_threads": 48, "train_threads": 48}
SHARED = {"producers": 48, "batch": 32, "train_threads": 48}


def far(actors: int, batch: int = 32) -> RunLayout:
    hardware = Hardware(cores=8, gpus=1, hosts=actors, host_cores=1)
    return layout("decoupled", "solo", hardware, producers=actors, batch=batch)


IMPALA: list[tuple[str, RunLayout, tuple[int, int]]] = [
    ("IMPALA, 48 actors (fitted)", layout("decoupled", "solo", MACHINE, **SHARED), (17_000, 20_500)),
    ("A3C, 32 workers, 64 cores", layout("inline", "hogwild", Hardware(cores=64), learners=32), (6_500, 9_000)),
    ("A2C, sync step", layout("inline", "solo", MACHINE, **SYNC_STEP), (9_000, 5_000)),
    ("A2C, sync step, 1 GPU", layout("inline", "solo", WITH_GPU, **SYNC_STEP | {"train_threads": 1}), (13_000, 5_500)),
    (
        "A2C, sync trajectories",
        layout("decoupled", "solo", MACHINE, **SHARED | {"batch": 48}, lockstep=True),
        (16_000, 17_500),
    ),
    (
        "IMPALA, dynamic batching, 1 GPU",
        layout("central", "solo", WITH_GPU, producers=48, batch=32),
        (21_000, 24_000),
    ),
    ("A3C, distributed, 200 cores", layout("inline", "hogwild", Hardware(cores=200), learners=200), (46_000, 50_000)),
    ("IMPALA, 150 cores, 1 GPU", far(150), (80_000, 80_000)),
    ("IMPALA, optimized, 375 cores, 1 GPU", far(375), (200_000, 200_000)),
    ("IMPALA, optimized, 500 cores, batch 128", far(500, 128), (250_000, 250_000)),
]


def impala_services(env: float, cv: float, one: RunLayout) -> Services:
    shared = 1 / 48 if one.acting == "inline" and one.width > 1 else 1.0  # a batch's forward, by all cores together
    costs = Costs(LinearCost(0, env), LinearCost(0, 0.1 * env * shared), LinearCost(), LinearCost(0, 0.3 * env), FREE)
    gpu = Costs(LinearCost(0, env), LinearCost(1e-9), LinearCost(), LinearCost(1e-9), FREE)
    return Services(costs=costs, env_cv=cv, action_repeat=4, accelerator=gpu)


def rate(one: RunLayout, env: float, cv: float) -> float:
    one = replace(one, batches=1) if one.lockstep else one
    return simulate(one, impala_services(env, cv, one)).frames_per_s


def env_of_row(task: int, cv: float) -> float:
    """Everything is in proportion to the env's step: one run tells it."""
    _, one, paper = IMPALA[0]
    return rate(one, 0.01, cv) / paper[task] * 0.01


def impala() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    _, sync, paper = IMPALA[2]
    for task in (0, 1):
        spread = bisect(lambda cv, task=task: rate(sync, env_of_row(task, cv), cv), paper[task], 0.0, 3.0)  # type: ignore[misc]
        env = env_of_row(task, 0.5)
        print(f"  task {task + 1}: env step {1e3 * env:.1f} ms; spread fitted to 'A2C, sync step' {spread:.2f}")
        for name, one, known in IMPALA:
            found = [rate(one, env_of_row(task, cv), cv) for cv in (0.5, spread)]
            rows.append(row(f"{name}, task {task + 1}", known[task], *found))
    return rows


# Accelerated Methods.
def sampling(sims: int, kind: str) -> RunLayout:
    hardware = Hardware(cores=32, gpus=8)
    own = {"learners": 8, "width": sims // 8, "batch": sims // 8, "groups": 2, "env_threads": 4}
    return layout("inline", kind, hardware, **own, unroll=5)


def accelerated_services(env: float, cv: float, train: float = 0.0, meet: float = 0.0) -> Services:
    costs = Costs(LinearCost(0, env), LinearCost(), LinearCost(), LinearCost(), FREE)
    exchange = {**FREE, "allreduce": meet, "store": meet}
    gpu = Costs(LinearCost(), LinearCost(3e-4), LinearCost(), LinearCost(0, train), exchange)
    return Services(costs=costs, env_cv=cv, accelerator=gpu)


TABLE3 = {64: (29.6, 31.9), 128: (33.0, 34.7), 256: (35.7, 36.7), 512: (35.8, 38.4)}


def sampled(sims: int, kind: str, env: float, cv: float) -> float:
    return simulate(sampling(sims, kind), accelerated_services(env, cv)).env_steps_per_s / 1e3


def table3() -> tuple[list[dict[str, Any]], float, float]:
    def env_of(cv: float) -> float:
        return bisect(lambda env: sampled(64, "gossip", env, cv), TABLE3[64][1], 1e-4, 3e-3)

    low, high = 0.0, 1.5
    for _ in range(9):
        cv = (low + high) / 2
        low, high = (cv, high) if sampled(64, "allreduce", env_of(cv), cv) > TABLE3[64][0] else (low, cv)
    env = env_of(cv)
    print(f"  env step {1e3 * env:.2f} ms of a core, spread {cv:.2f}")
    rows = []
    for sims, paper in TABLE3.items():
        for kind, known in zip(("allreduce", "gossip"), paper, strict=True):
            how = f"{sims} simulators, {'sync' if kind == 'allreduce' else 'async'}{' (fitted)' * (sims == 64)}"
            rows.append(row(how, known, sampled(sims, kind, env, cv)))
    return rows, env, cv


HOURS = {"A2C": (3.8, 2.2, 1.2, 0.59), "A3C": (None, 2.4, 1.3, 0.65), "PPO": (4.4, 2.6, 1.5, 1.1),
         "APPO": (None, 2.8, 1.5, 0.71)}  # fmt: skip


def trained(name: str, gpus: int, env: float, cv: float, train: float) -> float:
    """Hours for 50M env steps."""
    ppo = "PPO" in name
    kind = "solo" if gpus == 1 else "store" if name in ("A3C", "APPO") else "allreduce"
    width, unroll = (8, 256 // gpus) if ppo else (16, 5)
    own: dict[str, Any] = {"steps": 16.0, "samples": 512.0 / gpus} if ppo else {}
    one = layout(
        "inline", kind, Hardware(cores=4 * gpus, gpus=gpus), learners=gpus, width=width, batch=width, groups=2,
        env_threads=4, unroll=unroll, chunks=3 if kind == "store" else 1, **own,
    )  # fmt: skip
    return 50e6 / simulate(one, accelerated_services(env, cv, train, 1e-3)).env_steps_per_s / 3600


def table2(env: float, cv: float) -> list[dict[str, Any]]:
    rows = []
    for fit, names in (("A2C", ("A2C", "A3C")), ("PPO", ("PPO", "APPO"))):
        known = HOURS[fit][0]
        assert known is not None
        train = bisect(lambda t, fit=fit: -trained(fit, 1, env, cv, t), -known, 0.0, 1e-3)  # type: ignore[misc]
        print(f"  {fit}: {1e6 * train:.0f} us of the GPU for each sample trained on")
        for name in names:
            for gpus, hours in zip((1, 2, 4, 8), HOURS[name], strict=True):
                if hours is not None:
                    mark = " (fitted)" if gpus == 1 else ""
                    rows.append(row(f"{name}, {gpus} GPU{mark}, hours", hours, trained(name, gpus, env, cv, train)))
    return rows


def seed() -> list[dict[str, Any]]:
    """Ratios: 1.58 times slower on a P100 fits how long the GPU acts; what a frame costs is predicted."""
    shallow, deep = 4 * 150 / 80_000, 4 * 150 / 30_000  # seconds of an actor's step
    env = shallow / 1.1  # a shallow forward costs a tenth of an env step, as above
    train = 4 / 30_000  # of the GPU, for an env step: what it does at most
    cpu = Costs(LinearCost(0, env), LinearCost(0, deep - env), LinearCost(), LinearCost(0, train), FREE)
    services = Services(
        costs=cpu,
        action_repeat=4,
        accelerator=Costs(LinearCost(0, env), LinearCost(0, 0.58 * train), LinearCost(), LinearCost(0, train), FREE),
    )

    def rented(acting: str, cores: int) -> tuple[float, float]:
        hardware = Hardware(cores=1, gpus=1, hosts=cores, host_cores=1)
        one = layout(acting, "solo", hardware, producers=cores, batch=32, unroll=20, groups=1)
        found = simulate(one, services)
        return found.frames_per_s, found.dollars_per_billion_frames

    def least(acting: str) -> int:
        """Cores from which more bring less than two in a hundred."""
        most = rented(acting, 400)[0]
        return next(n for n in range(20, 400, 4) if rented(acting, n)[0] > 0.98 * most)

    def chips(n: int) -> float:
        """Frames/s of n accelerators that average their gradients, each with hosts enough."""
        hardware = Hardware(cores=n, gpus=n, hosts=32 * n, host_cores=1)
        one = layout("central", "allreduce", hardware, learners=n, producers=32, batch=32, unroll=20)
        return simulate(one, services).frames_per_s

    found = {acting: least(acting) for acting in ("decoupled", "central")}
    print(f"  cores that fill the GPU: IMPALA {found['decoupled']}, SEED {found['central']}")
    (fast, dear), (slow, cheap) = (rented(acting, n) for acting, n in found.items())
    return [
        row("P100: SEED slower by (fitted)", 1.58, fast / slow),
        row("P100: a frame cheaper by", 1.76, dear / cheap),
        row("8 TPU cores beside 2: faster by", 4.4, chips(8) / chips(2)),
    ]


def row(name: str, paper: float, *predicted: float) -> dict[str, Any]:
    return {"row": name, "paper": paper, "predicted": predicted, "error": [p / paper - 1 for p in predicted]}


def show(x: float) -> str:
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {}
    env_cv: list[float] = []

    def third() -> list[dict[str, Any]]:
        rows, *env_cv[:] = table3()
        return rows

    calls = {
        "IMPALA, Table 1": impala,
        "Accelerated Methods, Table 3": third,
        "Accelerated Methods, Table 2": lambda: table2(*env_cv),
        "SEED RL, stated ratios": seed,
    }
    for table, call in calls.items():
        print(table)
        for line in ASSUMED[table]:
            print(f"  assumed: {line}")
        rows = call()
        for r in rows:
            predicted = ", ".join(f"{show(p)} ({e:+.0%})" for p, e in zip(r["predicted"], r["error"], strict=True))
            print(f"  {r['row']:48} paper {show(r['paper']):>8}   predicted {predicted}")
        found[table] = {"assumed": ASSUMED[table], "rows": rows}
        if options.out:
            options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
