"""The flight record: what was noted is read back, whatever ended the writer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import zlib
from io import BytesIO

import pytest

from coterie.errors import ConfigError
from coterie.flight import record
from coterie.flight.record import MAGIC, FlightRecorder, forget_from, lives, path_of, read_life
from tests.support.waiting import wait_until

HEADER = {"learner": 1, "life": 2, "began": 0.0}


def write(folder, events, close=True):
    recorder = FlightRecorder(path_of(folder, 1, 2), lambda: HEADER)
    for event in events:
        recorder.note(*event)
        wait_until(lambda: not (recorder._lines or not recorder._news.empty()), 10, "the thread takes it")
    if close:
        recorder.note("end", "")
    recorder.close()
    return recorder.path


@pytest.mark.parametrize("every", [0.0, 1e9])  # a block for each event, or one for all
def test_events_are_read_back_in_their_order(tmp_path, monkeypatch, every):
    monkeypatch.setattr(record, "EVERY_S", every)
    events = [["rollout", k, [1, 2], "x\ny"] for k in range(30)]
    life = read_life(write(tmp_path, events))
    assert (life.header, life.events, life.end) == (HEADER, [*events, ["end", ""]], "")
    assert life.of("rollout") == [event[1:] for event in events]


def test_a_life_begins_without_the_records_of_what_came_after_its_checkpoint(tmp_path):
    (tmp_path / "flight").mkdir()
    for name in ("learner_0.life_0", "learner_0.life_1.tail", "learner_0.life_1.bak", "learner_1.life_1002"):
        (tmp_path / "flight" / name).touch()
    forget_from(tmp_path, 1)
    assert {path.name for path in (tmp_path / "flight").iterdir()} == {"learner_0.life_0", "learner_0.life_1.bak"}


def test_a_record_without_an_end_has_all_that_was_noted(tmp_path):
    life = read_life(write(tmp_path, [["a", 1], ["b", 2]], close=False))
    assert (life.events, life.end) == ([["a", 1], ["b", 2]], None)


def test_a_killed_process_leaves_all_but_the_inferences_of_its_last_moment(tmp_path):
    code = f"""
import os, signal, time
from pathlib import Path
from coterie.flight.record import FlightRecorder
recorder = FlightRecorder(Path({str(tmp_path)!r}) / "flight" / "learner_0.life_0", dict)
for k in range(1000):
    recorder.note("infer", k)
    recorder.note("rollout", k)
recorder.note("infer", 1000)
time.sleep(0.5)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    found = read_life(path_of(tmp_path, 0, 0)).events
    assert found[:2000] == [[kind, k] for k in range(1000) for kind in ("infer", "rollout")]
    assert len(found) <= 2001


def test_a_damaged_block_ends_the_record_before_it(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "EVERY_S", 0.0)
    path = write(tmp_path, [["a", k] for k in range(5)])
    whole = path.read_bytes()
    for cut in (len(whole) - 1, len(whole) - 40):
        path.write_bytes(whole[:cut])
        life = read_life(path)
        assert life.end is None
        assert life.events == [["a", k] for k in range(len(life.events))]
        assert life.damage.endswith(f" of {cut:,} on")  # the tail says that the file was longer
    path.with_name(f"{path.name}.tail").unlink()
    assert read_life(path).damage == ""  # its process may have been killed there
    last = whole.rindex(b"\x78\x9c") - 8  # a block begins with its length and check sum, then zlib's first bytes
    path.write_bytes(whole[:-3] + b"xyz")
    assert read_life(path).events == [["a", k] for k in range(5)]
    assert read_life(path).damage == f"the record is damaged from byte {last:,} of {len(whole):,} on"


def block(body):
    return record._HEAD.pack(len(body), zlib.crc32(body)) + body


@pytest.mark.parametrize(
    "more",
    [
        bytes(4096),
        block(b"????"),
        block(zlib.compress(b"\xff")),
        block(zlib.compress(b"1\n?")),
        block(zlib.compress(b"1" * 999)),
    ],
    ids=["zeros", "zlib", "utf-8", "json", "size"],
)
def test_a_block_that_no_writer_made_is_damage(tmp_path, monkeypatch, more):
    """Zeros: a file system may leave them when the machine loses power."""
    path = write(tmp_path, [["a", 0]])
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(more)
    monkeypatch.setattr(record, "_MOST_BYTES", 500)
    life = read_life(path)
    assert life.events == [["a", 0], ["end", ""]]
    assert life.damage == f"the record is damaged from byte {size:,} of {size + len(more):,} on"


def test_the_tail_of_an_older_block_does_not_count(tmp_path):
    """The process was killed after it had written a block, and before it began a new tail."""
    path = write(tmp_path, [["a", 0]])
    path.with_name(path.name + ".tail").write_text(f'{path.stat().st_size - 1}\n["a",0]\n')
    assert read_life(path).events == [["a", 0], ["end", ""]]


@pytest.mark.parametrize("tail", ["", "\n", "x\n"])
def test_a_tail_that_tells_nothing_is_left_out(tmp_path, tail):
    """The disk was full when its new beginning was to be written."""
    path = write(tmp_path, [["a", 0]])
    path.with_name(path.name + ".tail").write_text(tail)
    assert read_life(path).events == [["a", 0], ["end", ""]]


def test_a_garbled_line_of_the_tail_is_damage(tmp_path):
    path = write(tmp_path, [["a", 0]], close=False)
    with path.with_name(path.name + ".tail").open("a") as file:
        file.write('["b",1]\n?\n["c",2]\n')
    life = read_life(path)
    assert life.events[0] == ["a", 0]
    assert "damaged" in life.damage


def test_half_a_line_of_the_tail_is_left_out(tmp_path):
    path = write(tmp_path, [["a", 0]], close=False)
    with path.with_name(path.name + ".tail").open("a") as file:
        file.write('["b",1]\n["c')
    assert read_life(path).events == [["a", 0], ["b", 1]]


def killed(path, then):
    """The events of a process that is killed after these statements."""
    code = f"""
import os, signal
from pathlib import Path
from coterie.flight.record import FlightRecorder
recorder = FlightRecorder(Path({str(path)!r}), lambda: {HEADER})
recorder.note("rollout", 0)
{then}
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    return read_life(path).events


def test_what_was_flushed_stays_though_its_process_is_killed_at_once(tmp_path):
    for life in range(5):
        events = killed(path_of(tmp_path, 0, life), "for k in range(999): recorder.note('mix', k)\nrecorder.flush()")
        assert events == [["rollout", 0], *(["mix", k] for k in range(999))]


def test_a_disk_that_does_not_answer_holds_up_one_call(tmp_path):
    path = path_of(tmp_path, 1, 2)
    path.parent.mkdir()
    os.mkfifo(path)  # nobody reads it
    recorder = FlightRecorder(path, lambda: HEADER)
    recorder.note("a", 0)
    begin = time.monotonic()
    for k in range(1000):
        recorder.note("b", k)
        recorder.flush()
    assert time.monotonic() - begin < 60
    os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))


def test_a_process_that_is_killed_at_its_first_event_leaves_it(tmp_path):
    for life in range(5):
        assert killed(path_of(tmp_path, 0, life), "") == [["rollout", 0]]


@pytest.mark.parametrize("text", [b"", MAGIC])
def test_a_record_without_a_header_is_no_life(tmp_path, text):
    path = write(tmp_path, [])
    (before,) = lives(tmp_path, 1)
    path.with_name("learner_1.life_1000").write_bytes(text)
    assert lives(tmp_path, 1) == [before]


@pytest.mark.parametrize("text", ["", "coterie flight 1\n", "coterie flight 2\n"])
def test_a_file_that_is_no_record_is_refused(tmp_path, text):
    path = tmp_path / "x"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"x (is not a flight record|ends before its header)"):
        read_life(path)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_ends_the_record_and_not_the_run(tmp_path, monkeypatch):
    path = path_of(tmp_path, 1, 2)
    path.parent.mkdir()
    path.symlink_to("/dev/full")
    monkeypatch.setattr(record, "_FIRST_S", 1e6)
    recorder = FlightRecorder(path, lambda: HEADER)
    for k in range(3):
        recorder.note("a", k)
    recorder.flush()  # at once
    recorder.close()
    assert recorder.failed == "No space left on device"


def test_a_write_that_is_cut_short_is_a_full_disk():
    class NearlyFull(BytesIO):
        def write(self, data):
            return super().write(data[:3])

    with pytest.raises(OSError, match="No space left on device"):
        record._write(NearlyFull(), b"four")


def test_threads_that_note_their_first_event_at_once_start_one_writer(tmp_path, monkeypatch):
    errors = list[object]()
    monkeypatch.setattr(sys, "unraisablehook", errors.append)
    for i in range(100):
        recorder, barrier = FlightRecorder(tmp_path / str(i), lambda: {}), threading.Barrier(8)

        def note(recorder=recorder, barrier=barrier):
            barrier.wait()
            recorder.note("x")

        threads = [threading.Thread(target=note) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        recorder.close()
        assert len(read_life(tmp_path / str(i)).events) == 8
    assert not errors
