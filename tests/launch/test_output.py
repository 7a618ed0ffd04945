"""Runs whose output nobody reads, or nobody can: they train on, save their checkpoint, and exit with the right code."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from coterie.runs import checkpoint
from tests.support.commands import PATIENCE
from tests.support.outputs import outputs
from tests.support.runs import ENDLESS, inline_options, last_checkpoint, read_summary
from tests.support.waiting import wait_until

# `coterie`, which waits a second, not five, for what nobody reads.
COTERIE = """import runpy; from coterie.launch import session; from coterie.runs import starting
starting._LEAVE_S = session._SAY_S = 1.0; runpy.run_module("coterie", run_name="__main__", alter_sys=True)"""
COUNTING = {"env.id": "coterie.envs.testing:CountingEnv", "env.num_envs": 2, "learners": 1}


@pytest.mark.parametrize("kind", ["closed pipe", "closed terminal", "full pipe", "full terminal"])
def test_a_run_without_a_reader_trains_on_until_a_signal(tmp_path: Path, kind: str) -> None:
    out, (write, read) = tmp_path / "run", outputs(kind)
    command = [sys.executable, "-c", COTERIE, *inline_options(out, "solo", **ENDLESS, **COUNTING)]
    env = {**os.environ, "TERM": "xterm"}
    run = subprocess.Popen(command, stdout=write, stderr=subprocess.PIPE, env=env, start_new_session=True)
    os.close(write)
    try:
        saved = out / "checkpoints"
        wait_until(lambda: len(list(saved.glob("step_*"))) > 2, PATIENCE, "it trains")
        run.send_signal(signal.SIGTERM)
        _, errors = run.communicate(timeout=PATIENCE)
    finally:
        run.kill()
    if read >= 0:
        os.close(read)
    assert (run.returncode, errors) == (75, b"")
    assert read_summary(out)["status"] == "interrupted"
    assert last_checkpoint(out)[1]["env_steps"] == read_summary(out)["env_steps"]


def test_a_run_whose_output_is_on_a_full_disk_finishes(tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = [sys.executable, "-c", COTERIE, *inline_options(out, "solo", **COUNTING, steps=300)]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert read_summary(out)["status"] == "finished"


LEFT = """import sys, threading, time; from coterie import __main__
from coterie.envs.testing import CountingEnv
class Leaving(CountingEnv):
    def __init__(self): super().__init__(); threading.Thread(target=time.sleep, args=(1000,)).start()
if __name__ == "__main__":
    __main__._SAY_S = __main__._LEFT_S = 0.1; sys.argv[1:1] = ["train", "a2c"]; sys.exit(__main__.main())"""


def test_a_run_ends_although_its_env_leaves_a_thread_and_the_output_lacks_a_letter(tmp_path: Path) -> None:
    (tmp_path / "left.py").write_text(LEFT)
    options = ["--env", "left:Leaving", "--env.backend", "workers", "--steps", "300", "--out", "\u65e5"]
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "left.py", *options]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.endswith(b"waiting up to 0.1 s for threads of an env or a callback: Thread-1 (sleep)\n")
    assert re.search(rb"\nfinished: [\d,]+ env steps in \d+ s, .*\nevaluate: coterie eval '\\u65e5'\n", done.stdout)


def failing(folder: Path, how: str, output: int) -> str:
    """A run with an env that fails, and this output. Returns the reason in its summary."""
    out, env = folder / "run", {"env.id": "tests.support.flaky:FlakyEnv"}
    options = {**COUNTING, **env, "env.kwargs": json.dumps({"how": how, "at": 3}), "log.stall": 2}
    command = [sys.executable, "-c", COTERIE, *inline_options(out, "solo", **options)]
    done = subprocess.run(command, stdout=output, stderr=output, check=False, timeout=PATIENCE)
    assert (done.returncode, read_summary(out)["status"]) == (1, "failed")
    assert checkpoint.latest(out / "checkpoints") is not None  # the one at step 0
    return str(read_summary(out)["reason"])


@pytest.mark.parametrize(
    ("how", "reason"),
    [("raise", "flaky by design"), ("hang", r"no rollout for .* \(log\.stall\)")],
    ids=["raise", "hang"],
)
def test_a_run_that_fails_ends_although_nobody_reads_why(tmp_path: Path, how: str, reason: str) -> None:
    write, read = outputs("full pipe")
    try:
        assert re.search(reason, failing(tmp_path, how, write))
    finally:
        os.close(write)
        os.close(read)


@pytest.mark.slow
def test_a_run_that_hangs_says_why(tmp_path: Path) -> None:
    with (tmp_path / "said").open("w") as file:
        reason = failing(tmp_path, "hang", file.fileno())
    assert (tmp_path / "said").read_text().splitlines()[-1] == f"coterie: {reason}"
