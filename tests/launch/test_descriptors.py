"""A run that may open no file any more, as on a machine where another program takes all descriptors."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import time
from contextlib import suppress
from typing import Any

import pytest

from tests.support.commands import Command
from tests.support.runs import check_rows


def free_descriptor(pid: int) -> int:
    """The lowest number that a process could give to a file."""
    used = {int(number) for number in os.listdir(f"/proc/{pid}/fd")}
    return min(set(range(len(used) + 1)) - used)


@pytest.mark.parametrize(
    ("args", "killed"),
    [
        (["ppo"], ""),
        (["gala-ppo", "--learners", "2"], "learner 1"),
        (["impala", "--actors", "2"], "actor 1"),
        pytest.param(["ppo", "--learners", "2"], "learner 1", marks=pytest.mark.slow),
        pytest.param(
            ["impala", "--exchange", "gossip", "--learners", "2", "--actors", "2"], "learner 1", marks=pytest.mark.slow
        ),
    ],
)
def test_a_run_without_a_descriptor_left_trains_on(tmp_path, args, killed):
    """Files cannot be opened, and a process that dies cannot be started again, until there are descriptors."""
    settings = [
        "--steps",
        "1000000000",
        "--log.checkpoint-every",
        "0.5",
        "--log.every",
        "0.2",
        "--log.tensorboard",
        "False",
    ]
    run = Command(["train", *args, "--env", "CartPole-v1", *settings, "--out", str(tmp_path / "run")], tmp_path / "run")
    try:
        run.until(
            lambda: list(run.out.glob("checkpoints/step_*")) and run.line().get("env_steps", 0) > 2000, "it trains"
        )

        def processes() -> list[dict[str, Any]]:
            return json.loads((run.out / "processes.json").read_text())["processes"]

        acting = "actor" if "--actors" in args else "learner"
        run.until(lambda: all(x["env_steps"] for x in processes() if x["name"].startswith(acting)), "all have started")
        pids = {one["name"]: one["pid"] for one in processes()}
        limits = {pid: resource.prlimit(pid, resource.RLIMIT_NOFILE) for pid in {run.process.pid, *pids.values()}}
        free = dict[int, int]()

        def none_is_left() -> bool:
            """Until it is said: the lowest number may be that of a file that is open for a moment only."""
            for pid, (_, hard) in limits.items():
                free[pid] = min(free.get(pid, hard), free_descriptor(pid))
                resource.prlimit(pid, resource.RLIMIT_NOFILE, (free[pid], hard))
            return "Too many open files" in run.text()

        run.until(none_is_left, "a file that cannot be opened is said")
        if killed:
            os.kill(pids[killed], signal.SIGKILL)
            limits.pop(pids[killed])
            run.until(lambda: re.search("no (process|learner) can be started: ", run.text()), "it is said")
        time.sleep(2)
        for pid, limit in limits.items():
            with suppress(ProcessLookupError):  # where all learners go back
                resource.prlimit(pid, resource.RLIMIT_NOFILE, limit)
        steps, before = run.line()["env_steps"], set(run.out.glob("checkpoints/step_*"))
        run.until(lambda: set(run.out.glob("checkpoints/step_*")) - before, "a later checkpoint")
        run.until(lambda: run.line()["env_steps"] > steps, "later steps")
        run.end(signal.SIGTERM, 75)
        check_rows(run.out)
    finally:
        run.close()
