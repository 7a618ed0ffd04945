"""A storage holds one run, and one command works in it."""

from __future__ import annotations

import json
import os
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest

from coterie.errors import ConfigError, CoterieError
from coterie.launch.ray import lease as leases
from coterie.launch.ray import storage as storages
from coterie.launch.ray.lease import LeaseLost, lease
from coterie.launch.ray.mirror import LEASE
from coterie.launch.ray.storage import Storage
from tests.support.waiting import PATIENCE, wait_until


@contextmanager
def opened(given: str | Path, folder: Path, resumed: bool) -> Iterator[Storage]:
    with ExitStack() as held:
        yield Storage(str(given), folder, resumed, lambda step: None, held)


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(leases, "_BEAT_S", 0.02)
    monkeypatch.setattr(leases, "_SETTLE_S", 0.1)
    monkeypatch.setattr(leases, "_GONE_S", 0.5)
    return f"memory://{uuid.uuid4().hex}"


def stored(url: str) -> bytes:
    return bytes(fsspec.open(f"{url}/{LEASE}", "rb").open().read())


def test_a_storage_holds_the_run_that_is_resumed_and_no_other(tmp_path):
    folder, storage = tmp_path / "run", tmp_path / "storage"
    with (
        pytest.raises(CoterieError, match=r"^ray.storage: \S+/storage does not hold this run$"),
        opened(storage, folder, resumed=True),
    ):
        pass
    assert not storage.exists(), "it is not mounted, perhaps"
    with opened(storage, folder, resumed=False):
        assert storage.is_dir()
    (storage / "config.json").write_text("a run's")
    (storage / "metrics.jsonl").write_text("its metrics")
    with (
        pytest.raises(ConfigError, match=r"^ray.storage: \S+/storage holds a run: resume that, or name another folder"),
        opened(storage, folder, resumed=False),
    ):
        pass
    with opened(storage, folder, resumed=True):
        assert (folder / "metrics.jsonl").read_text() == "its metrics"
        with (
            pytest.raises(ConfigError, match=rf"{storage} is being trained by pid {os.getpid()} on "),
            opened(storage, tmp_path / "other", resumed=True),
        ):
            pass
    (tmp_path / "link").symlink_to(storage)
    with opened(tmp_path / "link", storage, resumed=True) as same:
        assert (same.poll(), list(same.finish())) == ([], []), "nothing to copy"


def test_a_url_that_another_command_works_in_is_refused(url):
    steps = list[str]()
    with lease(url, steps.append) as check:
        before = stored(url)
        wait_until(lambda: stored(url) != before, what="it is written again")
        mine = rf"^ray.storage: {url} is being trained by pid {os.getpid()} on "
        with pytest.raises(ConfigError, match=mine), lease(url, steps.append):
            pass
        check()
        assert steps == [f"waiting 0 s, to see whether {json.loads(before)['by']} still trains {url}"]
    assert not fsspec.filesystem("memory").exists(f"{url}/{LEASE}")
    with lease(url, steps.append):
        assert len(steps) == 1, "without a wait"


def test_of_two_commands_that_begin_at_once_one_works(url, monkeypatch):
    begun, refused = threading.Barrier(2), threading.Event()
    write = leases._Lease._write

    def together(self: Any) -> None:
        wait = abs if self._beats else begun.wait
        wait(PATIENCE)  # both have read
        write(self)
        wait(PATIENCE)

    def work() -> str:
        try:
            with lease(url, lambda step: None):
                refused.wait(PATIENCE)
                return "works"
        except ConfigError as error:
            refused.set()
            return str(error)

    monkeypatch.setattr(leases._Lease, "_write", together)
    with ThreadPoolExecutor(2) as pool:
        said = sorted(future.result() for future in [pool.submit(work) for _ in range(2)])
    assert said[0].startswith(f"ray.storage: {url} is being trained by pid ")
    assert said[1] == "works"


def test_what_another_command_has_taken_is_neither_read_nor_written(url, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.json").write_text("mine")
    with opened(url, tmp_path / "run", resumed=False) as storage:
        storage.push("config.json")
        fsspec.filesystem("memory").rm(f"{url}/{LEASE}")  # another one has come and gone while this machine slept
        with fsspec.open(f"{url}/config.json", "wb") as file:
            file.write(b"another's")

        def lost() -> bool:
            try:
                return bool(storage.poll())
            except LeaseLost as error:
                return "was taken by a command that has ended, which goes on" in str(error)

        wait_until(lost, what="it is noticed")
        storage.push("config.json")
        assert [*storage.finish(), *storage.poll()] == []
    assert fsspec.filesystem("memory").cat(f"{url}/config.json") == b"another's"


def test_the_last_files_are_waited_for_unless_the_end_is_hurried(tmp_path, monkeypatch):
    with opened(tmp_path / "storage", tmp_path / "run", resumed=False) as storage:
        monkeypatch.setattr(storage, "_down", SimpleNamespace(updated=-1.0, poll=lambda now: ["x"], stop=abs))
        monkeypatch.setattr(storages, "_HURRIED_S", 0.1)
        lines = list[str]()
        for line in storage.finish(lambda: len(lines) > 2):
            lines.append(line)
            assert len(lines) < 100
        assert len(lines) > 2


@pytest.mark.parametrize("left", [b"", json.dumps({"id": "x", "by": "pid 1 on gone", "beats": 3}).encode()])
def test_a_url_whose_command_was_killed_is_taken(url, left):
    with fsspec.open(f"{url}/{LEASE}", "wb") as file:
        file.write(left)
    with lease(url, lambda step: None) as check:
        assert json.loads(stored(url))["id"] != "x"
        with fsspec.open(f"{url}/{LEASE}", "wb") as file:  # by another one, while this machine was cut off
            file.write(json.dumps({"id": "y", "by": "pid 2 on next"}).encode())
        wait_until(lambda: all(x.name != "coterie-lease" for x in threading.enumerate()), what="it is noticed")
        with pytest.raises(CoterieError, match="was taken by pid 2 on next, which goes on with this run"):
            check()
    assert json.loads(stored(url))["id"] == "y", "the other's stays"
