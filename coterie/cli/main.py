"""The command line. Exit codes: 0 finished, 1 failed, 2 bad usage or config, 75 checkpointed on a signal."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import os
import socket
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from coterie.cli.completion import Parser as _Parser
from coterie.cli.options import config_of, possible
from coterie.types import EXIT_INTERRUPTED, ConfigError, CoterieError

HELP = """coterie: distributed deep reinforcement learning

  coterie train PRESET [--env ID] [--steps N] [--seed S] [--out DIR] [--SECTION.FIELD VALUE ...]
  coterie train FILE.json [...]      with another run's config.json
  coterie resume RUN [--steps N]     go on from the last checkpoint
  coterie eval RUN [--episodes N] [--sampled] [--learner best|mean|INDEX] [--json]
  coterie watch RUN [--out FILE.mp4] record an episode
  coterie report RUN [--video]       one HTML page, with curves and where the time went
  coterie compare RUN RUN ...        runs, or folders of runs, beside one another
  coterie dashboard RUN [--port N]   the report's page live on 127.0.0.1, and the health of each process
  coterie export RUN [--out DIR] [--web]   the policy as ONNX, checked; with --web a page on which it plays
  coterie bench PRESET [--seconds N] [--json] [--SECTION.FIELD VALUE ...]
  coterie plan PRESET [--services FILE] [--target FRAMES_PER_S] [...]      which layout, on what hardware
  coterie reproduce [FIGURE] [--budget smoke|small|full|N] [--dry-run]   a figure of the papers
  coterie envs --connect HOST:PORT --env ID [--token-file F] [--cert C]    step envs for a run elsewhere
  coterie actor --connect HOST:PORT --env ID [--token-file F] [--cert C]   act for a run elsewhere
  coterie keys DIR [--host NAME]     a token, a key and its certificate for such runs
  coterie list [envs|presets|matrix] [PATTERN]
  coterie doctor                     what this machine can do
  coterie completion bash|zsh|fish   completes all of this: eval "$(coterie completion bash)"

Often used with train:
  --env Pong-v5                 an EnvPool id, a gymnasium id, or package.module:callable
  --env.num-envs 64             simulators of each learner
  --learners auto               one learner for each core or GPU, or a number
  --launch ray                  on the machines of a Ray cluster: --ray.address auto
  --chaos                       kill, stop and slow the run's processes now and then
  --exchange gossip             allreduce, hogwild, store, gossip: how several learners agree
  --model.torso a3c             a3c, a3c-gae, gala, nature, impala, football, mlp
  --model.core lstm  --optim.lr 1e-3
  --eval.every 100000           evaluate every N env steps; decides the best checkpoint
  --device auto|cpu|cuda  --precision auto|fp32|bf16
  --seeds 0..2 --jobs 2         one run for each seed, two at a time
  --grid optim.lr=1e-3,3e-4     one for each value; several are combined

`coterie train PRESET --help` lists every option with its default and unit.
Exit codes: 0 finished, 1 failed, 2 bad usage or config, 75 checkpointed on a signal (then: resume).
"""


def train(args: list[str]) -> int:
    parser = _Parser("coterie train", add_help=False, allow_abbrev=False)
    for option in ("--seeds", "--jobs"):
        parser.add_argument(option)
    parser.add_argument("--grid", action="append", default=[])
    parser.add_argument("--chaos", action="store_true")
    asked, args = parser.parse_known_args(args)
    if asked.chaos:
        args = [*args[:1], "--chaos.every=10", *args[1:]]
    config = config_of(args)
    if asked.seeds is not None or asked.grid:
        from coterie.tools.sweep import parse_grid, parse_jobs, parse_seeds, plan_runs, run_jobs

        points, at_once = parse_grid(asked.grid), parse_jobs(asked.jobs)
        numbers = parse_seeds(asked.seeds) if asked.seeds is not None else [config.seed]
        jobs_of_all = plan_runs(args, config, numbers, points)
        if asked.grid:  # what cannot be is said before anything runs
            for job in jobs_of_all[:: len(numbers)]:
                possible(config_of(list(job.args)))
        return run_jobs(jobs_of_all, at_once)
    if asked.jobs is not None:
        raise ConfigError("--jobs: is for several runs; give --seeds or --grid, too")
    from coterie.launch.session import train as run

    return _report(run(config))


def resume(args: list[str]) -> int:
    parser = _Parser("coterie resume")
    parser.add_argument("run")
    parser.add_argument("--steps", type=float, default=0, help="a new total of env steps")
    options = parser.parse_args(args)
    if options.steps != int(options.steps) or options.steps < 0:
        raise ConfigError(f"--steps: {options.steps} is not a whole number of env steps")
    from coterie.launch.session import resume as run

    return _report(run(options.run, steps=int(options.steps)))


def _report(summary: dict[str, Any]) -> int:
    folder = summary["folder"]
    mean = summary["mean_return"]
    print(
        f"{summary['status']}: {summary['env_steps']:,} env steps in {summary['seconds']:.0f} s, "
        f"mean return {'-' if mean is None or mean != mean else f'{mean:.1f}'} over the last games"
    )
    if summary["status"] == "interrupted":
        print(f"{summary['reason']}: checkpoint written")
    print(f"evaluate: coterie eval {folder}")
    print(f"resume:   coterie resume {folder}" + ("" if summary["status"] == "interrupted" else " --steps N"))
    print(f"watch:    coterie watch {folder}")
    return EXIT_INTERRUPTED if summary["status"] == "interrupted" else 0


def evaluate(args: list[str]) -> int:
    parser = _Parser("coterie eval")
    parser.add_argument("run")
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--sampled", action="store_true", help="sample actions instead of taking the likeliest")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--learner", default="best", help="best, mean, secondary, or a learner's number")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(args)
    if options.episodes < 1:
        raise ConfigError("--episodes: must be at least 1")
    if options.seed < 0:
        raise ConfigError("--seed: must not be negative")
    from coterie.build.evaluate import evaluate_run, show
    from coterie.runs.metrics import clean

    result = evaluate_run(
        options.run, episodes=options.episodes, sampled=options.sampled, seed=options.seed, learner=options.learner
    )
    if options.json:
        print(json.dumps(clean(result)))
        return 0
    print(show(result))
    return 0


def watch(args: list[str]) -> int:
    parser = _Parser("coterie watch")
    parser.add_argument("run")
    parser.add_argument("--out", default="", help="FILE.mp4; default: RUN/watch.mp4")
    parser.add_argument("--sampled", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--learner", default="best", help="best, mean, secondary, or a learner's number")
    options = parser.parse_args(args)
    if options.seed < 0:
        raise ConfigError("--seed: must not be negative")
    from coterie.tools.watch import watch as run

    path, score, frames = run(
        options.run, options.out, sampled=options.sampled, seed=options.seed, learner=options.learner
    )
    print(f"{path}: {frames} frames, return {score:.1f}")
    return 0


def _page(what: str, args: list[str]) -> int:
    from coterie.tools.report import command

    run: Callable[[list[str], argparse.ArgumentParser], int] = getattr(command, what)
    return run(args, _Parser(f"coterie {what}"))


def export(args: list[str]) -> int:
    from coterie.tools.export.command import export as run

    return run(args, _Parser("coterie export"))


def bench(args: list[str]) -> int:
    parser = _Parser("coterie bench", add_help=False, allow_abbrev=False)
    parser.add_argument("--seconds", default="60")
    parser.add_argument("--json", action="store_true")
    asked, args = parser.parse_known_args(args)
    config = config_of(args)
    from coterie.tools.bench import bench as run
    from coterie.tools.bench import show

    try:
        duration = float(asked.seconds)
    except ValueError:
        duration = 0.0
    if not 0.1 <= duration <= 86400:
        raise ConfigError(f"--seconds: {asked.seconds!r} is not a number of seconds from 0.1 to 86400")
    result = run(config, duration)
    print(json.dumps(result) if asked.json else show(result))
    return 0


def plan(args: list[str]) -> int:
    from coterie.tools.plan.command import plan as run

    return run(args, _Parser("coterie plan", add_help=False, allow_abbrev=False), config_of)


def reproduce(args: list[str]) -> int:
    from coterie.tools.reproduce.command import reproduce as run

    return run(args, _Parser("coterie reproduce", allow_abbrev=False), lambda options: possible(config_of(options)))


def listing(args: list[str]) -> int:
    from coterie.cli.listing import listing as run

    return run(args, _Parser("coterie list"))


def completion(args: list[str]) -> int:
    from coterie.cli.completion import completion as run

    return run(args, COMMANDS, HELP)


def doctor(args: list[str]) -> int:
    _Parser("coterie doctor").parse_args(args)
    from coterie.cli.doctor import report

    lines, healthy = report()
    print("\n".join(lines))
    return 0 if healthy else 1


def _lend(what: str, args: list[str]) -> int:
    from coterie.cli.lend import lend

    return lend(what, args, _Parser(f"coterie {what}"))


def keys(args: list[str]) -> int:
    parser = _Parser("coterie keys")
    parser.add_argument("folder")
    parser.add_argument("--host", action="append", default=[], help="name or address by which the run is reached")
    options = parser.parse_args(args)
    from coterie.wire.auth import make_keys

    token, cert, key = make_keys(options.folder, options.host or [socket.gethostname()])
    print(f"{token}: for the run and its clients (--wire.token-file, --token-file)")
    print(f"{cert}: for the run and its clients (--wire.cert, --cert)")
    print(f"{key}: for the run alone (--wire.key)")
    return 0


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": train,
    "resume": resume,
    "eval": evaluate,
    "watch": watch,
    "report": partial(_page, "report"),
    "compare": partial(_page, "compare"),
    "dashboard": partial(_page, "dashboard"),
    "export": export,
    "bench": bench,
    "plan": plan,
    "reproduce": reproduce,
    "envs": partial(_lend, "envs"),
    "actor": partial(_lend, "actor"),
    "keys": keys,
    "list": listing,
    "doctor": doctor,
    "completion": completion,
}


def main(argv: Sequence[str] | None = None) -> int:
    args = list(sys.argv[1:] if argv is None else argv)
    with contextlib.suppress(OSError):  # the folder may be gone
        if (here := os.getcwd()) not in sys.path:
            sys.path.append(here)  # for package.module:callable; not "", which children take for another folder
    if not args or args[0] in ("-h", "--help"):
        print(HELP, end="")
        return 0
    if args[0] == "--version":
        from coterie import __version__

        print(__version__)
        return 0
    try:
        if args[0] not in COMMANDS:
            near = difflib.get_close_matches(args[0], COMMANDS, 1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ConfigError(f"command: {args[0]!r} is unknown; {hint}commands are {', '.join(COMMANDS)}")
        return COMMANDS[args[0]](args[1:])
    except ConfigError as error:
        print(f"coterie: {error}", file=sys.stderr)
        return 2
    except CoterieError as error:
        print(f"coterie: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("coterie: stopped at once; the last checkpoint stands", file=sys.stderr)
        return 1
    except BrokenPipeError:  # `coterie list envs | head`
        sys.stderr.close()
        return 0
    except OSError as error:
        print(f"coterie: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
