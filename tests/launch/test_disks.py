"""Runs whose disk turns read-only, or does not answer for a while: they train on, and write again when they can."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from coterie.flight.record import FlightRecorder
from coterie.launch import retries
from coterie.runs import checkpoint, files
from coterie.runs.metrics import read_metrics
from tests.support.runs import ENDLESS, check_rows, inline_options, last_line

STALL = {"log.stall": 16}


class Disk:
    """A file system of its own. While it is frozen each write to it waits, and no signal ends that."""

    def __init__(self, folder: Path) -> None:
        self.path, image = folder / "disk", folder / "image"
        self.path.mkdir()
        with image.open("wb") as file:
            file.truncate(1 << 25)
        for command in (["mkfs.ext4", "-q", image], ["mount", "-o", "loop", image, self.path]):
            if subprocess.run(command, capture_output=True).returncode:
                pytest.skip("cannot mount a file system")

    def freeze(self, how: str = "-f") -> None:
        subprocess.run(["fsfreeze", how, self.path], check=True)

    def become_read_only(self) -> None:
        """As after an error, also while files are open."""
        subprocess.run(["mount", "-o", "remount,abort", self.path], check=True)

    def close(self) -> None:
        subprocess.run(["fsfreeze", "-u", self.path], capture_output=True)
        subprocess.run(["umount", "-l", self.path], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    disk = Disk(tmp_path)
    yield disk
    disk.close()


@pytest.fixture
def trains_on(meddler, tally) -> Callable[[], None]:
    def wait() -> None:
        """Until it has trained on without a pause as long as a wait for a disk."""
        began = moved = steps = 0.0

        def met() -> bool:
            nonlocal began, moved, steps
            now, before, steps = time.monotonic(), steps, tally.steps
            if steps > before:
                began, moved = began if now - moved < 1.5 else now, now
            return moved - began > 3

        meddler.until(met, "it trains on")

    return wait


@pytest.mark.parametrize("exchange", ["solo", "gossip"])
def test_a_disk_that_does_not_answer_costs_no_step(meddler, tally, disk, trains_on, exchange, capsys):
    meddler.out, said = disk.path / "run", []

    def is_said() -> bool:
        said.append(capsys.readouterr().out)
        return "the disk does not answer; training goes on" in "".join(said)

    def freeze() -> None:
        meddler.at_work()
        meddler.hurry(4, files, retries)
        disk.freeze()
        meddler.until(is_said, "it is said")
        trains_on()
        disk.freeze("-u")
        meddler.saves_again()
        meddler.interrupt()

    learners = 1 + (exchange == "gossip")
    options = inline_options(meddler.out, exchange, **{**ENDLESS, **tally.options, **STALL, "learners": learners})
    assert meddler.run(options, freeze) == 75
    assert check_rows(meddler.out).get("restarts", 0) == 0
    seen = [line["env_steps"] for line in read_metrics(meddler.out)]
    assert seen == sorted(seen)


def test_a_signal_ends_a_run_whose_disk_does_not_answer(meddler, tally, disk, trains_on, monkeypatch, capsys):
    meddler.out = disk.path / "run"
    monkeypatch.setattr(FlightRecorder.close, "__defaults__", (1.0,))

    def freeze() -> None:
        meddler.at_work()
        meddler.hurry(4, files)
        disk.freeze()
        trains_on()
        meddler.hurry(4, retries)
        os.kill(os.getpid(), signal.SIGTERM)

    changes = {**ENDLESS, **tally.options, **STALL, "learners": 1, "log.unsaved_limit": 20}
    assert meddler.run(inline_options(meddler.out, "solo", **changes), freeze) == 1
    out, line = capsys.readouterr()
    assert "the disk does not answer; it is tried again" in out
    assert re.search(r"the disk does not answer, for [23]\d s \(log\.unsaved_limit\)", line)


@pytest.mark.parametrize("exchange", ["solo", "gossip"])
def test_a_run_whose_disk_is_read_only_trains_on_until_its_limit(meddler, tally, disk, trains_on, exchange, capsys):
    meddler.out = disk.path / "run"

    def stop_writes() -> None:
        meddler.at_work()
        disk.become_read_only()
        trains_on()
        meddler.hurry(4, retries)

    changes = {**ENDLESS, **tally.options, "learners": 1 + (exchange == "gossip"), "log.unsaved_limit": 20}
    assert meddler.run(inline_options(meddler.out, exchange, **changes), stop_writes) == 1
    said, line = capsys.readouterr()
    assert "training goes on, and it is tried again" in said
    assert "(log.unsaved_limit); last good checkpoint: " in line


@pytest.mark.parametrize("exchange", ["allreduce", "gossip"])
def test_a_learner_dies_while_checkpoints_cannot_be_read(meddler, exchange, monkeypatch, capsys):
    """Those that all go back end with the reason. Others train on without it, and the parent reads nothing for it."""
    answers = threading.Event()

    def kill() -> None:
        meddler.at_work()
        meddler.hurry(4, files)
        for name in ("read_manifest", "_complete"):
            read = getattr(checkpoint, name)
            monkeypatch.setattr(checkpoint, name, lambda path, read=read: answers.wait(60) and read(path))
        for pid in [meddler.pid(rank) for rank in range(2) if exchange == "allreduce" or rank]:
            os.kill(pid, signal.SIGKILL)
        if exchange == "gossip":
            meddler.until(lambda: meddler.starts(1) == 2, "it is started again")
            answers.set()
            meddler.saves_again()
            meddler.interrupt()

    options = inline_options(meddler.out, exchange, **ENDLESS, **STALL)
    try:
        assert meddler.run(options, kill) == (75 if exchange == "gossip" else 1)
        if exchange == "allreduce":
            assert "cannot be read: the disk does not answer" in last_line(capsys)
    finally:
        answers.set()
