"""What the flight record costs: the processor time of its calls and of its thread, as a part of a whole run's.

    python benchmarks/flight.py [--steps 200000] [--only NAME ...] [--out FILE.json]

Both are of the same run, so that other work on the machine matters little. The whole is that of all processes, without
their start, which a run of one step has alone. Runs import this file, which then times the calls.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

from coterie.flight.record import FlightRecorder
from coterie.roles.life import FlightNotes

RUNS = {
    "a2c": "a2c --env CartPole-v1",
    "impala": "impala --env CartPole-v1 --actors 1",
    "seed-vtrace": "seed-vtrace --env CartPole-v1",
    "seed-vtrace, 8 envs, 2 hosts": "seed-vtrace --env CartPole-v1 --env.num-envs 8 --actors 2",
    "ppo, LunarLander": "ppo --env LunarLander-v3",
    "a2c, Atari, 128 envs": "a2c --env Breakout-v5 --env.num-envs 128",
    "seed-vtrace, Atari": "seed-vtrace --env Breakout-v5",
}
OUT = "COTERIE_FLIGHT_COST"  # names the folder for what was timed
spent = defaultdict[int, float](float)  # seconds by thread
inside = threading.local()


def timed(owner: type, name: str) -> None:
    """Add up the processor time of a method, without that of others inside."""
    method: Callable[..., Any] = getattr(owner, name)

    @wraps(method)
    def call(*args: Any) -> Any:
        if getattr(inside, "timing", False):
            return method(*args)
        inside.timing, begin = True, time.thread_time()
        try:
            return method(*args)
        finally:
            spent[threading.get_ident()] += time.thread_time() - begin
            inside.timing = False

    setattr(owner, name, call)


def time_the_record(folder: Path) -> None:
    """Write the seconds of this process's record whenever it notes a checkpoint: learners are killed at their end."""
    note = FlightRecorder.note

    def noted(self: FlightRecorder, *event: Any) -> None:
        note(self, *event)
        if event[0] == "saved" and self._thread.ident is not None:
            writer = time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))
            (folder / str(os.getpid())).write_text(str(sum(spent.values()) + writer))

    FlightRecorder.note = noted  # type: ignore[method-assign]
    for owner, name in ((FlightRecorder, "note"), (FlightNotes, "begin"), (FlightNotes, "step")):
        timed(owner, name)


def processor_seconds(options: str, steps: int, folder: Path, **env: str) -> float:
    """Of all processes of a run."""
    command = [sys.executable, "-m", "coterie", "train", *options.split(), "--steps", str(steps), "--out", str(folder)]
    command += ["--plugins.modules", "flight"] if env else []
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    here = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True, env={**os.environ, "PYTHONPATH": here, **env})
    with suppress(ChildProcessError):  # the run's own children, which come to this process
        while True:
            os.wait()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--only", nargs="*", default=list(RUNS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: time of processes that outlive their parent, too
    found = {}
    for name in options.only:
        with tempfile.TemporaryDirectory() as folder:
            start = processor_seconds(RUNS[name], 1, Path(folder, "start"))
            times = Path(folder, "times")
            times.mkdir()
            asked = options.steps // (10 if "Atari" in name else 1)
            whole = processor_seconds(RUNS[name], asked, Path(folder, "run"), **{OUT: str(times)}) - start
            record = sum(float(path.read_text()) for path in times.iterdir())
            summary = json.loads(Path(folder, "run", "summary.json").read_text())
            size = sum(path.stat().st_size for path in Path(folder, "run", "flight").iterdir())
        steps = summary["env_steps"]
        found[name] = {
            "command": RUNS[name],
            "env_steps": steps,
            "record_us": 1e6 * record / steps,
            "run_us": 1e6 * whole / steps,
            "bytes": size / steps,
            "env_steps_per_s": steps / summary["seconds"],
        }
        print(name, {key: round(x, 4) for key, x in found[name].items() if isinstance(x, float)}, flush=True)
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
elif OUT in os.environ:
    time_the_record(Path(os.environ[OUT]))
