"""The whole command line as one tree of parsers. Parsing, every `--help` and the completion scripts read it."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn

from coterie.errors import ConfigError

Argument = tuple[tuple[str, ...], dict[str, Any]]


def arg(*names: str, **about: Any) -> Argument:
    """An argument. Its help ends with its default."""
    if "type" in about:
        about = {"metavar": "N" if about["type"] is int else "X", **about}
    if default := about.get("default"):
        about["help"] += f" [{default:g}]" if isinstance(default, float) else f" [{default}]"
    return names, about


def flag(name: str, help: str) -> Argument:
    return arg(name, action="store_true", help=help)


_RUN = arg("run", help="run folder")
_LEARNER = arg("--learner", default="0", help="an index (0 is evaluated during training), mean, or secondary")
_SETTINGS = "--SECTION.FIELD VALUE: `coterie train PRESET --help` lists all options of a run."
_JSON = flag("--json", "print one JSON object")
_TRUST = flag("--trust", "import the code that the folder names, although it is not signed with your key")
_SAVED = arg("run", help="run folder (its best checkpoint, or its last), or one of its checkpoints")
_POLICY = (
    _SAVED,
    _TRUST,
    _LEARNER,
    arg("--seed", type=int, default=1, help="of the env, and of sampled actions"),
    flag("--sampled", "sample actions instead of taking the most likely one"),
    arg("--env", "--env.id", metavar="ID", help="another env with the same spaces"),
    arg("--env.kwargs", metavar="JSON", help="other arguments of the env's constructor"),
    arg("--env.max-episode-steps", "--env.max_episode_steps", type=int, metavar="N", help="another limit of episodes"),
)
# Of a command that takes a preset; `tree` leaves them to the code that reads the config's options.
OF_PRESET = (
    arg("--config", metavar="FILE", help="TOML, YAML or JSON: fields in place of the preset's"),
    flag("--trust", "run the code that FILE names"),
)
_CONNECT = "address of the run's learner 0; on another machine it needs --wire.token-file and --wire.cert"


class Command:
    """A command: what follows its name, what it does, and its own options. `settings`: it takes the config's options,
    too, after the name of a preset or without one. `run`: the `module:function` of the package that runs it; default:
    the function of cli/commands.py with its name.
    """

    def __init__(
        self, usage: str, help: str, *options: Argument, settings: Literal["", "preset", "alone"] = "", run: str = ""
    ) -> None:
        self.usage, self.help, self.options, self.settings, self.run = usage, help, options, settings, run


def _client(help: str) -> Command:
    return Command(
        "--connect HOST:PORT --env ID",
        help,
        arg("--connect", required=True, metavar="HOST:PORT", help=_CONNECT),
        arg("--patience", type=float, default=600.0, help="seconds to keep trying while the learner cannot be reached"),
        arg("--seed", type=int, help="default: random"),
        settings="alone",
        run="cli.commands:work",
    )


COMMANDS = {
    "train": Command(
        "PRESET [--env ID] [--SECTION.FIELD VALUE]",
        "train a preset, or a config file",
        arg("--seeds", metavar="A..B", help="one run for each seed"),
        arg("--jobs", metavar="K", help="with --seeds or --grid: runs at the same time"),
        arg("--grid", action="append", default=[], metavar="OPTION=V,V", help="one run for each value; repeatable"),
        flag("--chaos", "inject faults: --chaos.every 10"),
        flag("--checkpoint-on-warning", "SIGUSR1: write a checkpoint and train on"),
        flag("--print-config", "print the whole config as a TOML file, and train nothing"),
        settings="preset",
    ),
    "resume": Command(
        "RUN [--steps N]",
        "continue from the last checkpoint",
        _RUN,
        arg("--steps", type=float, default=0, help="a new total of env steps"),
        flag("--or-earlier", "if the last checkpoint is damaged, continue from the one before"),
        _TRUST,
    ),
    "eval": Command(
        "RUN [--episodes N] [--learner INDEX|mean]",
        "mean return and its standard error",
        *_POLICY,
        arg("--episodes", type=int, default=100, help="episodes to play"),
        _JSON,
        run="cli.commands:evaluate",
    ),
    "watch": Command(
        "RUN [--out FILE.mp4]",
        "record an episode (of the first of several tasks)",
        *_POLICY,
        arg("--out", default="", help="FILE.mp4 or .gif; default: RUN/watch.mp4"),
    ),
    "report": Command(
        "RUN [--video]",
        "one HTML page: curves, and where the time went",
        _RUN,
        arg("--out", default="", help="FILE.html; default: RUN/report.html"),
        flag("--video", "record an episode first (coterie watch)"),
        _TRUST,
        run="tools.report.command:report",
    ),
    "replay": Command(
        "RUN [--to STEP] [--edit OPTION=V] [...]",
        "execute a run again, bit for bit",
        _RUN,
        arg("--from", dest="origin", default="", metavar="STEP|NAME", help="a learner step, a checkpoint, or start"),
        arg(
            "--to",
            type=int,
            metavar="STEP",
            help="go on to the end of the rollout with this learner step; default: all that is recorded",
        ),
        arg("--break-at", type=int, metavar="STEP", help="open a debugger at this learner step"),
        arg("--export-step", type=int, metavar="STEP", help="write this learner step's batch, gradient and weights"),
        arg("--out", default="", help="FILE.safetensors of --export-step; default: in RUN"),
        arg("--learner", type=int, default=0, help="of --break-at and --export-step"),
        arg("--edit", action="append", default=[], metavar="OPTION=V", help="the same schedule with another setting"),
        _TRUST,
        run="tools.replay.command:replay",
    ),
    "compare": Command(
        "RUN RUN ...",
        "one HTML page about several runs",
        arg("runs", nargs="+", help="run folders, or folders of runs"),
        arg("--out", default="compare.html", help="FILE.html"),
        run="tools.report.command:compare",
    ),
    "dashboard": Command(
        "RUN [--port N]",
        "the report, live, with each process's health",
        _RUN,
        arg("--port", type=int, default=8420, help="on 127.0.0.1; 0: any free port"),
        run="tools.report.command:dashboard",
    ),
    "export": Command(
        "RUN [--out DIR] [--web]",
        "the policy as ONNX (--web: with a demo page)",
        _SAVED,
        arg("--out", default="", help="a folder; default: RUN/export"),
        _LEARNER,
        _TRUST,
        flag("--web", "add a page on which the policy plays"),
        run="tools.export.command:export",
    ),
    "bench": Command(
        "PRESET [--seconds N] [--json]",
        "measure the speed and find the bottleneck",
        arg("--seconds", type=float, default=60.0, help="seconds to measure for"),
        _JSON,
        settings="preset",
    ),
    "plan": Command(
        "PRESET [--target FRAMES_PER_S] [...]",
        "predict the speed of every acting mode x exchange",
        arg("--services", type=Path, metavar="FILE", help="costs that --save-services wrote; default: measure them"),
        arg("--save-services", type=Path, metavar="FILE", help="write the measured costs"),
        arg("--seconds", type=float, default=30.0, help="seconds to measure for"),
        arg("--machines", type=int, help="machines of learners, with allreduce or gossip; default: 1"),
        arg("--cores", type=int, help="cores of each; default: this machine's"),
        arg("--gpus", type=int, help="GPUs of each; default: 0. Needs services that were measured on a GPU"),
        arg("--hosts", type=int, help="machines for actors or env hosts (env.num_envs on each); default: 0"),
        arg("--host-cores", type=int, help="cores of each; default: --cores"),
        arg("--latency", type=float, help="seconds one way between two machines; default: 0"),
        arg("--bandwidth", type=float, help="bytes/s into and out of a machine of learners; default: no limit"),
        arg("--core-hour", type=float, help="dollars; default: 0.0475, an assumption (docs/guides/plan.md)"),
        arg("--gpu-hour", type=float, help="dollars; default: 1.46, an assumption"),
        arg("--target", type=float, help="frames/s: find the cheapest layout that reaches it on this hardware"),
        _JSON,
        settings="preset",
    ),
    "reproduce": Command(
        "[FIGURE] [--budget smoke|small|full|N]",
        "a figure of the papers; no FIGURE: list them",
        arg("figures", nargs="*", help="names, or all; without one they are listed"),
        arg("--budget", default="small", help="smoke, small, full, or env steps of each run"),
        arg("--env", default="", help="instead of the figure's envs: one, or several with commas"),
        arg("--seeds", type=int, help="number of seeds; default: as the budget says"),
        arg("--jobs", help="runs at the same time; default: 1"),
        arg("--out", default="runs/reproduce", help="folder"),
        flag("--dry-run", "print the commands, and how long they would take, by a short run of each"),
    ),
    "envs": _client("step envs for a run on another machine"),
    "actor": _client("act for a run on another machine"),
    "keys": Command(
        "DIR [--host NAME]",
        "make the token and TLS files for remote clients",
        arg("folder", help="folder for the files, which is made"),
        arg(
            "--host",
            action="append",
            default=[],
            metavar="NAME",
            help="name or address of the run's machine; repeatable",
        ),
    ),
    "list": Command(
        "[envs|presets|matrix] [PATTERN]",
        "what is available",
        arg("what", nargs="?", choices=("envs", "presets", "matrix"), help="what to list; default: a summary"),
        arg("pattern", nargs="?", default="", help="only lines with this text"),
        run="cli.listing:listing",
    ),
    "check-env": Command(
        "ID [--env.kwargs JSON]",
        "what to fix in an environment",
        arg("env", metavar="ID", help="as --env of a run"),
        arg("--env.kwargs", dest="kwargs", default="{}", metavar="JSON", help="arguments of its constructor"),
        arg("--env.backend", dest="backend", default="auto", metavar="NAME", help="vector, or package.module:callable"),
        arg("--env.num-envs", dest="num_envs", type=int, default=4, metavar="N", help="of such a backend"),
        arg("--steps", type=int, default=1000, help="random steps to take"),
        flag("--render", "check its frames, too"),
        run="tools.check_env:command",
    ),
    "doctor": Command("", "check this machine and this installation", run="cli.doctor:doctor"),
    "completion": Command(
        "bash|zsh|fish",
        'completion: eval "$(coterie completion bash)"',
        arg("shell", choices=("bash", "zsh", "fish"), help="your terminal's shell"),
    ),
}
HELP = """coterie: distributed deep reinforcement learning

{commands}

Often used with train:
  --env Pong-v5                 an EnvPool id, a gymnasium id, or package.module:callable
  --env.num-envs 64             envs of each learner
  --learners auto               one learner for each core or GPU, or a number
  --launch ray                  on the machines of a Ray cluster: --ray.address auto
  --exchange gossip             how several learners agree: allreduce, hogwild, store, gossip
  --model.torso a3c             a3c, a3c-gae, gala, nature, impala, football, mlp
  --model.core lstm  --optim.lr 1e-3
  --eval.every 100000           evaluate every N env steps, and mark the best checkpoint
  --device auto|cpu|cuda  --precision auto|fp32|bf16
  --seeds 0..2 --jobs 2         one run for each seed, two at a time
  --grid optim.lr=1e-3,3e-4     one run for each value; several options are combined
  --checkpoint-on-warning       at SIGUSR1: the machine may be taken away soon
  --chaos                       kill, stop and slow down the run's processes at random

`coterie train PRESET --help` lists every option with its default and unit.
Exit codes: 0 finished, 1 failed, 2 bad usage or config, 75 checkpointed on a signal (then: resume).
"""


def overview() -> str:
    """`coterie --help`: one screen."""
    lines = [f"  coterie {name} {command.usage}".ljust(60) + command.help for name, command in COMMANDS.items()]
    return HELP.format(commands="\n".join(lines))


class Parser(argparse.ArgumentParser):
    """argparse with errors of one line and exit code 2."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; usage: {self.usage or self.prog}")


def tree() -> tuple[Parser, dict[str, Parser]]:
    """The parser of the command line, and those of its commands. They leave the config's options over."""
    root = Parser("coterie", add_help=False)
    branches = root.add_subparsers(dest="command", parser_class=Parser)
    parsers = {}
    for name, command in COMMANDS.items():
        parser = parsers[name] = branches.add_parser(
            name,
            help=command.help,
            description=f"{command.help[0].upper()}{command.help[1:]}.",
            usage=f"coterie {name} {command.usage}",
            epilog=command.settings and _SETTINGS,
            formatter_class=partial(argparse.HelpFormatter, max_help_position=36),
            add_help=not command.settings,
            allow_abbrev=not command.settings,
        )
        for names, about in command.options:
            parser.add_argument(*names, **about)
    return root, parsers
