"""Signals that come while a run starts: exit code 75 or 128 + number with an untouched folder, or a checkpoint."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from coterie import __main__
from coterie.cli.main import main
from coterie.launch import session
from coterie.parallel.signals import HANDLED
from tests.support.runs import ENDLESS, inline_options, last_checkpoint


@pytest.mark.parametrize(("resumed", "code"), [(False, 143), (True, 75)])
def test_a_signal_while_a_run_starts_leaves_its_folder_as_it_was(command, tmp_path, monkeypatch, resumed, code):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    (tmp_path / "slow_env.py").write_text(SLOW_ENV)
    slow = {"learners": 1, "env.id": "slow_env:make", "env.num_envs": 1, "steps": 300}

    def files() -> dict[Path, bytes]:
        found = [path for path in tmp_path.glob("run/**/*") if path.is_file() and path.name != ".lock"]
        return {path: path.read_bytes() for path in found}

    if resumed:
        command(inline_options, "solo", **slow).end()
    before = files()
    (tmp_path / "wait").touch()
    new = partial(inline_options, exchange="solo", **slow)
    run = command((lambda out: ["resume", str(out), "--steps", "600"]) if resumed else new)
    run.until(lambda: (tmp_path / "waits").exists(), "it makes the env")
    run.end(signal.SIGTERM, code)
    assert "SIGTERM before the run began; nothing was written" in run.text()
    assert files() == before


@pytest.mark.parametrize("some", [slice(6), pytest.param(slice(6, 16), marks=pytest.mark.slow)])
def test_a_signal_at_any_moment_of_the_imports_leaves_the_folder_as_it_was(command, tmp_path, some):
    """At one of thousands of imports, in the middle of which Python may be."""
    run = command(inline_options, "solo", learners=1, steps=300)
    run.end()
    files = {path: path.read_bytes() for path in run.out.glob("**/*") if path.is_file()}
    words = [sys.executable, "-m", "coterie", "resume", str(run.out), "--steps", "100000"]
    (tmp_path / "sitecustomize.py").write_text(SIGNAL_AT_IMPORT)
    path = os.pathsep.join([str(tmp_path), *sys.path])

    def resume(at: int) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "PYTHONPATH": path, "SIGNAL_AT": str(at)}
        return subprocess.run(words, env=env, capture_output=True, text=True, timeout=120, check=False)

    # The first one of the command line's own modules, and the last one before the run folder is opened.
    first, last = map(int, resume(0).stdout.splitlines()[-1].split())
    assert last > first + 1000
    ended = set()
    for at in [1, first, first + 1, *random.Random(6).sample(range(first, last), 16)[some]]:
        done = resume(at)
        before = done.returncode == -signal.SIGTERM and at < first  # Python itself is not yet there
        assert before or done.returncode == 75, (at, done.returncode, done.stdout, done.stderr)
        assert before or done.stderr == "coterie: SIGTERM before the run began; nothing was written\n"
        assert {path: path.read_bytes() for path in run.out.glob("**/*") if path.is_file()} == files, at
        ended.add(done.returncode)
    assert ended == {75, -signal.SIGTERM}


def test_a_warning_while_a_run_starts_is_ignored(monkeypatch):
    came, before = list[int](), {number: signal.getsignal(number) for number in HANDLED}
    monkeypatch.setattr(sys, "argv", ["coterie", "train"])
    monkeypatch.setattr(__main__, "_SAY_S", 1e6)
    monkeypatch.setattr("coterie.cli.main.main", lambda: os.kill(os.getpid(), signal.SIGUSR1))
    signal.signal(signal.SIGUSR1, lambda number, frame: came.append(number))
    try:
        __main__.main()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert came == []


# Sends this process SIGTERM at import number SIGNAL_AT; if 0, prints the numbers of the first and of the last.
SIGNAL_AT_IMPORT = """
import os
import signal
import sys

count, first = 0, 0


def hook(event, args):
    global count, first
    if event == "import":
        count += 1
        if count == int(os.environ["SIGNAL_AT"]):
            os.kill(os.getpid(), signal.SIGTERM)
        if args[0] == "coterie.cli.main":
            first = count
    if event == "open" and str(args[0]).endswith(".lock") and os.environ["SIGNAL_AT"] == "0":
        print(first, count, flush=True)
        os._exit(0)


sys.addaudithook(hook)
"""


# Its constructor takes a minute once there is a file `wait`.
SLOW_ENV = """
import time
from pathlib import Path

from coterie.envs.testing import CountingEnv


def make():
    here = Path(__file__).parent
    if (here / "wait").exists():
        (here / "waits").touch()
        time.sleep(60)
    return CountingEnv()
"""


@pytest.mark.parametrize("numbers", [(signal.SIGTERM,), (signal.SIGUSR1, signal.SIGTERM)])
def test_a_signal_between_a_run_s_first_files_and_its_training_checkpoints(tmp_path, monkeypatch, numbers):
    prepare = session._prepare

    def then_signal(*args: Any) -> Any:
        signals = prepare(*args)
        for number in numbers:
            os.kill(os.getpid(), number)
        return signals

    monkeypatch.setattr(session, "_prepare", then_signal)
    out = tmp_path / "run"
    warned = {"log.checkpoint_on_warning": len(numbers) > 1}
    assert main(inline_options(out, "solo", learners=1, **ENDLESS, **warned)) == 75
    monkeypatch.undo()
    total = last_checkpoint(out)[1]["env_steps"] + 500
    assert main(["resume", str(out), "--steps", str(total)]) == 0
