"""A run's command from its start to its exit code, which does not depend on whether its output can be read."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
import traceback
from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from shlex import quote
from typing import Any, TextIO

from coterie.errors import EXIT_INTERRUPTED, CoterieError, counted, one_line
from coterie.parallel.signals import on_signals
from coterie.runs.starting import Starting, discard_stdout

PROGRESS_S = 10.0  # between two lines of progress of an evaluation


def carry_out(step: str, options: Namespace, work: Callable[[Starting], dict[str, Any]]) -> int:
    """Do the `work` of a run, and report its summary. A signal ends the start at once, until the run's folder is
    written to.
    """
    starting = Starting(step, options.begin)

    def stop(number: signal.Signals) -> None:
        if starting.step:  # else the run has begun, and is over
            did = "; ".join(starting.notes * (options.command == "resume")) or "nothing was written"
            print_to_stderr(f"{number.name} before the run began; {did}")
            starting.code = EXIT_INTERRUPTED if options.command == "resume" else 128 + number
            raise SystemExit(starting.code)

    with on_signals(stop):
        try:
            summary = work(starting)
        except BaseException as error:
            if starting.code:  # a module that was being imported may have made another error of it
                raise SystemExit(starting.code) from None
            if isinstance(error, SystemExit | BrokenPipeError):  # of an env's constructor; `main` would end with 0
                raise CoterieError(one_line(error), traceback.format_exc()) from None
            raise
        finally:
            starting.close()
            if starting.stuck:
                discard_stdout()
                if sys.__stderr__ is not None:  # rich has replaced `sys.stderr`
                    sys.stderr = sys.stdout if _goes_there_too(sys.__stderr__) else sys.__stderr__
        return report(summary)


def report(summary: dict[str, Any]) -> int:
    """Print how a run has ended, and what to do next. Returns its exit code."""
    folder, mean = quote(str(summary["folder"])), summary["mean_return"]
    returns = "no episode ended" if mean is None or mean != mean else f"mean return {mean:.1f} over the last episodes"
    interrupted = summary["status"] == "interrupted"
    steps = "" if interrupted else "  # its callback may end it again" * bool(summary["reason"]) or " --steps N"
    lines = [
        f"{summary['status']}: {summary['env_steps']:,} env steps in {summary['seconds']:.0f} s, {returns}",
        *[f"{summary['reason']}: checkpoint written"] * interrupted,
        f"evaluate: coterie eval {folder}",
        f"resume:   coterie resume {folder}{steps}",
        f"watch:    coterie watch {folder}  # an mp4, if the env draws frames",
    ]
    with suppress(OSError):
        print(*lines, sep="\n")
    flush()
    return EXIT_INTERRUPTED if interrupted else 0


def _score(result: dict[str, Any]) -> str:
    error = "" if math.isnan(result["stderr"]) else f" +- {result['stderr']:.2f}"  # of one episode it is not known
    return f"{result['mean_return']:.2f}{error}"


def scores(result: dict[str, Any]) -> str:
    """What `evaluate_run` found, for people."""
    from coterie.envs.tasks import are_normalized

    several = result.get("tasks", [])
    lines = [f"{task['env']}: {_score(task)} ({counted(task['episodes'], 'episode')})" for task in several]
    score = _score(result)
    if several:
        known = are_normalized(task["env"] for task in several)
        what = "mean human-normalized score, each capped at 1" if known else "mean of the returns"
        score = f"{what}: {result['score']:.3g}"
    how = "sampled" if result["sampled"] else "greedy"
    line = f"{result['env']}: {score} ({counted(result['episodes'], 'episode')}, {how}"
    if late := result["unfinished"]:
        line += f", {late} did not end and are left out: see --env.max-episode-steps"
    if result["human_normalized"] is not None:
        line += f", human-normalized {100 * result['human_normalized']:.0f}%"
    line += "".join(f", {name} {mean:.4g}" for name, mean in result["info"].items())
    return "\n".join([*lines, f"{line}, checkpoint at {result['checkpoint_env_steps']:,} env steps)"])


def progress(episodes: int) -> Callable[[int, int], bool]:
    """Prints how far an evaluation is, every ten seconds."""
    printed = time.monotonic()

    def tell(done: int, steps: int) -> bool:
        nonlocal printed
        if (now := time.monotonic()) - printed >= PROGRESS_S:
            printed = now
            limit = "" if done else " (--env.max-episode-steps N limits an episode)"
            print_to_stderr(
                f"{min(done, episodes)} of {counted(episodes, 'episode')}, {steps:,} env steps so far{limit}"
            )
        return False

    return tell


def print_to_stderr(text: str) -> None:
    """Print a line on stderr."""
    with suppress(OSError):
        print(f"coterie: {text}", file=sys.stderr, flush=True)


def flush() -> None:
    """Write what was printed. Where that fails nothing more is printed."""
    try:
        print(end="", flush=True)
    except OSError:
        discard_stdout()


def _goes_there_too(stderr: TextIO) -> bool:
    """Whether stderr is the terminal, or what stdout goes to."""
    with suppress(OSError):
        return stderr.isatty() or os.path.sameopenfile(1, stderr.fileno())
    return True
