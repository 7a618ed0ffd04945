"""Copies of a run folder on shared storage."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from pathlib import Path

import pytest
import torch
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

from coterie.errors import CoterieError
from coterie.launch.ray.mirror import OF_THE_RUN, Mirror, fetch
from coterie.runs import checkpoint
from tests.support.runs import save_checkpoint
from tests.support.waiting import PATIENCE, wait_until


def save(run: Path, step: int, value: float = 0.0) -> None:
    save_checkpoint(
        run / "checkpoints",
        step,
        {"learner_0/model": {"w": torch.full((4,), value)}},
        {"step": step, "env_steps": step},
    )


def files(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "metrics.jsonl").write_text("one\n")
    save(folder, 1)
    return folder


def test_a_mirror_copies_everything_and_then_what_changed(tmp_path, run):
    mirror, copy = Mirror(run, tmp_path / "copy"), tmp_path / "copy"
    mirror.update()
    assert files(copy) == files(run)
    (copy / "config.json").write_text("changed on the other side")
    with (run / "metrics.jsonl").open("a") as file:
        file.write("two\n")
    save(run, 2, 1.0)
    mirror.update()
    assert (copy / "config.json").read_text() == "changed on the other side"  # it is not copied again
    (copy / "config.json").write_text("{}")
    assert files(copy) == files(run)
    (run / "metrics.jsonl").write_text("1\n")  # as when a run goes back to a checkpoint
    mirror.update()
    assert (copy / "metrics.jsonl").read_text() == "1\n"


def test_a_checkpoint_of_the_same_step_is_replaced_and_a_pruned_one_removed(tmp_path, run):
    mirror, copy = Mirror(run, tmp_path / "copy"), tmp_path / "copy"
    mirror.update()
    save(run, 1, 7.0)
    save(run, 2)
    mirror.update()
    assert checkpoint.load(copy / "checkpoints" / "step_000000000001")[0]["learner_0/model"]["w"][0] == 7
    checkpoint.prune(run / "checkpoints", 1)
    mirror.update()
    assert files(copy) == files(run)
    assert not (copy / "checkpoints" / "step_000000000001").exists()


def test_drafts_incomplete_checkpoints_and_skipped_names_are_not_copied(tmp_path, run):
    for name in (".draft-order_3/x", "step_000000000009/state.json", "step_000000000001.old/manifest.json"):
        (run / "checkpoints" / name).parent.mkdir()
        (run / "checkpoints" / name).write_text("x")
    Mirror(run, tmp_path / "copy", skip=OF_THE_RUN).update()
    found = files(tmp_path / "copy")
    assert {name.split("/")[0] for name in found} == {"checkpoints", "metrics.jsonl"}
    assert {name.split("/")[1] for name in found if "/" in name} == {"step_000000000001"}


def test_what_was_copied_back_is_not_copied_again(tmp_path, run):
    """A site that is started on another machine."""
    save(run / "sites" / "1", 5)
    Mirror(run, tmp_path / "storage").update()
    Mirror(tmp_path / "storage", tmp_path / "back", skip=("sites",)).update()
    assert not (tmp_path / "back" / "sites").exists()
    mirror = Mirror(tmp_path / "back", tmp_path / "storage")
    mirror.take_as_equal()
    before = files(tmp_path / "storage")
    checkpoint.prune(tmp_path / "back" / "checkpoints", 1)
    save(tmp_path / "back", 9)
    mirror.update()
    assert set(files(tmp_path / "storage")) - set(before) == {
        f"checkpoints/step_000000000009/{name}"
        for name in ("learner_0/model.safetensors", "manifest.json", "state.json")
    }


def test_a_run_is_fetched_from_a_url(tmp_path, run):
    Mirror(run, "memory://bucket/run").update()
    MemoryFileSystem().pipe_file("/bucket/run/lease.json", b"of a command that works in it")
    fetch("memory://bucket/run/", tmp_path / "back")
    assert files(tmp_path / "back") == files(run)
    with pytest.raises(CoterieError, match=r"RUN: cannot get memory://bucket/run: .*exists: resume it, or remove it"):
        fetch("memory://bucket/run", tmp_path / "back")
    with pytest.raises(CoterieError, match=r"RUN: cannot get file://.*nothing: it has no config.json"):
        fetch(f"file://{tmp_path}/nothing", tmp_path / "none")
    assert not (tmp_path / "none").exists()
    with pytest.raises(CoterieError, match=r"ray.storage: cannot use nowhere://x"):
        Mirror(run, "nowhere://x")


def test_an_update_in_the_background_neither_waits_nor_repeats_its_error(tmp_path, run):
    (tmp_path / "file").write_text("")
    mirror = Mirror(run, f"file://{tmp_path}/file/run")

    def poll_until_idle() -> list[str]:
        lines = mirror.poll(now=True)
        wait_until(lambda: "coterie-storage" not in [thread.name for thread in threading.enumerate()])
        return lines + mirror.poll()

    (line,) = poll_until_idle()
    assert line.startswith(f"ray.storage: cannot update file://{tmp_path}/file/run: ")
    assert poll_until_idle() == []
    assert mirror.updated == 0
    (tmp_path / "file").unlink()
    assert poll_until_idle() == []
    assert mirror.updated > 0
    assert files(tmp_path / "file" / "run") == files(run)


def test_a_source_that_cannot_be_read_is_not_an_empty_one(tmp_path, run, monkeypatch):
    mirror, scan = Mirror(run, tmp_path / "copy"), os.scandir

    def stale(path):
        if str(path).endswith("checkpoints"):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return scan(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", stale)
        with pytest.raises(CoterieError, match=r"cannot update .*: Stale file handle"):
            mirror.update()
    mirror.update()
    before = files(tmp_path / "copy")
    run.rename(tmp_path / "unmounted")
    with pytest.raises(CoterieError, match=r"cannot update .*/run is gone"):
        mirror.update()
    assert files(tmp_path / "copy") == before


def test_a_run_folder_that_is_removed_during_an_update_keeps_its_copy(tmp_path, run, monkeypatch):
    mirror, go = Mirror(run, tmp_path / "copy"), threading.Event()
    mirror.update()
    before, stamps = files(tmp_path / "copy"), mirror._stamps
    monkeypatch.setattr(mirror, "_stamps", lambda: go.wait(PATIENCE) and stamps())  # of a slow disk
    mirror.poll(now=True)
    mirror.stop(0.1)
    shutil.rmtree(run / "checkpoints")
    go.set()
    mirror._thread.join(PATIENCE)
    assert files(tmp_path / "copy") == before


def test_a_fetched_name_cannot_leave_the_folder(tmp_path):
    fs = MemoryFileSystem()
    for name in ("config.json", "checkpoints/../../../out", "../out", "/out"):
        fs.store[f"/names/run/{name}"] = MemoryFile(fs, f"/names/run/{name}", b"{}")
    fetch("memory://names/run", tmp_path / "a" / "b")
    assert {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file()} <= {
        "a/b/config.json", "a/b/out"
    }  # fmt: skip
