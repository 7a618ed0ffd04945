"""Runs whose output nobody reads, or nobody can: they train on, save their checkpoint, and exit with the right code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import PATIENCE
from tests.support.outputs import outputs
from tests.support.runs import ENDLESS, inline_options, last_checkpoint, read_summary
from tests.support.waiting import wait_until

COUNTING = {"env.id": "coterie.envs.testing:CountingEnv", "env.num_envs": 2, "learners": 1}


@pytest.mark.parametrize("kind", ["closed pipe", "closed terminal", "full pipe", "full terminal"])
def test_a_run_without_a_reader_trains_on_until_a_signal(tmp_path: Path, kind: str) -> None:
    out, (write, read) = tmp_path / "run", outputs(kind)
    command = [sys.executable, "-m", "coterie", *inline_options(out, "solo", **ENDLESS, **COUNTING)]
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
    command = [sys.executable, "-m", "coterie", *inline_options(out, "solo", **COUNTING, steps=300)]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert read_summary(out)["status"] == "finished"


def unread(folder: Path, env: str, **changes: object) -> str:
    """A run of an env of its own fails, and nobody reads why. Returns the reason in its summary."""
    (folder / "odd_env.py").write_text(env)
    out, (write, read) = folder / "run", outputs("full pipe")
    options = {**COUNTING, "env.id": "odd_env:Hanging", **changes}
    command = [sys.executable, "-m", "coterie", *inline_options(out, "solo", **options)]
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    try:
        done = subprocess.run(command, stdout=write, stderr=write, env=paths, check=False, timeout=PATIENCE)
    finally:
        os.close(write)
        os.close(read)
    assert done.returncode == 1
    assert read_summary(out)["status"] == "failed"
    return str(read_summary(out)["reason"])


def test_a_run_that_fails_ends_although_nobody_reads_why(tmp_path: Path) -> None:
    assert "odd" in unread(tmp_path, HANGING_ENV.replace("time.sleep(1000)", "raise ValueError('odd')"))


def test_a_run_that_hangs_ends_although_nobody_reads_why(tmp_path: Path) -> None:
    assert "hangs" in unread(tmp_path, HANGING_ENV, **{"log.stall": 2})


HANGING_ENV = """
import time

from coterie.envs.testing import CountingEnv


class Hanging(CountingEnv):
    def step(self, action):
        if self.steps == 3:
            time.sleep(1000)
        return super().step(action)
"""
