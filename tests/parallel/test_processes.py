"""Messages, results and signals of child processes, and scratch folders that a killed process has left."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import wait
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from coterie.errors import ConfigError, CoterieError
from coterie.parallel.hardware import available_cores
from coterie.parallel.processes import Child, gather, listen, scratch_folder
from coterie.parallel.signals import STOP, blocked_signals, on_signals
from tests.support.waiting import PATIENCE

OWNER = "from coterie.parallel.processes import scratch_folder; print(scratch_folder({where!r}), flush=True); input()"


@pytest.fixture
def dead_owner(tmp_path) -> tuple[Path, str]:
    """A scratch folder whose owner was killed, and that one's pid."""
    code = OWNER.format(where=str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True) as owner:
        folder = Path(owner.stdout.readline().strip())
        owner.kill()
    (folder / "0").touch()
    return folder, folder.name.split("-")[2]


def test_only_the_scratch_folders_of_killed_owners_of_this_host_are_removed(tmp_path, dead_owner, monkeypatch):
    """Others may be on a shared file system, where the first pid namespace has the same number on every Linux host."""
    folder, pid = dead_owner
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(socket, "gethostname", lambda: "another-host")
        other = scratch_folder(str(tmp_path))
        assert folder.exists()
    held = tmp_path / folder.name.replace(f"-{pid}-", "-4194305-")  # as of another machine that has all else in common
    held.mkdir()
    lock = (held / ".lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    prefix = folder.name.rpartition(f"-{pid}-")[0]
    names = ("coterie-abcdefgh", f"coterie-123-{pid}-elsewhere", "coterie-runs", f"{prefix}-x-y", f"{prefix}-1-z")
    for name in names:
        (tmp_path / name).mkdir()
    mine = scratch_folder(str(tmp_path))
    assert sorted(tmp_path.iterdir()) == sorted([mine, other, held, *(tmp_path / name for name in names)])
    assert f"-{os.getpid()}-" in mine.name
    lock.close()
    scratch_folder(str(tmp_path))
    assert not held.exists()


def send_much(post) -> None:
    """A child. The first message does not fit the socket's buffer."""
    post("large", b"x" * 10_000_000)
    post("small", None)


def idle(post) -> None:
    time.sleep(60)


def test_a_signal_without_a_name_is_a_number():
    child = Child("test", available_cores(), idle, ())
    os.kill(child.process.pid, signal.SIGRTMIN + 1)
    assert child.end() == f"was killed by signal {signal.SIGRTMIN + 1}"


def test_a_child_that_stops_in_the_middle_of_a_message_does_not_block_its_parent():
    child, received = Child("test", available_cores(), send_much, ()), list[tuple[str, object]]()
    try:
        assert wait([child.socket], PATIENCE), "it sends"
        os.kill(child.process.pid, signal.SIGSTOP)
        begin = time.monotonic()
        while time.monotonic() < begin + 0.5:
            assert not list(listen([child], 0.1))
        assert time.monotonic() < begin + PATIENCE / 2
        os.kill(child.process.pid, signal.SIGCONT)
        while not received or received[-1][0] != "end":
            received += [(kind, content) for _, kind, content in listen([child], PATIENCE)]
    finally:
        child.kill()
    assert received == [("large", b"x" * 10_000_000), ("small", None), ("end", "ended with exit code 0")]


def test_a_child_that_the_kernel_does_not_let_go_does_not_block_its_parent():
    child = Child.__new__(Child)
    child.socket, child.process = MagicMock(), MagicMock(exitcode=None)
    child.kill()
    assert child.process.join.call_count > 0
    assert all(0 < float(call.args[0]) < 60 for call in child.process.join.mock_calls)


def post_result(post, what: object) -> None:
    """A child."""
    if what == "late":
        time.sleep(60)
    if what == "wrong":
        raise CoterieError("it went wrong")
    if what is not None:
        post("result", os.environ.get(str(what), what))


def results(*each: object, within: float = 60.0) -> list[object]:
    children = [Child(f"child {i}", available_cores(), post_result, (what,)) for i, what in enumerate(each)]
    try:
        return gather(children, within)
    finally:
        for child in children:
            child.kill()


def test_results_of_children_come_in_order_and_a_child_may_end_after_its_own():
    assert results(1, 2, 3) == [1, 2, 3]


def test_a_child_has_the_environment_variables_that_its_parent_has_now(monkeypatch):
    for value in "12":
        monkeypatch.setenv("LEVEL", value)
        assert results("LEVEL") == [value]
    monkeypatch.delenv("LEVEL")
    assert results("LEVEL") == ["LEVEL"]


def has_a_child(post):
    with multiprocessing.get_context("fork").Pool(1) as pool:
        post("result", pool.apply(abs, (-2,)))


def test_an_env_in_a_child_may_have_processes_of_its_own():
    child = Child("child", available_cores(), has_a_child, ())
    try:
        assert gather([child], PATIENCE) == [2]
    finally:
        child.kill()


def test_a_fork_has_children_of_its_own_unless_it_is_daemonic():
    fork = multiprocessing.get_context("fork")
    assert results(1) == [1]
    with ProcessPoolExecutor(1, fork) as pool:
        assert pool.submit(results, 2).result(PATIENCE) == [2]
    with fork.Pool(1) as pool, pytest.raises(ConfigError, match="use a ProcessPoolExecutor"):
        pool.apply(results, (3,))


@pytest.mark.parametrize(("what", "why"), [(None, "ended with exit code 0$"), ("wrong", ".*it went wrong")])
def test_a_child_without_a_result_is_named(what, why):
    with pytest.raises(CoterieError, match=rf"^child 1: {why}"):
        results(1, what)


def test_a_child_whose_result_is_late_is_named():
    for within in (1, 5, 25):  # on a busy machine child 0 may be late, too
        with pytest.raises(CoterieError, match=rf"child 1: no result within {within} s$") as error:
            results(1, "late", within=within)
        if "child 0" not in str(error.value):
            return
    pytest.fail(str(error.value))


def test_signals_are_noted_and_their_handlers_restored_afterwards():
    before, noted = [signal.getsignal(number) for number in STOP], []
    with on_signals(noted.append):
        for number in STOP:
            os.kill(os.getpid(), number)
    assert noted == [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    assert [signal.getsignal(number) for number in STOP] == before


def test_outside_the_main_thread_signal_handlers_stay_as_they_are():
    before, seen = signal.getsignal(signal.SIGINT), []

    def work():
        with on_signals(seen.append):
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(10)
    assert seen == [before]


STARTS = """import os, signal; os.kill(os.getpid(), signal.SIGINT)
from coterie.parallel.signals import ignore_signals; ignore_signals()
print(signal.pthread_sigmask(signal.SIG_BLOCK, []))"""


def test_a_signal_to_the_group_does_not_end_a_child_that_is_starting():
    with blocked_signals():
        done = subprocess.run([sys.executable, "-c", STARTS], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "set()\n", "")
