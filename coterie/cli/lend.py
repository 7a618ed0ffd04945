"""The commands `coterie envs` and `coterie actor`."""

from __future__ import annotations

import argparse
import random
from dataclasses import replace

from coterie.acting.decoupled import Stopped
from coterie.build.resources import resolve_config
from coterie.config import Config, ResolvedConfig
from coterie.parallel.signals import on_signals
from coterie.roles.remote_worker import Door, lend_actor, lend_envs
from coterie.runs.config_io import parse_cli, validate
from coterie.types import ConfigError
from coterie.wire.auth import read_token, split


def _options(args: list[str], parser: argparse.ArgumentParser) -> tuple[ResolvedConfig, Door]:
    """Where to go, and the envs to bring along."""
    parser.add_argument("--connect", required=True, metavar="HOST:PORT")
    parser.add_argument("--token-file", default="", help="the token that the run was given")
    parser.add_argument("--cert", default="", help="the certificate that the run was given")
    parser.add_argument("--patience", type=float, default=600.0, help="seconds that the learner may be away")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(31))
    options, rest = parser.parse_known_args(args)
    if not any(option.partition("=")[0] in ("--env", "--env.id") for option in rest):
        raise ConfigError("--env: name the environment, which must be the run's")
    if not options.connect.startswith("unix:"):
        split(options.connect)
    if not options.patience > 0:
        raise ConfigError("--patience: must be above 0")
    config = resolve_config(validate(parse_cli(replace(Config(), seed=options.seed, device="cpu"), rest)))
    token = read_token(options.token_file) if options.token_file else ""
    return config, Door(options.connect, token, options.cert, options.patience)


def lend(what: str, args: list[str], parser: argparse.ArgumentParser) -> int:
    """Work for the run until it ends, or until SIGINT or SIGTERM."""
    config, door = _options(args, parser)
    stop = list[int]()

    def leave() -> None:
        if stop:
            raise Stopped

    def say(line: str) -> None:
        print(line, flush=True)

    try:
        with on_signals(stop.append):
            (lend_envs if what == "envs" else lend_actor)(config, door, say, leave)
    except Stopped:
        say("left before it began")
    return 0
