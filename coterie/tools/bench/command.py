"""`coterie bench`: where the time of a run goes, and the highest rate that this machine could reach.

The parts of a step and the whole are measured in short alternating turns, so that drift of the machine affects them
alike, until the ratio of training to the ceiling has settled.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from coterie.acting.table import acting_kind
from coterie.algorithms.table import algorithm_class
from coterie.build.factory import ProcessContext
from coterie.build.resources import resolve_config
from coterie.build.validity import check
from coterie.config import Config, ResolvedConfig
from coterie.envs.make import make_spec
from coterie.envs.tasks import tasks
from coterie.errors import ConfigError, counted
from coterie.launch.placement import Placement
from coterie.parallel.hardware import available_cores
from coterie.parallel.processes import Child, gather
from coterie.roles.entry import worker_process
from coterie.roles.learner_process import LearnerProcess
from coterie.tools.bench.turns import EnvOnly, StepTimer, Training
from coterie.types import Post

_SPREAD = 0.05  # of the ratios of the rounds, below which they have settled
_ROUNDS = 5  # at least, where the time is enough
_BURSTS = 6  # of rollouts in a turn
_SHORTEST_S, _LONGEST = 0.5, 1 / 16  # a turn: in seconds, and as a part of the whole time
# Envs sleep, or ask another program, if alone they are slower than this part of the ceiling of cores, and use less than
# this part of their threads' cores.
_WAITING = 0.5

_RATES = ("env_only", "acting", "training")
_SUMMED = (*_RATES, "env_threads")  # over the learners
_CALLS = {"forward": "a forward pass of the policy", "step": "a learner step's gradient"}

Round = dict[str, float]  # rates in env steps/s, and the seconds of a core that an env step costs


def bench(asked: Config, seconds: float) -> dict[str, Any]:
    """Rates in env steps/s (env_only, acting, training), their ratios, and what the parts of a step cost. No round
    begins when `seconds` are over, without the start. Several learners are measured at once, each on its own cores, in
    common turns; rates are sums over them.
    """
    config = resolve_config(replace(asked, steps=10**15))  # acting ends with the budget
    if (kind := algorithm_class(config)).has_replay:
        config = replace(config, q=replace(config.q, learn_start=kind.first_rows(config)))  # train at once
    check(config, make_spec(config.env, config.atari))
    if len(tasks(config.env.id)) > 1:
        raise ConfigError("env.id: bench measures one task at a time")
    if config.learners == 1 and not acting_kind(config).has_children:
        found = [_measure(LearnerProcess(config), seconds)]
    else:
        found = _measure_children(config, seconds)
    rounds = _sum([one["rounds"] for one in found], found[0]["on_gpu"])
    middle = {k: float(np.median(values)) for k, values in rounds.items()}
    parts = {k: middle[k] for k in ("env", "act", "train")}
    waits = np.median(rounds["ceiling"] == rounds["env_only"]) == 1
    ratio = rounds["training"] / rounds["ceiling"]
    stages = {k: float(np.mean([one["stages"].get(k, 0.0) for one in found])) for k in found[0]["stages"]}
    pulled = stages.get("pull", 0.0) if len(found) <= len(available_cores()) else 0.0  # else a wait for a shared core
    return {
        "preset": config.preset,
        "env": config.env.id,
        "torso": config.model.torso,
        "exchange": config.exchange,
        "learners": len(found),
        "cores": len(available_cores()),
        **{k: middle[k] for k in (*_RATES, "ceiling")},
        "acting_over_env_only": float(np.median(rounds["acting"] / rounds["env_only"])),
        "training_over_env_only": float(np.median(rounds["training"] / rounds["env_only"])),
        "training_over_ceiling": float(np.median(ratio)),
        "spread": spread(ratio) if len(ratio) >= _ROUNDS else None,
        "turn_s": found[0]["turn"],
        "frames_per_s": middle["training"] * found[0]["action_repeat"],
        "core_us_per_step": {k: 1e6 * v for k, v in parts.items()},
        "core_us_per_call": {k: 1e6 * v for k, v in middle.items() if k.startswith(tuple(_CALLS))},
        "stages": {k: round(v, 3) for k, v in stages.items()},
        "exchange_share": (stages.get("exchange", 0.0) + pulled) / max(sum(stages.values()), 1e-9),
        "bottleneck": "env, which waits" if waits else max(parts, key=lambda k: parts[k]),
        "rounds": {k: v.tolist() for k, v in rounds.items()},
    }


def _sum(learners: list[list[Round]], on_gpu: Sequence[str]) -> dict[str, Any]:
    """The rounds of all learners: summed rates, mean costs of an env step, and the ceiling of each round."""
    by_key = {k: np.array([[one[k] for one in rounds] for rounds in learners]) for k in learners[0][0]}
    rates = {k: by_key.pop(k).sum(0) for k in _SUMMED}
    found = {**rates, **{k: x.mean(0) for k, x in by_key.items()}}
    return {**found, "ceiling": _ceiling(found, len(learners), on_gpu)}


def _ceiling(found: Mapping[str, Any], learners: int, on_gpu: Sequence[str]) -> Any:
    """Env steps/s if nothing waited but the envs themselves, from a round's rates and costs. `on_gpu`: the parts that
    GPUs do, with waits for other learners in their costs; the cores then have the envs, and actors' acting is left out,
    as it was measured on a GPU.
    """
    cores = len(available_cores())
    if on_gpu:
        most = np.minimum(cores / found["env"], learners / sum(found[k] for k in on_gpu))
    else:
        most = cores / (found["env"] + found["act"] + found["train"])
    busy = found["env_only"] * found["env"] / np.minimum(cores, found["env_threads"])
    waits = (found["env_only"] < _WAITING * most) & (busy < _WAITING)
    return np.where(waits, found["env_only"], most)


def spread(ratio: Any) -> float:
    """Width of the middle half of some values, as a part of their median. Infinite where there are fewer than five."""
    low, middle, high = np.percentile(ratio, (25, 50, 75))
    return float((high - low) / middle) if len(ratio) >= _ROUNDS else np.inf


def _measure(learner: LearnerProcess, seconds: float) -> dict[str, Any]:
    """One learner's rounds. All learners begin each turn together, and learner 0 decides which round is the last."""
    board, rank = learner.context.board, learner.context.rank
    env_only, training = EnvOnly(learner), Training(learner)
    stages, rounds = Counter[str](), list[Round]()
    gpu, actors = learner.resources.device.type == "cuda", acting_kind(learner.config).own_policy
    on_gpu = (["train"] if actors else ["act", "train"]) if gpu else []

    def sync() -> None:
        board.meet(rank, learner.config.log.stall)

    try:
        with learner.exchange:
            sync()
            training.turn(turn := seconds * _LONGEST)  # and warms up
            if learner.config.learners == 1:  # others would need the same turn
                one = float(np.mean(np.diff(training.now.ends)))
                turn = min(turn, max(_SHORTEST_S, _BURSTS * training.burst * one))
            brief = max(turn / 4, min(turn, _SHORTEST_S))  # where no rollouts are counted
            assert training.last is not None
            training.rest()
            parts = StepTimer(learner, training.last)
            sync()
            env_only.turn(brief)
            end = time.monotonic() + seconds * (1 - _LONGEST)
            while not board.stopping:
                rates = dict[str, float]()
                training.rest()
                sync()
                rates["env_only"], rates["env"] = env_only.turn(brief)
                rates["env_threads"] = float(env_only.threads)
                sync()
                rates |= parts.turn(brief) | parts.calls(brief / 2)
                sync()
                rates["acting"] = training.turn(turn, learn=False)
                stages.subtract(learner.stages.seconds)
                sync()
                rates["training"] = training.turn(turn)
                stages.update(learner.stages.seconds)
                rounds.append(rates)
                n = learner.config.learners  # which all have about this one's rates
                alike = [{k: v * n if k in _SUMMED else v for k, v in one.items()} for one in rounds]
                ratio = [one["training"] / _ceiling(one, n, on_gpu) for one in alike]
                if rank == 0 and (spread(ratio) < _SPREAD or time.monotonic() > end):
                    board.stop()
                sync()
    finally:
        env_only.envs.close()
        training.close()
    return {
        "rounds": rounds,
        "turn": turn,
        "stages": dict(stages),
        "action_repeat": learner.spec.action_repeat,
        "on_gpu": on_gpu,
    }


def bench_process(post: Post, config: ResolvedConfig, links: ProcessContext, seconds: float) -> None:
    """A child process: one of several learners that are measured together."""
    post("result", _measure(LearnerProcess(config, 0, links), seconds))


def _measure_children(config: ResolvedConfig, seconds: float) -> list[dict[str, Any]]:
    crew = Placement(config, make_spec(config.env, config.atari))
    learners, actors = list[Child](), list[Child]()
    try:
        for rank in range(crew.learners):
            args = (config, crew.links(rank), seconds)
            learners.append(Child(f"coterie-bench-{rank}", crew.places[rank].cores, bench_process, args))
        for row in range(crew.learners, crew.learners + crew.actors):
            links, number, cores = crew.actor(row)
            actors.append(Child(f"coterie-bench-{row}", cores, worker_process, (config, 0, links, number, row)))
        return gather(learners, 2 * seconds + config.log.stall, actors)
    finally:
        for child in (*learners, *actors):
            child.kill()
        crew.close()


def show(r: dict[str, Any]) -> str:
    """A result as a few lines of text."""
    parts = ", ".join(f"{name} {cost:.0f}" for name, cost in r["core_us_per_step"].items())
    per_call, count = r["core_us_per_call"], len(r["rounds"]["training"])
    known = [(what, per_call[k], per_call[f"{k}_fixed"]) for k, what in _CALLS.items() if k in per_call]
    fixed = ", ".join(f"{what} {whole:,.0f} ({min(rest, whole):,.0f})" for what, whole, rest in known)
    if fixed:
        fixed = f"core time of {fixed} microseconds; in brackets: the fixed cost per call, whatever the batch\n"
    settled = "too few turns to estimate the spread" if r["spread"] is None else f"spread {100 * r['spread']:.1f}%"
    if r["spread"] is None or r["spread"] >= _SPREAD:
        settled += ": use a larger --seconds on an idle machine"
    return f"""\
{r["preset"]} on {r["env"]}, {counted(r["learners"], "learner")}, {r["exchange"]}, {r["cores"]} cores; \
env steps/s and ratios within a turn, median of {counted(count, "alternating turn")} of {r["turn_s"]:.1f} s
env only   {r["env_only"]:>10,.0f}
acting     {r["acting"]:>10,.0f}   {r["acting_over_env_only"]:.2f} of env only
training   {r["training"]:>10,.0f}   {r["training_over_env_only"]:.2f} of env only, {r["frames_per_s"]:,.0f} frames/s
ceiling    {r["ceiling"]:>10,.0f}   training reaches {r["training_over_ceiling"]:.2f} of it, {settled}
exchange   {100 * r["exchange_share"]:.1f}% of a learner's time
core time of an env step, microseconds: {parts}
{fixed}bottleneck: {r["bottleneck"]}"""
