"""A machine of a cluster, without Ray: its command, what it prints, its folder, and its end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from coterie import __version__
from coterie.launch.ray import sync, watchdog
from coterie.launch.ray.node import News, Node
from coterie.runs.config_io import to_dict
from coterie.types import CoterieError
from tests.conftest import made_by, make_config
from tests.launch.harness import PATIENCE

CONFIG = {"steps": 10**9, "log.checkpoint_every": 0.5, "log.tensorboard": False}


@pytest.fixture
def nodes() -> Iterator[Callable[[], Node]]:
    yield from made_by(lambda: Node(__version__), lambda node: node.close())


def until(node: Node, condition: Callable[[News], object], known: sync.Stamps) -> News:
    """The news for which this holds, with all lines so far."""
    end, lines = time.monotonic() + PATIENCE, list[str]()
    while True:
        news = node.news(known)
        lines += news.lines
        if condition(news := news._replace(lines=lines)):
            return news
        assert time.monotonic() < end, news
        time.sleep(0.05)


def config() -> dict[str, bytes]:
    return {"config.json": json.dumps(to_dict(make_config(**CONFIG))).encode()}


def test_a_run_is_begun_told_to_end_and_goes_on_elsewhere(tmp_path, nodes):
    one, other = nodes(), nodes()
    assert not one.started()
    assert one.start(["train", "{here}/config.json", "--out", "{here}/run"], config()) == {}
    copy, stamps = tmp_path / "copy", sync.Stamps()

    def keep(news: News) -> bool:
        nonlocal stamps
        sync.take(copy, news.changes)
        stamps = news.changes.stamps
        return len(list(copy.glob("checkpoints/step_*"))) > 1

    end = time.monotonic() + PATIENCE
    while not keep(one.news(stamps)):
        assert time.monotonic() < end
        time.sleep(0.1)
    assert one.started()
    one.stop()
    last = until(one, lambda news: news.code is not None, stamps)
    assert last.code == 75
    assert any("SIGTERM" in line for line in last.lines)
    sync.take(copy, last.changes)
    there = other.start(["resume", "{here}/run"], config(), sync.changes(copy, {}))
    assert there.keys() == last.changes.stamps.keys()
    until(other, lambda news: "env steps" in " ".join(news.lines), there)
    other.stop()
    assert until(other, lambda news: news.code is not None, there).code == 75


def test_a_command_that_fails_says_why(nodes):
    node = nodes()
    node.start(["train", "nothing"], {})
    news = until(node, lambda news: news.code is not None, {})
    assert news.code == 2
    assert "nothing" in news.lines[-1]


def test_a_machine_with_another_version_is_refused():
    with pytest.raises(CoterieError, match=r"this machine has coterie .*, the one that started the run 9\.9"):
        Node("9.9")


def test_ports_are_free_and_in_a_row(nodes):
    host, port = nodes().open("127.0.0.1", 5)
    assert host == "127.0.0.1"
    assert 1024 < port < 65531


# Short naps: a signal that comes just before a long one does not wake it.
CHILD = """
import signal, sys, time
signal.signal(15, lambda *_: sys.exit(75))
print("up", flush=True)
for _ in range(1000):
    time.sleep(0.05)
"""


def on_leash(code: str = CHILD) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, watchdog.__file__, sys.executable, "-c", code],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


def test_who_lets_go_of_the_leash_ends_the_command():
    process = on_leash()
    process.communicate(timeout=PATIENCE)  # closes its input
    assert process.returncode == 75


def test_a_word_on_the_leash_ends_it_too():
    process = on_leash()
    assert process.stdin is not None
    process.stdin.write(".")
    process.stdin.flush()
    assert process.wait(PATIENCE) == 75
    process.communicate()


def test_who_kills_the_leash_ends_the_command_too(tmp_path):
    """As Ray does with the children of its workers."""
    code = CHILD.replace("sys.exit(75)", f"(open({str(tmp_path / 'told')!r}, 'w').close(), sys.exit(75))")
    process = on_leash(code)
    process.kill()
    end = time.monotonic() + PATIENCE
    while not (tmp_path / "told").exists():
        assert time.monotonic() < end
        time.sleep(0.05)
    process.communicate()


def test_signals_to_the_leash_itself_are_not_the_commands():
    process = on_leash()
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(process.pid, number)
    time.sleep(0.2)
    assert process.poll() is None
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 75


def test_a_killed_command_is_told_by_its_code():
    process = on_leash("import os; print('up', flush=True); os.kill(os.getpid(), 9)")
    assert process.wait(PATIENCE) == 137
    process.communicate()
