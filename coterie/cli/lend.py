"""The commands `coterie envs` and `coterie actor`."""

from __future__ import annotations

import argparse
import random
from dataclasses import replace

from coterie.acting.base import Stopped
from coterie.build.resources import resolve_config
from coterie.config import Config, ResolvedConfig
from coterie.parallel.signals import on_signals
from coterie.roles.remote_worker import Worker, lend_actor, lend_envs
from coterie.runs.config_io import parse_cli, validate
from coterie.types import ConfigError
from coterie.wire.auth import read_token, split
from coterie.wire.client import Endpoint, RunEnded


def _options(args: list[str], parser: argparse.ArgumentParser) -> tuple[ResolvedConfig, Endpoint]:
    """The local envs, and the run to work for."""
    parser.add_argument("--connect", required=True, metavar="HOST:PORT", help="the address of the run's learner 0")
    parser.add_argument("--token-file", default="", help="the run's token")
    parser.add_argument("--cert", default="", help="the run's certificate (PEM)")
    parser.add_argument("--patience", type=float, default=600.0, help="seconds to wait for a learner that is away")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(31))
    options, rest = parser.parse_known_args(args)
    if not any(option.partition("=")[0] in ("--env", "--env.id") for option in rest):
        raise ConfigError("--env: name the run's environment")
    if not options.connect.startswith("unix:"):
        split(options.connect)
    if not options.patience > 0:
        raise ConfigError(f"--patience: {options.patience:g} must be above 0")
    config = resolve_config(validate(parse_cli(replace(Config(), seed=options.seed, device="cpu"), rest)))
    token = read_token(options.token_file) if options.token_file else ""
    return config, Endpoint(options.connect, token, options.cert, options.patience)


def lend(what: str, args: list[str], parser: argparse.ArgumentParser) -> int:
    """Work for the run until it ends, or until SIGINT or SIGTERM."""
    config, endpoint = _options(args, parser)
    signals = list[int]()

    def leave() -> None:
        if signals:
            raise Stopped

    def report(line: str) -> None:
        print(line, flush=True)

    try:
        with on_signals(signals.append):
            (lend_envs if what == "envs" else lend_actor)(config, endpoint, Worker(report, leave))
    except Stopped:
        report("left before the work began")
    except RunEnded as reason:
        report(str(reason))
    return 0
