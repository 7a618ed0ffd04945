"""The command line. Exit codes: 0 finished, 1 failed, 2 bad usage or config, 75 checkpointed on a signal. Each command
imports what it needs, so that `coterie --help` is there at once.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from coterie import __version__
from coterie.cli.arguments import COMMANDS, overview, tree
from coterie.cli.ending import flush, print_to_stderr
from coterie.errors import ConfigError, CoterieError


def run(args: list[str], begin: float = 0.0) -> int:
    """Run a command line. Raises `CoterieError`, or `ConfigError` for bad usage. `begin`: when it was typed."""
    if not args or args[0] in ("-h", "--help", "help", "--version", "version"):
        print(f"{__version__}\n" if args and "version" in args[0] else overview(), end="")
        return 0
    from coterie.choices import unknown
    from coterie.plugins import set_command_folder

    try:
        set_command_folder(os.getcwd())  # not "", which children take for another folder
    except OSError:  # MKL ends a process there
        raise ConfigError("the current folder is gone: cd to another one") from None
    name, words = args[0], args[1:]
    if name not in COMMANDS:
        raise unknown("command", name, COMMANDS, f"commands are {', '.join(COMMANDS)}")
    settings = COMMANDS[name].settings
    if settings and not {"-h", "--help"}.isdisjoint(words):
        from coterie.cli.help import settings_help

        print(settings_help(name, words), end="")
        return 0
    parser = tree()[1][name]
    options, rest = parser.parse_known_args(words)
    if rest and not settings:
        way = "; a run keeps its settings: for others, `coterie train PRESET --init-from RUN`" * (name == "resume")
        parser.error(f"unrecognized arguments: {' '.join(rest)}{way}")
    options.command, options.begin = name, begin
    if "out" in options:
        options.out = os.path.expanduser(options.out)  # the shell does it in `--out ~/x`, not in `--out=~/x`
    module, _, function = (COMMANDS[name].run or f"cli.commands:{name}").partition(":")
    call = getattr(importlib.import_module(f"coterie.{module}"), function)
    return int(call(options, rest) if settings else call(options))


def _typed() -> float:
    """Unix time at which this process was started."""
    try:
        ticks = float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except OSError:  # not Linux, where psutil knows the time of the boot in whole seconds only
        import psutil

        return float(psutil.Process().create_time())


def main(argv: Sequence[str] | None = None) -> int:
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        if code := run(args, _typed() if argv is None else 0.0):
            return code
        print(end="", flush=True)
        return 0
    except ConfigError as error:
        print_to_stderr(str(error))
        return 2
    except (CoterieError, OSError) as error:
        if isinstance(error, BrokenPipeError):  # `coterie list envs | head`
            return 0
        if isinstance(error, CoterieError):
            with contextlib.suppress(OSError):
                sys.stderr.write(error.trace)
        print_to_stderr(str(error))
        return 1
    except KeyboardInterrupt:
        print_to_stderr("stopped at once" + "; the last checkpoint is intact" * (args[:1] in (["train"], ["resume"])))
        return 1
    finally:
        flush()
