"""`coterie plan` beside what this machine does: service times and training rates in alternating turns.

    python benchmarks/plan_check.py [--rounds 5] [--services 12] [--seconds 10] [--only NAME ...] [--out FILE.json]
    python benchmarks/plan_check.py --again FILE.json    # what would be predicted now of what was measured then

In each round and for each group of layouts that train alike, what the parts cost is measured before the first layout
and after each; between, the layout trains (`coterie train`). It is predicted by what the parts cost just before and
just after, the mean of both: this kind of machine changes its speed by a fifth within a minute. Errors are medians over
the rounds; the file of `--out` is written after each. For an idle machine.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from coterie import presets
from coterie.build.resources import resolve_config
from coterie.config import Config
from coterie.envs.make import make_spec
from coterie.parallel.hardware import available_cores
from coterie.runs.metrics import read_metrics
from coterie.tools.plan.layout import Hardware, layout
from coterie.tools.plan.measure import measure
from coterie.tools.plan.services import Services, from_json
from coterie.tools.plan.simulate import simulate

Found = dict[str, dict[str, list[float]]]  # by layout: measured, predicted, error, of each round
Costs = dict[str, list[list[dict[str, Any]]]]  # by group: the services of each round, around the layouts

_FIRST = 10  # metrics lines with news before those that count
_START_S = 90.0

_BREAKOUT = {"env.decorrelate": 0, "model.torso": "a3c"}
_TWO = {"learners": 2}
_LUNAR = {"env.num_envs": 32}
# group: (preset, env, what all have), then layout: what it has besides
GROUPS: dict[str, tuple[str, str, dict[str, Any], dict[str, dict[str, Any]]]] = {
    "a2c-breakout": (
        "a2c", "Breakout-v5", {**_BREAKOUT, "env.num_envs": 32},
        {
            "inline solo": {},
            "inline allreduce, 2 learners": {**_TWO, "exchange": "allreduce"},
            "inline gossip, 2 learners": {**_TWO, "exchange": "gossip", "gossip.mix_every": 1},
            "inline hogwild, 2 learners": {**_TWO, "exchange": "hogwild"},
            "inline store, 2 learners": {**_TWO, "exchange": "store"},
        },
    ),
    "vtrace-breakout": (
        "impala-paper", "Breakout-v5", {**_BREAKOUT, "env.num_envs": 32},
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
    config = resolve_config(config)
    assert isinstance(config.learners, int)
    spec = make_spec(config.env, config.atari)
    hardware = Hardware(cores=len(available_cores()))
    one = layout(config, spec, hardware, config.acting, config.exchange, config.learners)
    result = simulate(one, services)
    return {"rate": result.env_steps_per_s, "bottleneck": result.bottleneck, "lag": result.lag_mean}


def configured(group: str, name: str) -> Config:
    preset, env, shared, layouts = GROUPS[group]
    config = presets.make(preset, env, **shared | layouts[name])
    return replace(config, exchange="solo") if config.exchange == "auto" else config


def note(found: Found, number: int, group: str, name: str, around: Sequence[Services], rate: float) -> None:
    """One layout in one round: what is predicted of it beside what it did."""
    predictions = [predict(configured(group, name), services) for services in around]
    predicted = statistics.mean(one["rate"] for one in predictions)
    error = predicted / rate - 1
    seen = found.setdefault(name, {"measured": [], "predicted": [], "error": []})
    for key, x in zip(seen, (rate, predicted, error), strict=True):
        seen[key].append(x)
    print(
        f"round {number + 1}  {name:42} measured {rate:>9,.0f}  predicted {predicted:>9,.0f}  error {error:+.0%}  "
        f"({predictions[0]['bottleneck']})",
        flush=True,
    )


def trained(group: str, name: str, seconds: float) -> float:
    """Env steps/s of a run of so many seconds, once it has begun."""
    preset, env, shared, layouts = GROUPS[group]
    options = shared | layouts[name] | {"env": env, "steps": 10**9, "log.every": 0.2, "log.tensorboard": False}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        args = [x for k, v in {**options, "out": out}.items() for x in (f"--{k}", str(v))]
        run = subprocess.Popen(
            [sys.executable, "-m", "coterie", "train", preset, *args],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            end = time.monotonic() + _START_S
            while (first := len(progress(out))) < _FIRST and run.poll() is None and time.monotonic() < end:
                time.sleep(0.1)
            time.sleep(seconds if first >= _FIRST else 0)
        finally:
            run.send_signal(signal.SIGTERM)
            said = run.communicate(timeout=60)[1]
        if first < _FIRST:
            raise SystemExit(f"{name} does not train: {said[-300:]}")
        (steps, at), (more, later) = progress(out)[first - 1], progress(out)[-1]
    return (more - steps) / (later - at)


def progress(out: Path) -> list[tuple[int, float]]:
    """Env steps and seconds of the lines of metrics that have more env steps than those before."""
    found = [(0, 0.0)]
    for line in read_metrics(out) if (out / "metrics.jsonl").exists() else []:
        if line.get("env_steps", 0) > found[-1][0] and "env_steps_per_s" in line:
            found.append((line["env_steps"], line["seconds"]))
    return found[1:]


def one_round(number: int, groups: list[str], services_s: float, seconds: float, found: Found, costs: Costs) -> None:
    for group in groups:
        base = presets.make(*GROUPS[group][:2], **GROUPS[group][2])
        services = [measure(base, services_s)]
        for name in GROUPS[group][3]:
            rate = trained(group, name, seconds)
            services.append(measure(base, services_s))
            note(found, number, group, name, services[-2:], rate)
        costs.setdefault(group, []).append([asdict(one) for one in services])


def again(path: Path, found: Found) -> Costs:
    then = json.loads(path.read_text())
    for group, rounds in then["services"].items():
        for number, each in enumerate(rounds):
            services = [from_json(one) for one in each]
            for k, name in enumerate(GROUPS[group][3]):
                note(found, number, group, name, services[k : k + 2], then["rounds"][name]["measured"][number])
    return then["services"]  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--services", type=float, default=12, help="seconds to measure what the parts cost")
    parser.add_argument("--seconds", type=float, default=10, help="seconds of training that count")
    parser.add_argument("--only", nargs="*", default=list(GROUPS), choices=list(GROUPS))
    parser.add_argument("--again", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found: Found = {}
    costs: Costs = again(options.again, found) if options.again else {}
    for number in range(0 if options.again else options.rounds):
        one_round(number, options.only, options.services, options.seconds, found, costs)
        save(found, costs, options.out)
    print("medians of the rounds, env steps/s")
    result = save(found, costs, options.out)
    for name, r in result["layouts"].items():
        print(
            f"  {name:42} measured {r['measured']:>9,.0f}  predicted {r['predicted']:>9,.0f}  error {r['error']:+.1%}"
        )
    print(f"largest error {result['largest_error']:.1%} of {len(result['layouts'])} layouts")


def save(found: Found, costs: Costs, path: Path | None) -> dict[str, Any]:
    """The medians so far, and all that they are of, which go to the file `path`, if any."""
    rows = {name: {k: statistics.median(v) for k, v in seen.items()} for name, seen in found.items()}
    worst = max(abs(r["error"]) for r in rows.values())
    result = {"layouts": rows, "rounds": found, "services": costs, "largest_error": worst}
    if path:
        path.write_text(json.dumps(result, indent=1) + "\n")
    return result


if __name__ == "__main__":
    main()
