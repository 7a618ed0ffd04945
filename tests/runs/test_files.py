"""Files that are written whole, although the disk refuses parts of them."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from coterie.errors import ConfigError
from coterie.runs import files
from coterie.runs.files import Journal, answered, sole_writer
from tests.support.waiting import wait_until


def test_a_journal_loses_no_line_and_writes_none_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room, write = [25], os.write

    def narrow(handle: int, data: bytearray) -> int:
        if not (part := min(room[0], 7, len(data))):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        room[0] -= part
        return write(handle, data[:part])

    monkeypatch.setattr(os, "write", narrow)
    journal = Journal(tmp_path / "lines")
    lines = [f"line {i}\n" for i in range(10)]
    for i, line in enumerate(lines):
        room[0] += 20 * (i == 7)
        try:
            journal.write(line)
        except OSError:
            assert i >= 3
    with pytest.raises(OSError, match="No space"):
        Journal.write(journal, "")
    room[0] = 1000
    journal.close()
    assert (tmp_path / "lines").read_text() == "".join(lines)


def test_a_writer_that_has_only_just_taken_the_lock_is_named(tmp_path: Path, monkeypatch: Any) -> None:
    with (tmp_path / ".lock").open("w", buffering=1) as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        monkeypatch.setattr(files.time, "sleep", lambda seconds: other.write("pid 1 on afar\n"))
        with pytest.raises(ConfigError, match=r"is being trained by pid 1 on afar$"), sole_writer(tmp_path):
            raise AssertionError("it has two writers")


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_named(number: int, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    def refuse(*args: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with sole_writer(tmp_path):
        pass
    reason = f"{tmp_path} has no lock ({os.strerror(number)})"
    assert capsys.readouterr().err == f"coterie: {reason}: make sure that no other process trains this run\n"


def test_what_a_disk_does_not_answer_is_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its call is waited for once, and those after it not at all."""
    answers, write = threading.Event(), os.write

    def hang(handle: int, data: bytes) -> int:
        assert answers.wait(60)
        return write(handle, data)

    journal = Journal(tmp_path / "lines")
    monkeypatch.setattr(os, "write", hang)
    with pytest.raises(TimeoutError, match="the disk does not answer"):
        answered(lambda: os.write(journal._fd, b"line 0\n"), 0.1)
    begin = time.monotonic()
    for i in (1, 2):
        with pytest.raises(TimeoutError, match="the disk does not answer"):
            journal.write(f"line {i}\n")
    assert time.monotonic() - begin < 5  # at once
    answers.set()
    wait_until(lambda: not any(thread.name == "coterie-disk" for thread in threading.enumerate()), 10, "it answers")
    journal.write("line 3\n")
    journal.close()
    assert (tmp_path / "lines").read_text() == "".join(f"line {i}\n" for i in range(4))
    with pytest.raises(ZeroDivisionError):
        answered(lambda: 1 // 0)


def test_an_answer_is_taken_however_late_it_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process may have been stopped while the disk worked."""
    monkeypatch.setattr(files, "awake", iter((0.0, 1e9)).__next__)
    assert answered(lambda: 3, 1.0) == 3
