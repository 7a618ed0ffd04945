"""`coterie plan`: its options and its output."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from itertools import product
from tempfile import TemporaryFile
from typing import Any

from coterie.acting.table import ACTING
from coterie.config import Config
from coterie.envs.make import make_spec
from coterie.errors import ConfigError, CoterieError, counted
from coterie.exchange.table import EXCHANGES
from coterie.parallel.hardware import available_cores
from coterie.runs.files import writing
from coterie.tools.plan.layout import Hardware, RunLayout, layout
from coterie.tools.plan.measure import measure, provenance
from coterie.tools.plan.search import cheapest
from coterie.tools.plan.services import Services, load, save
from coterie.tools.plan.simulate import Prediction, is_simulated, simulate
from coterie.types import Spec

_SILENCE_S = 5.0
_LEAST = {"cores": 1, "gpus": 0, "machines": 1, "hosts": 0, "host_cores": 1, "latency": 0, "core_hour": 0}
_LEAST |= {"gpu_hour": 0, "bandwidth": 0}
_TABLE = "{:10} {:9} {:>8} {:>6} {:>6} {:>11} {:>11} {:>5} {:>5} {:>5} {:>5} {:>9}  {}"


def plan(config: Config, asked: argparse.Namespace) -> int:
    """Predict a run of every acting mode x exchange: frames/s, policy lag, how busy each part is, the bottleneck, and
    dollars for a billion frames. The costs of the parts are measured here, or read from a file; nothing is trained.
    """
    hardware = _hardware(asked)
    if not 1 <= asked.seconds <= 86400:
        raise ConfigError(f"--seconds: {asked.seconds:g} is not a number of seconds from 1 to 86400")
    if asked.target is not None and not 0 < asked.target < math.inf:
        raise ConfigError(f"--target: {asked.target:g} is not a number of frames/s above 0")
    if (path := asked.save_services) is not None:  # before anything is measured
        if path.is_dir():
            raise ConfigError(f"--save-services: {path} is a folder")
        with writing(path, "--save-services: "):
            path.parent.mkdir(parents=True, exist_ok=True)
            TemporaryFile(dir=path.parent).close()
    services = measure(config, asked.seconds) if asked.services is None else load(asked.services)
    if path is not None:
        save(services, path)
    if hardware.gpus and services.accelerator is None:
        raise ConfigError("--gpus: the services have no accelerator: measure them where there is one")
    here, c = provenance(config), services.costs
    if other := [f"{k} {v}" for k, v in services.about.items() if v != here.get(k, v)]:
        print("coterie: the services were measured with other settings:", ", ".join(other), file=sys.stderr)
    if noisy := [k for k, line in (("env", c.env), ("act", c.act), ("train", c.train)) if line.misfit > 0.2]:
        print("coterie: too noisy to measure:", *noisy, "(use an idle machine, or --seconds 120)", file=sys.stderr)
    spec = make_spec(config.env, config.atari)
    answer = _predict if asked.target is None else _search
    found, text = answer(config, spec, services, hardware, asked.target)
    missed = asked.target is not None and found["cheapest"] is None
    if asked.json:
        print(json.dumps({"env": config.env.id, "services": asdict(services), **found}))
    else:
        print(f"{_about(config, services, hardware)}\n{text}")
    return int(missed)


def _hardware(asked: argparse.Namespace) -> Hardware:
    cores = len(available_cores()) if asked.cores is None else asked.cores
    given = {name: getattr(asked, name) for name in _LEAST if getattr(asked, name) is not None}
    if "host_cores" in given and not given.get("hosts"):
        raise ConfigError("--host-cores: is for --hosts")
    given = {"cores": cores, "host_cores": cores, **given}
    for name, value in given.items():
        option = f"--{name.replace('_', '-')}"
        if name == "bandwidth" and not value > 0:
            raise ConfigError(f"{option}: must be above 0 bytes/s, not {value:g}")
        if name != "bandwidth" and not _LEAST[name] <= value < math.inf:
            raise ConfigError(f"{option}: must be at least {_LEAST[name]}, not {value:g}")
    return Hardware(**given)


def _progress() -> Callable[[RunLayout], None]:
    """A function that names a layout which is about to be simulated, if some seconds went by since the last line. Many
    cores are many processes to simulate.
    """
    said = time.monotonic()

    def say(one: RunLayout) -> None:
        nonlocal said
        if (now := time.monotonic()) - said > _SILENCE_S:
            said, cores = now, one.hardware.machines * one.hardware.cores
            print(f"coterie: simulating {one.name} on {counted(cores, 'core')}", file=sys.stderr, flush=True)

    return say


def _predict(config: Config, spec: Spec, services: Services, hardware: Hardware, _: None) -> tuple[dict[str, Any], str]:
    several = config.learners if isinstance(config.learners, int) and config.learners > 1 else 0
    learners = several or max(2, hardware.machines * (hardware.gpus or hardware.cores))
    found: list[Prediction] = []
    refused: dict[str, str] = {}
    say = _progress()
    for acting, exchange in product(ACTING, EXCHANGES):
        try:
            if not is_simulated(acting, exchange):
                raise ConfigError("this acting mode or exchange was registered without a simulation")
            one = layout(config, spec, hardware, acting, exchange, learners)
            say(one)
            found.append(simulate(one, services, config.seed))
        except CoterieError as error:
            refused[f"{acting} {exchange}"] = str(error)
    if not found:
        raise ConfigError(next(iter(refused.values())))
    lines = [table(found)]
    for reason in dict.fromkeys(refused.values()):
        lines.append(f"not possible: {', '.join(k for k, v in refused.items() if v == reason)}: {reason}")
    return {"layouts": [result.to_json() for result in found], "refused": refused}, "\n".join(lines)


def _search(
    config: Config, spec: Spec, services: Services, most: Hardware, target: float
) -> tuple[dict[str, Any], str]:
    best, fastest = cheapest(config, spec, services, most, target, _progress())
    json_of = [result and result.to_json() for result in (best, fastest)]
    found = {"target": target, "cheapest": json_of[0], "beyond": json_of[1]}
    if best is None:
        said = f"; the fastest, {fastest.layout.name}, reaches {fastest.frames_per_s:,.0f}" if fastest else ""
        return found, f"no layout within these bounds reaches {target:,.0f} frames/s{said}"
    lay, h = best.layout, best.layout.hardware
    machines = f"{h.machines} machines of " * (h.machines > 1) + counted(h.cores, "core")
    machines += f", {counted(lay.gpus, 'GPU')}" * (lay.gpus > 0)
    machines += f", and {counted(lay.hosts, 'host')} of {h.host_cores}" * (lay.hosts > 0)
    first = f"cheapest for {target:,.0f} frames/s: {machines}, {lay.dollars_per_hour:.2f} dollars an hour"
    return found, f"{first}\n{table([best])}"


def _about(config: Config, services: Services, h: Hardware) -> str:
    beside = f"; hosts: {h.hosts} of {h.host_cores} cores" if h.hosts else ""
    beside += f"; {1e3 * h.latency:g} ms apart" if h.hosts or h.machines > 1 else ""
    c = services.costs
    env, act, train = (f"{1e6 * line.each:.1f} (+ {1e6 * line.fixed:.0f} a call)" for line in (c.env, c.act, c.train))
    env += f", {services.env_waits:.0%} of which it waits" * (services.env_waits > 0)
    doubt = "\nToo short a measurement: give a larger --seconds, on an idle machine" * (0 in (c.act.each, c.train.each))
    return (
        f"{config.preset} on {config.env.id}; {counted(h.machines, 'machine')} of learners: {h.cores} cores, "
        f"{h.gpus} GPUs{beside}\n"
        f"core-us of a step or sample, all cores busy: env {env}, forward {act}, training {train}{doubt}"
    )


def table(found: list[Prediction]) -> str:
    """A line for each layout."""
    names = ("learners", "actors", "envs", "frames/s", "lag (max)", "cores", "gpus", "hosts", "net", "$/1e9")
    lines = [_TABLE.format("acting", "exchange", *names, "bottleneck")]
    for r in found:
        lay, counts = r.layout, (r.layout.learners, r.layout.producers * r.layout.learners or "-", r.layout.envs)
        busy = {**r.busy, "net": max(r.busy.get("network in", 0.0), r.busy.get("network out", 0.0))}
        if "network in" not in busy:
            del busy["net"]
        shown = [f"{busy[k]:.0%}" if k in busy else "-" for k in ("learner cores", "gpu", "host cores", "net")]
        rates = (f"{r.frames_per_s:,.0f}", f"{r.lag_mean:.2f} ({r.lag_max})")
        money = f"{r.dollars_per_billion_frames:,.2f}"
        lines.append(_TABLE.format(lay.acting, lay.exchange, *counts, *rates, *shown, money, r.bottleneck))
    return "\n".join(lines)
