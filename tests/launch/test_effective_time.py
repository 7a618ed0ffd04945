"""How much of its time a run trains although a process is killed every minute: its effective training time.

It takes a minute for each architecture. `make chaos` gives each five minutes, and writes runs/effective.json.
"""

from __future__ import annotations

import json
import os
import signal
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from coterie.runs.metrics import read_metrics
from tests.support.commands import Command
from tests.support.process_table import family
from tests.support.runs import check_rows

pytestmark = pytest.mark.slow
SECONDS = float(os.environ.get("COTERIE_EFFECTIVE_S", "60"))
EVERY_S = 60.0  # between two kills; the first comes in the middle of the first minute
WINDOW_S, LEAST = 5.0, 0.9
PAUSE_S = 10.0  # without a step, after a learner was killed
RUNS = {  # the preset, its processes, and the names of those that are killed by turns
    "sync PPO": (["ppo", "--exchange", "allreduce", "--learners", "2"], ("learner 0", "learner 1")),
    "Hogwild A3C": (["a3c", "--learners", "2"], ("learner 0", "learner 1")),
    "GALA-PPO": (["gala-ppo", "--learners", "2"], ("learner 0", "learner 1")),
    "IMPALA": (["impala", "--actors", "2"], ("learner 0", "actor 1")),
    "SEED": (["seed-vtrace", "--actors", "2"], ("learner 0", "host 1")),
}


def effective(times: list[float], steps: list[float], lost: float) -> float:
    """The share of the time in which a run learned what it kept, from its lines of metrics. `lost`: rows acted in vain.

    A window of 5 s below three quarters of the usual rate counts as the part of it that it is; the rest is noise.
    """
    edges = np.linspace(times[0], times[-1], 1 + round((times[-1] - times[0]) / WINDOW_S))
    rates = np.diff(np.interp(edges, times, steps)) / np.diff(edges)
    usual = float(np.median(rates))
    parts = np.where(rates < 0.75 * usual, rates / usual, 1.0)
    return float(parts.mean()) - lost / usual / (edges[-1] - edges[0])


def test_effective_time_of_known_runs():
    times = [float(t) for t in range(101)]
    steady = [100.0 * t for t in times]
    assert effective(times, steady, 0.0) == 1.0
    assert effective(times, steady, 1000.0) == pytest.approx(0.9)
    paused = [100.0 * min(t, 40.0) + 100.0 * max(0.0, t - 60.0) for t in times]
    assert effective(times, paused, 0.0) == pytest.approx(0.8)
    halved = [100.0 * t - 50.0 * min(max(t - 40.0, 0.0), 20.0) for t in times]
    assert effective(times, halved, 0.0) == pytest.approx(0.9)


@pytest.mark.parametrize("kind", RUNS)
def test_a_run_trains_nine_tenths_of_its_time(tmp_path, kind):
    args, killed = RUNS[kind]
    options = {
        "steps": 10**9,
        "log.every": 0.25,
        "log.checkpoint_every": 5,
        "log.tensorboard": False,
        "out": tmp_path / "run",
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    run = Command(["train", *args, "--env", "CartPole-v1", *words], tmp_path / "run")
    try:
        run.until(lambda: run.line().get("env_steps", 0) > 5000, "it trains")
        begin = time.monotonic()
        first, kills = len(run.lines()) - 1, 0
        while (now := time.monotonic() - begin) < SECONDS:
            if now > (kills + 0.5) * EVERY_S:
                processes = json.loads((run.out / "processes.json").read_text())["processes"]
                (pid,) = [one["pid"] for one in processes if one["name"] == killed[kills % len(killed)]]
                assert pid in family(run.process.pid)
                os.kill(pid, signal.SIGKILL)
                kills += 1
            assert run.process.poll() is None, run.text()[-2000:]
            time.sleep(0.1)
        lines = [line for line in read_metrics(run.out)[first:] if "mean_return" in line]
        run.end(signal.SIGTERM, 75)
        rows = check_rows(run.out)["rows"]  # what was rolled back has no line, so its time is still
        share = effective([x["seconds"] for x in lines], [x["env_steps"] for x in lines], rows["dropped"])
        progress = [b["seconds"] for a, b in pairwise(lines) if b["env_steps"] > a["env_steps"]]
        pause = float(np.diff(progress).max())
        row = {
            "what": kind, "seconds": round(SECONDS), "kills": kills, "effective": round(share, 3),
            "longest_pause_s": round(pause, 1), "rows": rows,
        }  # fmt: skip
        if path := os.environ.get("COTERIE_EFFECTIVE"):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            before = json.loads(Path(path).read_text()) if Path(path).exists() else []
            Path(path).write_text(json.dumps([*(x for x in before if x["what"] != kind), row], indent=1) + "\n")
        assert kills >= SECONDS // EVERY_S
        assert share > LEAST, row
        assert pause < PAUSE_S, row
    finally:
        run.close()
