"""Runs of several learners that are sent a signal, alone or as a process group, or whose parent is killed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from coterie import cli
from coterie.parallel.processes import own_folder
from tests.launch.harness import (
    ENDLESS,
    EXCHANGES,
    PATIENCE,
    check_accounts,
    gone,
    last_checkpoint,
    last_line,
    options,
    read_summary,
    until,
)

COUNTING = {"env.id": "coterie.envs.testing:CountingEnv", "env.num_envs": 4}


def tagged(tag: str) -> dict[int, str]:
    """Processes of a run, found by their environment: whoever their parents are by now."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if tag.encode() in (folder / "environ").read_bytes() and not gone(int(folder.name)):
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:120]
    return found


class Outside:
    """A run in a process group of its own."""

    def __init__(self, tmp_path: Path, exchange: str, **changes: object) -> None:
        self.out, self.tag = tmp_path / "run", f"COTERIE_TEST={tmp_path}"
        self.tmp = Path(tempfile.mkdtemp(prefix="ct-"))  # a socket's path must be short
        key, _, value = self.tag.partition("=")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "coterie.cli", *options(self.out, exchange, **ENDLESS, **changes)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, key: value, "TMPDIR": str(self.tmp)},
            start_new_session=True,
        )

    def wait_for(self, pattern: str) -> None:
        def there() -> bool:
            assert self.process.poll() is None, self.process.communicate()
            return any(file.stat().st_size for file in self.out.glob(pattern))

        until(there, f"{pattern} appears")

    def end(self) -> tuple[int, str, str]:
        stdout, stderr = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, stdout, stderr

    def clear_up(self) -> None:
        for pid in tagged(self.tag):
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate()
        shutil.rmtree(self.tmp, ignore_errors=True)


@pytest.fixture
def outside(tmp_path) -> Iterator[Callable[..., Outside]]:
    runs: list[Outside] = []

    def start(exchange: str, **changes: object) -> Outside:
        runs.append(Outside(tmp_path, exchange, **changes))
        return runs[-1]

    yield start
    for run in runs:
        run.clear_up()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_signal_checkpoints_and_the_run_can_be_resumed(capsys, meddler, exchange, number):
    out = meddler.out

    def interrupt() -> None:
        meddler.at_work()
        for _, pid in meddler.started:  # shared memory has no name: nothing of it can stay behind
            files = [*Path(f"/proc/{pid}/fd").iterdir(), *Path(f"/proc/{pid}/map_files").iterdir()]
            for file in files:
                with suppress(OSError):
                    target = os.readlink(file)
                    assert not target.startswith("/dev/shm") or target.endswith("(deleted)"), target
        os.kill(os.getpid(), number)

    assert meddler.run(options(out, exchange, **ENDLESS), interrupt) == 75
    assert f"{number.name}: checkpoint written" in capsys.readouterr().out
    summary = read_summary(out)
    assert (summary["status"], summary["reason"]) == ("interrupted", number.name)
    assert summary["restarts"] == 0
    check_accounts(out, summary)
    meddler.check_nothing_left()
    if number == signal.SIGINT:
        return  # one resumed run for each exchange is enough
    total = summary["env_steps"] + 1000
    assert cli.main(["resume", str(out), "--steps", str(total)]) == 0
    again = read_summary(out)
    assert again["status"] == "finished"
    assert again["rows"]["rolled_back"] == 0
    assert total <= again["env_steps"] <= total + 4 * 128
    assert again["learner_steps"] > summary["learner_steps"]
    check_accounts(out, again)
    meddler.check_nothing_left()


def test_a_second_signal_ends_it_at_once(capsys, meddler):
    """Also where a learner is in the middle of a long rollout."""
    out = meddler.out

    def interrupt_twice() -> None:
        meddler.until(lambda: meddler.saved() == 0 and meddler.steps() >= 0, "the first checkpoint")
        time.sleep(0.5)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)

    assert meddler.run(options(out, "gossip", **{**ENDLESS, "env.delay": 5}), interrupt_twice) == 1
    assert last_line(capsys) == "coterie: stopped at once; the last checkpoint stands"
    assert read_summary(out)["status"] == "failed"
    last_checkpoint(out)
    meddler.check_nothing_left()


def test_everybody_goes_with_a_killed_parent(outside):
    """Learners that wait for each other, and their env workers."""
    run = outside("allreduce", **COUNTING)
    run.wait_for("metrics.jsonl")
    assert len(tagged(run.tag)) >= 6  # parent, fork server, two learners with two workers at least
    run.process.kill()
    run.process.wait()
    until(lambda: not tagged(run.tag), "all are gone", 5)
    (left,) = run.tmp.glob("coterie-*")  # where they met: the next run sees to it
    own_folder(str(run.tmp))
    assert not left.exists()


@pytest.mark.parametrize(
    ("exchange", "number", "changes", "early"),
    [
        ("gossip", signal.SIGINT, COUNTING, False),
        ("hogwild", signal.SIGINT, {}, True),
        ("allreduce", signal.SIGTERM, COUNTING, False),
    ],
)
def test_a_signal_to_the_whole_process_group(outside, exchange, number, changes, early):
    """As a terminal's Ctrl-C and `timeout` or a service manager send it: to every process of the run.

    `early`: while the server that the learners are forked from still loads torch.
    """
    run = outside(exchange, **changes)
    if early:
        until(lambda: "forkserver" in " ".join(tagged(run.tag).values()), "the fork server starts")
    else:
        run.wait_for("metrics.jsonl")
    os.killpg(run.process.pid, number)
    code, stdout, stderr = run.end()
    assert (code, stderr) == (75, "")
    assert f"{number.name}: checkpoint written" in stdout
    summary = read_summary(run.out)
    assert (summary["status"], summary["envs_replaced"]) == ("interrupted", 0)
    _, state = last_checkpoint(run.out)
    assert state["env_steps"] == summary["env_steps"]
    until(lambda: not tagged(run.tag), "all are gone", 5)
    assert list(run.tmp.iterdir()) == []
