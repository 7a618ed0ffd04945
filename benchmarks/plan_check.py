"""`coterie plan` beside what this machine does: service times and training rates in alternating turns.

    python benchmarks/plan_check.py [--rounds 3] [--services 30] [--seconds 20] [--only NAME ...] [--out FILE.json]
    python benchmarks/plan_check.py --again FILE.json    # what would be predicted now of what was measured then

Each round measures what the parts cost, once for each group of layouts that train alike; predicts every layout of the
group from that; and then trains it for a while (`bench`). Errors are medians over the rounds. For an idle machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from coterie import presets
from coterie.auto import settle
from coterie.bench import bench
from coterie.config import Config
from coterie.envs.make import make_spec
from coterie.parallel.affinity import available_cores
from coterie.plan.layout import Hardware, layout
from coterie.plan.measure import measure
from coterie.plan.services import Services, from_json
from coterie.plan.simulate import simulate

Found = dict[str, dict[str, list[float]]]  # by layout: measured, predicted, error, of each round
Costs = dict[str, list[dict[str, Any]]]  # by group: the services of each round

_BREAKOUT = {"env.decorrelate": 0, "model.torso": "a3c"}
_TWO = {"learners": 2, "env.num_envs": 64}
_LUNAR = {"env.num_envs": 32}
# group: (preset, env, what all have), then layout: what it has besides
GROUPS: dict[str, tuple[str, str, dict[str, Any], dict[str, dict[str, Any]]]] = {
    "a2c-breakout": (
        "a2c", "Breakout-v5", _BREAKOUT,
        {
            "inline solo": {},
            "inline allreduce, 2 learners": {**_TWO, "exchange": "allreduce"},
            "inline gossip, 2 learners": {**_TWO, "exchange": "gossip", "gossip.mix_every": 1},
            "inline hogwild, 2 learners": {**_TWO, "exchange": "hogwild"},
            "inline store, 2 learners": {**_TWO, "exchange": "store"},
        },
    ),
    "vtrace-breakout": (
        "impala", "Breakout-v5", {**_BREAKOUT, "env.num_envs": 32},
        {
            "decoupled solo, 1 actor": {"actors": 1},
            "decoupled solo, 2 actors": {"actors": 2},
            "central solo": {"acting": "central", "central.batch_size": 32, "env.num_envs": 64},
        },
    ),
    "ppo-lunar": (
        "ppo", "LunarLander-v3", _LUNAR,
        {
            "inline solo, LunarLander": {},
            "inline gossip, LunarLander, 2 learners": {"learners": 2, "exchange": "gossip"},
            "inline allreduce, LunarLander, 2 learners": {"learners": 2, "exchange": "allreduce"},
        },
    ),
}  # fmt: skip


def predict(config: Config, services: Any) -> dict[str, Any]:
    config = settle(config)
    assert isinstance(config.learners, int)
    spec = make_spec(config.env, config.atari)
    hardware = Hardware(cores=len(available_cores()))
    one = layout(config, spec, hardware, config.acting, config.exchange, config.learners)
    told = simulate(one, services)
    return {"rate": told.env_steps_per_s, "bottleneck": told.bottleneck, "lag": told.lag_mean}


def configured(group: str, name: str) -> Config:
    preset, env, shared, layouts = GROUPS[group]
    config = presets.make(preset, env, **shared | layouts[name])
    return replace(config, exchange="solo") if config.exchange == "auto" else config


def note(found: Found, number: int, group: str, name: str, services: Services, rate: float) -> None:
    """One layout in one round: what is predicted of it beside what it did."""
    told = predict(configured(group, name), services)
    error = told["rate"] / rate - 1
    seen = found.setdefault(name, {"measured": [], "predicted": [], "error": []})
    for key, x in zip(seen, (rate, told["rate"], error), strict=True):
        seen[key].append(x)
    print(
        f"round {number + 1}  {name:42} measured {rate:>9,.0f}  predicted {told['rate']:>9,.0f}  error {error:+.0%}  "
        f"({told['bottleneck']})",
        flush=True,
    )


def measured(rounds: int, groups: list[str], services_s: float, seconds: float, found: Found) -> Costs:
    costs: Costs = {}
    for number in range(rounds):
        for group in groups:
            services = measure(presets.make(*GROUPS[group][:2], **GROUPS[group][2]), services_s)
            costs.setdefault(group, []).append(services.to_json())
            for name in GROUPS[group][3]:
                rate = bench(configured(group, name), seconds)["training"]
                note(found, number, group, name, services, rate)
    return costs


def again(path: Path, found: Found) -> Costs:
    then = json.loads(path.read_text())
    for group, each in then["services"].items():
        for number, services in enumerate(map(from_json, each)):
            for name in GROUPS[group][3]:
                note(found, number, group, name, services, then["rounds"][name]["measured"][number])
    return then["services"]  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--services", type=float, default=30, help="seconds to measure what the parts cost")
    parser.add_argument("--seconds", type=float, default=20, help="seconds to train a layout, a third of them counted")
    parser.add_argument("--only", nargs="*", default=list(GROUPS), choices=list(GROUPS))
    parser.add_argument("--again", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found: Found = {}
    if options.again:
        costs = again(options.again, found)
    else:
        costs = measured(options.rounds, options.only, options.services, options.seconds, found)
    rows = {name: {k: statistics.median(v) for k, v in seen.items()} for name, seen in found.items()}
    print("medians of the rounds, env steps/s")
    for name, r in rows.items():
        print(
            f"  {name:42} measured {r['measured']:>9,.0f}  predicted {r['predicted']:>9,.0f}  error {r['error']:+.1%}"
        )
    worst = max(abs(r["error"]) for r in rows.values())
    print(f"largest error {worst:.1%} of {len(rows)} layouts")
    if options.out:
        told = {"layouts": rows, "rounds": found, "services": costs, "largest_error": worst}
        options.out.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
