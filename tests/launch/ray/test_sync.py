"""A run's folder kept up to date elsewhere."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from coterie.launch.ray import sync
from coterie.runs import checkpoint
from coterie.types import CoterieError


def save(run: Path, step: int, value: float = 0.0) -> None:
    checkpoint.save(run / "checkpoints", step, {"learner_0/model": {"w": torch.full((4,), value)}}, {"step": step})


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


def test_everything_then_what_is_new(tmp_path, run):
    copy = tmp_path / "copy"
    first = sync.changes(run, {})
    sync.take(copy, first)
    assert files(copy) == files(run)
    assert not sync.changes(run, first.stamps)
    with (run / "metrics.jsonl").open("a") as file:
        file.write("two\n")
    save(run, 2, 1.0)
    second = sync.changes(run, first.stamps)
    assert second.files["metrics.jsonl"] == (4, b"two\n")  # what grows is sent from where it had ended
    assert not any("step_000000000001" in name for name in second.files)
    sync.take(copy, second)
    assert files(copy) == files(run)
    assert checkpoint.load(checkpoint.latest(copy / "checkpoints"))[1] == {"step": 2}


def test_a_file_that_was_cut_is_sent_whole(tmp_path, run):
    """As the metrics are when a run goes back to a checkpoint."""
    first = sync.changes(run, {})
    sync.take(tmp_path / "copy", first)
    (run / "metrics.jsonl").write_text("1\n")
    sync.take(tmp_path / "copy", sync.changes(run, first.stamps))
    assert (tmp_path / "copy" / "metrics.jsonl").read_text() == "1\n"


def test_a_checkpoint_of_the_same_step_again_and_one_that_was_pruned(tmp_path, run):
    copy = tmp_path / "copy"
    first = sync.changes(run, {})
    sync.take(copy, first)
    save(run, 1, 7.0)
    save(run, 2)
    second = sync.changes(run, first.stamps)
    sync.take(copy, second)
    assert checkpoint.load(copy / "checkpoints" / "step_000000000001")[0]["learner_0/model"]["w"][0] == 7
    checkpoint.prune(run / "checkpoints", 1)
    third = sync.changes(run, second.stamps)
    assert third.gone == ["step_000000000001"]
    sync.take(copy, third)
    assert files(copy) == files(run)


def test_drafts_and_what_is_to_be_skipped_stay(tmp_path, run):
    (run / "checkpoints" / ".draft-order_3").mkdir()
    (run / "checkpoints" / ".draft-order_3" / "x").write_text("x")
    (run / "checkpoints" / "step_000000000009").mkdir()
    (run / "checkpoints" / "step_000000000009" / "state.json").write_text("no manifest yet")
    (run / "sites").mkdir()
    (run / "sites" / "y").write_text("y")
    new = sync.changes(run, {}, skip=("sites", "config.json"))
    assert {name.split("/")[0] for name in new.files} == {"checkpoints", "metrics.jsonl"}
    assert {name.split("/")[1] for name in new.files if "/" in name} == {"step_000000000001"}
    sync.take(tmp_path / "copy", sync.changes(run, {}), skip=("config.json",))
    assert not (tmp_path / "copy" / "config.json").exists()


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x", "checkpoints/../../x/y"])
def test_no_name_leads_out_of_the_folder(tmp_path, name):
    with pytest.raises(CoterieError, match="names a file outside of it"):
        sync.take(tmp_path / "copy", sync.Changes({name: (0, b"x")}, [], {}))
    with pytest.raises(CoterieError, match="names a file outside of it"):
        sync.take(tmp_path / "copy", sync.Changes({}, ["../../x"], {}))


def test_storage_has_what_a_run_can_be_resumed_from(tmp_path, run):
    url = f"file://{tmp_path}/bucket/run"
    first = sync.changes(run, {})
    sync.store(url, first, run)
    save(run, 2)
    checkpoint.prune(run / "checkpoints", 1)
    sync.store(url, sync.changes(run, first.stamps), run)
    sync.fetch(url, tmp_path / "back")
    assert files(tmp_path / "back") == files(run)
    with pytest.raises(CoterieError, match=r"RUN: cannot get file://.*nothing: .*there is no config.json"):
        sync.fetch(f"file://{tmp_path}/nothing", tmp_path / "none")
    assert not (tmp_path / "none").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(CoterieError, match=r"ray.storage: cannot write to file://"):
        sync.store(f"file://{tmp_path}/file/run", first, run)


def test_nobody_waits_for_storage_that_does_not_answer(tmp_path, run, monkeypatch):
    answers = threading.Event()
    monkeypatch.setattr(sync, "store", lambda url, new, folder: answers.wait(60))
    storage = sync.Storage([(run, "file:///nowhere")])
    begin = time.monotonic()
    assert storage.bring(0.2) == ["ray.storage: file:///nowhere takes longer than 0.2 s"]
    assert storage.bring(0.2) == []  # said once, and asked once
    assert time.monotonic() - begin < 10
    answers.set()
    assert storage.bring(60) == []
    assert storage.stamps["file:///nowhere"]

    def away(url: str, new: object, folder: object) -> None:
        raise OSError("no such host")

    monkeypatch.setattr(sync, "store", away)
    assert storage.bring(60) == ["no such host"]
    assert storage.bring(60) == []
