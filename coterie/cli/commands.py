"""The commands that `coterie` runs itself; those of tools are in their folders."""

from __future__ import annotations

import json
import random
import signal
import socket
import time
from argparse import Namespace
from dataclasses import replace
from functools import partial
from typing import Any

from coterie.cli.ending import carry_out
from coterie.cli.help import warned
from coterie.cli.options import as_toml, config_of, possible, words_of
from coterie.config import Config
from coterie.errors import ConfigError
from coterie.extras import needs
from coterie.parallel.processes import start_server
from coterie.parallel.signals import is_second, on_signals
from coterie.runs.metrics import file_name
from coterie.runs.starting import Starting, gc_paused


def train(options: Namespace, rest: list[str]) -> int:
    """`rest`: here and below, a preset and its options."""
    if options.chaos and not any(word.startswith("--chaos.every") for word in rest):
        rest = [*rest, "--chaos.every=10"]
    if options.checkpoint_on_warning:
        rest = [*rest, "--log.checkpoint-on-warning=True"]
    if options.print_config:
        if options.seeds is not None or options.grid or options.jobs is not None:
            raise ConfigError("--print-config: prints one run; leave out --seeds, --grid and --jobs")
        from coterie.runs.config_io import to_dict

        config = warned(rest, config_of(rest))
        print("\n".join(as_toml(to_dict(config))))
        possible(config)
        return 0
    if options.seeds is not None or options.grid:
        from coterie.tools.sweep import options_of, parse_grid, parse_jobs, parse_seeds, plan_runs, run_jobs

        points, at_once = parse_grid(options.grid), parse_jobs(options.jobs)
        gridded = words_of(options_of(points[0]))[3].keys()
        if both := words_of(rest)[3].keys() & gridded:
            raise ConfigError(f"--grid: {min(both)} is given as an option, too")
        config = config_of([*rest, *options_of(points[0])]) if options.grid else warned(rest, config_of(rest))
        seeds = parse_seeds(options.seeds) if options.seeds is not None else [config.seed]
        if options.seeds is not None and any(word.partition("=")[0] == "--seed" for word in rest):
            raise ConfigError("--seeds: cannot be combined with --seed")
        known = {"preset": config.preset, "env.id": file_name(config.env.id)}
        names = [name for field, name in known.items() if field not in gridded]
        name = f"runs/{'-'.join([*names, '%m%d-%H%M%S'])}"
        config = replace(config, out=config.out or time.strftime(name))
        jobs = plan_runs(rest, config, seeds, points)
        for job in jobs[:: len(seeds)]:  # refuse impossible values before anything runs
            possible(config_of(list(job.args)))
        return run_jobs(jobs, at_once, config.out)
    if options.jobs is not None:
        raise ConfigError("--jobs: is for several runs; give --seeds or --grid, too")

    def work(starting: Starting) -> dict[str, Any]:
        config, default = config_of(rest), Config()
        if config.launch == default.launch and (config.learners, config.acting) != (1, default.acting):
            start_server()  # there will be child processes: it imports torch at the same time
        starting.doing("importing torch")
        with gc_paused():
            from coterie.launch.session import train as run

        return run(warned(rest, config, starting.show), starting=starting)

    return carry_out("reading the config and the environment's spaces", options, work)


def resume(options: Namespace) -> int:
    if options.steps < 0 or options.steps % 1 != 0:  # inf % 1 is NaN
        raise ConfigError(f"--steps: {options.steps} is not a whole number of env steps")

    def work(starting: Starting) -> dict[str, Any]:
        with gc_paused():
            from coterie.launch.session import resume as run

        how = {"steps": int(options.steps), "trust": options.trust, "or_earlier": options.or_earlier}
        return run(options.run, starting=starting, **how)

    return carry_out("importing torch", options, work)


def evaluate(options: Namespace) -> int:
    from coterie.build.policy import evaluate_run
    from coterie.cli.ending import progress, scores
    from coterie.runs.metrics import clean

    n = options.episodes
    result = evaluate_run(options.run, episodes=n, stop=progress(n), **_policy(options))
    print(json.dumps(clean(result)) if options.json else scores(result))
    return 0


def watch(options: Namespace) -> int:
    from coterie.tools.watch import watch as run

    path, score, frames = run(options.run, options.out, **_policy(options))
    print(f"{path}: {frames} frames, return {score:.1f}")
    return 0


def _policy(options: Namespace) -> dict[str, Any]:
    if not 0 <= options.seed < 2**63:
        raise ConfigError(f"--seed: {options.seed} is not a whole number from 0 to 2**63 - 1")
    env = {name: value for name, value in vars(options).items() if name[:3] == "env" and value is not None}
    return {name: getattr(options, name) for name in ("sampled", "seed", "learner", "trust")} | env


def bench(options: Namespace, rest: list[str]) -> int:
    config = warned(rest, config_of(rest))
    from coterie.tools.bench.command import bench as run
    from coterie.tools.bench.command import show

    if not 0.1 <= options.seconds <= 86400:
        raise ConfigError(f"--seconds: {options.seconds:g} is not a number of seconds from 0.1 to 86400")
    result = run(config, options.seconds)
    print(json.dumps(result) if options.json else show(result))
    return 0


def plan(options: Namespace, rest: list[str]) -> int:
    config = config_of(rest)
    with needs("plan", "plan"):
        from coterie.tools.plan.command import plan as run

    return run(config, options)


def reproduce(options: Namespace) -> int:
    from coterie.tools.reproduce.command import reproduce as run

    return run(options, lambda args: possible(config_of(args)))


def work(options: Namespace, rest: list[str]) -> int:
    """`envs` and `actor`: work for a run until it ends, or until SIGINT or SIGTERM. `rest`: the options of the envs."""
    from coterie.acting.base import Stopped
    from coterie.build.resources import resolve_config
    from coterie.presets.common import whole_teams
    from coterie.remote.admission import ENV_SETTINGS
    from coterie.roles.remote_worker import WorkerOptions, run_actor, run_env_host
    from coterie.runs.config_io import read_options, replace
    from coterie.runs.trust import IMPORTED_BY_ACTORS
    from coterie.runs.validate import validate
    from coterie.wire.auth import read_token, split
    from coterie.wire.client import Endpoint, RunEnded

    changes, signals = read_options(rest), list[float]()  # the times of signals to leave
    if "env.id" not in changes:
        raise ConfigError("--env: name the run's environment")
    of_run = {f"env.{name}" for name in (*ENV_SETTINGS, *("num_envs", "groups") * (options.command == "actor"))}
    for name in changes:
        if name in of_run or not (name.startswith(("env.", "wire.")) or name in ("seed", *IMPORTED_BY_ACTORS)):
            raise ConfigError(f"--{name.replace('_', '-')}: the run decides this; leave it out")
    if not options.connect.startswith("unix:"):
        split(options.connect)
    if not options.patience > 0:
        raise ConfigError(f"--patience: {options.patience:g} must be above 0")
    seed = random.SystemRandom().getrandbits(31) if options.seed is None else options.seed
    asked = validate(replace(Config(), {"seed": seed, "device": "cpu", **changes}))
    config = resolve_config(whole_teams(asked, changes))
    token = read_token(config.wire.token_file) if config.wire.token_file else ""
    endpoint = Endpoint(options.connect, token, config.wire.cert, options.patience)

    def leave() -> None:
        if signals:
            raise Stopped

    def note(number: signal.Signals) -> None:
        signals.append(time.monotonic())
        if len(signals) > 1 and is_second(number, signals[-1] - signals[0]):  # a hanging env does not call `leave`
            raise KeyboardInterrupt

    report = partial(print, flush=True)
    report(f"connecting to {options.connect}")
    try:
        with on_signals(note):
            (run_env_host if options.command == "envs" else run_actor)(config, endpoint, WorkerOptions(report, leave))
    except Stopped:
        report("left before the work began")
    except RunEnded as reason:
        report(str(reason))
    return 0


def keys(options: Namespace) -> int:
    from coterie.wire.keys import make_keys
    from coterie.wire.tokens import KINDS

    token, cert, key, *others = make_keys(options.folder, options.host or [socket.gethostname()])
    print(f"{token}: for the run (--wire.token-file)")
    for path, clients in zip(others, KINDS.values(), strict=True):
        print(f"{path}: for its {clients} (--wire.token-file)")
    print(f"{cert}: for the run and its clients (--wire.cert)")
    print(f"{key}: for the run alone (--wire.key)")
    return 0


def completion(options: Namespace) -> int:
    with needs("completion", "completion"):
        import shtab

    from coterie.cli.help import full_tree

    root, parsers = full_tree()
    for parser in parsers.values():
        for action in parser._actions:
            if action.dest in ("run", "runs", "folder", "out"):
                action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    print(shtab.complete(root, options.shell))
    return 0
