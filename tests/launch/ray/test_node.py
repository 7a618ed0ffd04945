"""A node without Ray: its command, its folder on the storage, and its end; and the watchdog of its command."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import coterie
from coterie import __version__
from coterie.errors import CoterieError
from coterie.launch.ray import node, watchdog
from coterie.launch.ray.allocation import Allocation, Machine, Site, allocate
from coterie.launch.ray.cluster import RayBoard
from coterie.launch.ray.mirror import Mirror
from coterie.launch.ray.node import Node, Outcome
from coterie.runs import checkpoint
from coterie.runs.config_io import save_config
from tests.conftest import make_config
from tests.support.process_table import family
from tests.support.waiting import PATIENCE, wait_until

CONFIG = make_config(
    **{"steps": 10**9, "learners": 1, "log.checkpoint_every": 0.5, "log.tensorboard": False, "launch": "ray"}
)


class Local(Node):
    """A node whose board is in the same process."""

    def ask(self, method: str, *args: Any) -> Any:
        return getattr(self.board, method)(*args)


class Rig:
    """A run of one site, without a cluster. `storage`: its folder."""

    def __init__(self, folder: Path) -> None:
        self.storage = folder / "storage"
        self.storage.mkdir()
        save_config(self.storage / "config.json", CONFIG)
        self.allocation: Allocation = allocate(CONFIG, [Machine("a", "127.0.0.1", 2, 0)])
        self.board = RayBoard(self.allocation, ["127.0.0.1"])
        self.lines: list[str] = []

    @property
    def site(self) -> Site:
        return self.allocation.sites[0]

    def node(self, version: str = __version__) -> Local:
        return Local(version, self.allocation, str(self.storage))

    def run(self, pool: ThreadPoolExecutor, target: int = 10**9) -> Future[Outcome]:
        return pool.submit(self.node().run, self.board, self.site, "127.0.0.1", target)

    def saw(self, text: str) -> bool:
        self.lines += self.board.collect()[0]
        return any(text in line for line in self.lines)

    def checkpoints(self) -> list[Path]:
        return sorted(self.storage.glob("checkpoints/step_*/manifest.json"))


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


@pytest.fixture
def pool(rig):
    with ThreadPoolExecutor(2) as one:
        yield one
        rig.board.stop(Site)


def test_a_site_is_stopped_and_goes_on_elsewhere_from_the_storage(rig, pool):
    run = rig.run(pool)
    wait_until(lambda: len(rig.checkpoints()) > 1)
    rig.board.stop(Site)
    assert run.result(3 * PATIENCE).code == 75
    assert rig.saw("SIGTERM")
    steps = json.loads((rig.checkpoints()[-1].parent / "state.json").read_text())["env_steps"]
    assert json.loads((rig.storage / "summary.json").read_text())["env_steps"] == steps
    assert json.loads((rig.storage / "config.json").read_text())["launch"] == "ray"  # not the site's own
    rig.board = RayBoard(rig.allocation, ["127.0.0.1"])
    assert rig.run(pool, target=steps + 2000).result(3 * PATIENCE).code == 0
    assert json.loads((rig.storage / "summary.json").read_text())["env_steps"] >= steps + 2000
    assert checkpoint.load(rig.checkpoints()[-1].parent)[1]["life"] == 1


def test_a_site_whose_ports_were_taken_since_its_last_start_has_others(rig, pool, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as other:
        addresses, really = [other.getsockname()], node.open_address
        choose = lambda *wanted: addresses.pop() if addresses else really(*wanted)  # noqa: E731
        monkeypatch.setattr(node, "open_address", choose)
        assert rig.run(pool, target=100).result(3 * PATIENCE).code == 0
        assert rig.board.addresses[0][1] != other.getsockname()[1]
    assert node.are_free(rig.board.addresses[0], 3)


@pytest.mark.slow
def test_a_command_that_is_killed_is_restarted_from_the_storage(rig, pool):
    node = rig.node()
    run = pool.submit(node.run, rig.board, rig.site, "127.0.0.1", 10**9)
    wait_until(rig.checkpoints)
    _, command, *_ = family(node.process.pid)
    os.kill(command, signal.SIGKILL)
    wait_until(lambda: rig.saw("site 0: its command ended with exit code 137; it is restarted"))
    before = len(rig.checkpoints())
    wait_until(lambda: len(rig.checkpoints()) > before)
    rig.board.stop(Site)
    assert run.result(3 * PATIENCE).code == 75


class Fails(coterie.Callback):
    def on_rollout(self, run):
        raise KeyError("oops")


def test_a_failure_is_sent_once_and_without_the_nodes_folder(rig, pool):
    rig.allocation = replace(rig.allocation, config=replace(CONFIG, callbacks=(f"{__name__}:Fails",)))
    outcome = rig.run(pool).result(3 * PATIENCE)
    assert outcome == Outcome(1, "coterie: Fails.on_rollout: KeyError: 'oops'")
    assert rig.saw("a callback ends the run: Fails.on_rollout")
    assert not [line for line in rig.lines if line.startswith("coterie: ")]
    assert rig.checkpoints()


def test_a_run_folder_that_the_storage_does_not_take_is_kept(rig, pool, monkeypatch):
    monkeypatch.setattr(node, "STORED_S", 0.1)
    poll = Mirror.poll
    full = lambda self, now: ["ray.storage: full"] if Path(self.target) == rig.storage else poll(self, now)  # noqa: E731
    monkeypatch.setattr(Mirror, "poll", full)
    with pytest.raises(
        CoterieError, match=r"ray.storage: \S+ does not have the last files, which are in .*; the command: no error$"
    ) as error:
        rig.run(pool, target=1000).result(3 * PATIENCE)
    kept = Path(str(error.value).split(" which are in ")[1].split(" on ")[0])
    assert json.loads((kept / "summary.json").read_text())["status"] == "finished"
    assert rig.saw("ray.storage: full")
    shutil.rmtree(kept.parent)


def test_a_node_with_another_version_is_refused(rig):
    with pytest.raises(CoterieError, match=r"this machine has coterie .*, the one that started the run 9\.9"):
        rig.node("9.9")


def test_a_machine_that_does_not_see_the_run_folder_is_named(rig, pool):
    rig.storage = rig.storage / "elsewhere"
    with pytest.raises(CoterieError, match=r"ray.storage: \S+ does not see .*elsewhere; put the run folder on"):
        rig.run(pool).result(3 * PATIENCE)


# Short naps: a signal that comes just before a long one does not wake it.
CHILD = """
import signal, sys, time
signal.signal(15, lambda *_: sys.exit(75))
print("up", flush=True)
for _ in range(1000):
    time.sleep(0.05)
"""


def watched(code: str = CHILD) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, watchdog.__file__, sys.executable, "-c", code],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


@pytest.mark.parametrize("word", ["", "."])
def test_the_watchdog_ends_its_command_when_its_input_ends_or_has_a_word(word):
    process = watched()
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(process.pid, number)  # signals to the watchdog are not passed on
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.2)
    assert process.stdin is not None
    process.stdin.write(word)
    if word:
        process.stdin.flush()
        assert process.wait(PATIENCE) == 75
    process.communicate(timeout=PATIENCE)  # closes its input
    assert process.returncode == 75


def test_a_command_gets_sigterm_when_its_watchdog_is_killed(tmp_path):
    """As Ray does with the children of its workers."""
    process = watched(CHILD.replace("sys.exit(75)", f"(open({str(tmp_path / 'got')!r}, 'w').close(), sys.exit(75))"))
    process.kill()
    wait_until((tmp_path / "got").exists)
    process.communicate()


def test_the_watchdog_of_a_killed_command_ends_with_its_signal():
    process = watched("import os; print('up', flush=True); os.kill(os.getpid(), 9)")
    assert process.wait(PATIENCE) == 137
    process.communicate()
