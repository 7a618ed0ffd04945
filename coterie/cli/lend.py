"""The commands `coterie envs` and `coterie actor`."""

from __future__ import annotations

import random
from argparse import Namespace
from functools import partial

from coterie.acting.base import Stopped
from coterie.build.resources import resolve_config
from coterie.config import Config, ResolvedConfig
from coterie.parallel.processes import on_signals
from coterie.roles.remote_worker import Worker, lend_actor, lend_envs
from coterie.runs.config_io import read_options, replace, validate
from coterie.types import ConfigError
from coterie.wire.auth import read_token, split
from coterie.wire.client import Endpoint, RunEnded


def _options(options: Namespace, rest: list[str]) -> tuple[ResolvedConfig, Endpoint]:
    """The local envs, and the run to work for."""
    changes = read_options(rest)
    if "env.id" not in changes:
        raise ConfigError("--env: name the run's environment")
    if not options.connect.startswith("unix:"):
        split(options.connect)
    if not options.patience > 0:
        raise ConfigError(f"--patience: {options.patience:g} must be above 0")
    seed = random.SystemRandom().getrandbits(31) if options.seed is None else options.seed
    config = resolve_config(validate(replace(Config(), {"seed": seed, "device": "cpu", **changes})))
    token = read_token(options.token_file) if options.token_file else ""
    return config, Endpoint(options.connect, token, options.cert, options.patience)


def lend(options: Namespace, rest: list[str]) -> int:
    """Work for the run until it ends, or until SIGINT or SIGTERM."""
    config, endpoint = _options(options, rest)
    signals = list[int]()

    def leave() -> None:
        if signals:
            raise Stopped

    report = partial(print, flush=True)
    try:
        with on_signals(signals.append):
            (lend_envs if options.command == "envs" else lend_actor)(config, endpoint, Worker(report, leave))
    except Stopped:
        report("left before the work began")
    except RunEnded as reason:
        report(str(reason))
    return 0
