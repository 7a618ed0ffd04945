"""How much of its time a run trains although a process is killed every minute: its effective training time.

It takes a minute for each architecture. `make chaos` gives each five minutes, and writes runs/effective.json.
"""

from __future__ import annotations

import json
import os
import signal
import time
from itertools import pairwise

import numpy as np
import pytest

from coterie.runs.metrics import read_metrics
from tests.support.commands import Command
from tests.support.process_table import family
from tests.support.runs import check_rows, keep

pytestmark = pytest.mark.slow
SECONDS = float(os.environ.get("COTERIE_EFFECTIVE_S", "60"))
EVERY_S = 60.0  # between two kills; the first comes in the middle of the first minute
AFTER_S, LEAST = 10.0, 0.9  # a rate is usual from so long after a kill
PAUSE_S = 10.0  # without a step, after a learner was killed
RUNS = {  # the preset, its processes, and the names of those that are killed by turns
    "sync PPO": (["ppo", "--exchange", "allreduce", "--learners", "2"], ("learner 0", "learner 1")),
    "Hogwild A3C": (["a3c", "--learners", "2"], ("learner 0", "learner 1")),
    "Store A3C": (["a3c-store", "--learners", "2"], ("learner 0", "learner 1")),
    "GALA-PPO": (["gala-ppo", "--learners", "2"], ("learner 0", "learner 1")),
    "IMPALA": (["impala", "--actors", "2"], ("learner 0", "actor 1")),
    "SEED": (["seed-vtrace", "--actors", "2"], ("learner 0", "host 1")),
}


def effective(times: list[float], steps: list[float], kills: list[float], lost: float) -> float:
    """The share of the time in which a run learned what it kept, from its lines of metrics and the times of the kills:
    its rate over the usual one, which is that of all time but the 10 s after each kill. `lost`: rows acted in vain.
    """
    edges = np.unique([times[0], times[-1], *kills, *(x + AFTER_S for x in kills)])
    edges = edges[(edges >= times[0]) & (edges <= times[-1])]
    made, seconds = np.diff(np.interp(edges, times, steps)), np.diff(edges)
    middle = edges[:-1] + seconds / 2
    calm = ~np.any([(middle > x) & (middle < x + AFTER_S) for x in kills], 0) if kills else np.full(len(middle), True)
    usual = made[calm].sum() / seconds[calm].sum()
    return float((made.sum() - lost) / usual / seconds.sum())


def test_effective_time_of_known_runs():
    times = [0.5 * t for t in range(201)]

    def run(*pauses: tuple[float, float]) -> list[float]:
        return [100.0 * (t - sum(min(max(t - begin, 0.0), end - begin) for begin, end in pauses)) for t in times]

    assert effective(times, run(), [], 0.0) == 1.0
    assert effective(times, run(), [40.0], 0.0) == 1.0
    assert effective(times, run(), [40.0], 1000.0) == pytest.approx(0.9)
    assert effective(times, run((40.0, 44.0)), [40.0], 0.0) == pytest.approx(0.96)
    every = [(x, x + 1.5) for x in range(5, 100, 15)]
    assert effective(times, run(*every), [x for x, _ in every], 0.0) == pytest.approx(1 - 0.015 * len(every))


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
        first, kills = len(run.lines()) - 1, list[float]()
        while (now := time.monotonic() - begin) < SECONDS:
            if now > (len(kills) + 0.5) * EVERY_S:
                processes = json.loads((run.out / "processes.json").read_text())["processes"]
                (pid,) = [one["pid"] for one in processes if one["name"] == killed[len(kills) % len(killed)]]
                assert pid in family(run.process.pid)
                os.kill(pid, signal.SIGKILL)
                kills.append(run.line()["seconds"])
            assert run.process.poll() is None, run.text()[-2000:]
            time.sleep(0.1)
        lines = [line for line in read_metrics(run.out)[first:] if "mean_return" in line]
        run.end(signal.SIGTERM, 75)
        rows = check_rows(run.out)["rows"]  # what was rolled back has no line, so its time is still
        times, steps = [x["seconds"] for x in lines], [x["env_steps"] for x in lines]
        share = effective(times, steps, kills, rows["dropped"])
        progress = [b["seconds"] for a, b in pairwise(lines) if b["env_steps"] > a["env_steps"]]
        pause = float(np.diff(progress).max())
        row = {
            "what": kind, "seconds": round(SECONDS), "kills": [round(x - times[0], 1) for x in kills],
            "effective": round(share, 3), "longest_pause_s": round(pause, 1), "rows": rows,
            "steps_each_second": np.diff(np.interp(np.arange(times[0], times[-1]), times, steps)).round().tolist(),
        }  # fmt: skip
        keep("COTERIE_EFFECTIVE", [row], "what")
        assert len(kills) >= SECONDS // EVERY_S
        assert share > LEAST, row
        assert pause < PAUSE_S, row
    finally:
        run.close()
