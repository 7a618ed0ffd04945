"""Checkpoints: exact, refused when damaged, and complete after a crash at any moment."""

from __future__ import annotations

import errno
import math
import os
import shutil
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError

from coterie.errors import CoterieError
from coterie.runs import checkpoint
from tests.support.runs import save_checkpoint
from tests.support.waiting import wait_until

FILES = ["exchange.safetensors", "manifest.json", "model.safetensors", "state.json"]


def tensors(seed: int = 0) -> checkpoint.Tensors:
    rng = torch.Generator().manual_seed(seed)
    flat = torch.randn(12, generator=rng)  # as in a model whose parameters are views of one tensor
    return {
        "model": {"w": flat[:8].view(2, 4), "b": flat[8:], "turned": flat[:8].view(2, 4).t()},
        "exchange": {"count": torch.tensor(seed + 1), "rng": rng.get_state()},
    }


def save(root: Path, step: int, seed: int | None = None) -> Path:
    return save_checkpoint(root, step, tensors(step if seed is None else seed), {"step": step, "seed": seed})


def refused(path: Path) -> str:
    with pytest.raises(CoterieError) as caught:
        checkpoint.load(path)
    assert str(caught.value).isprintable()
    return str(caught.value)


@pytest.mark.parametrize(
    "x",
    [
        torch.tensor(2.5),
        torch.empty(0, 3),
        torch.tensor([True, False]),
        torch.tensor([math.nan, math.inf, -0.0]),
        torch.arange(6, dtype=torch.uint8).view(2, 3).t(),
        torch.arange(4, dtype=torch.int64)[::2],
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.randn(5).to(torch.bfloat16),
        torch.randn(3, requires_grad=True),
    ],
    ids=lambda x: f"{x.dtype}{list(x.shape)}",
)
def test_a_tensor_is_restored_bit_for_bit(tmp_path: Path, x: torch.Tensor) -> None:
    found = checkpoint.load(save_checkpoint(tmp_path, 1, {"g": {"x": x}, "none": {}}, {}))[0]
    assert checkpoint.digest(found) == checkpoint.digest({"g": {"x": x}, "none": {}})
    y = found["g"]["x"]
    assert (y.dtype, y.shape) == (x.dtype, x.shape)
    y.zero_()  # what was loaded can be trained on
    assert not y.any()


def test_views_of_one_storage_are_copied_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flat, alone = torch.arange(6.0), torch.arange(9.0)
    group = {"a": flat[:2], "b": flat[2:], "tied": alone[:4], "same": alone[:4]}
    group["replay"] = torch.from_numpy(np.arange(3))
    written = dict[str, torch.Tensor]()
    save_file = checkpoint.save_file
    monkeypatch.setattr(checkpoint, "save_file", lambda x, file: (written.update(x), save_file(x, file)))
    found = checkpoint.load(save_checkpoint(tmp_path, 1, {"g": group}, {}))[0]["g"]
    assert all(torch.equal(found[name], x) for name, x in group.items())
    assert [name for name, x in group.items() if written[name].data_ptr() == x.data_ptr()] == ["replay"]


def test_loaded_tensors_do_not_depend_on_the_file(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    found = checkpoint.load(path)[0]["model"]
    found["w"] += 1
    assert torch.equal(checkpoint.load(path)[0]["model"]["w"] + 1, found["w"]), "writes do not go through"
    os.truncate(path / "model.safetensors", 0)  # a mapped file would end the process here
    assert torch.equal(found["b"], tensors(1)["model"]["b"])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(state=st.dictionaries(st.text(), json_values, max_size=4))
@settings(max_examples=25, database=None)
def test_the_state_of_a_checkpoint_survives_even_nan(
    state: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    found = checkpoint.load(save_checkpoint(tmp_path_factory.mktemp("c"), 1, {}, state))[1]
    assert repr(found) == repr(state)  # NaN differs from itself


def damages(path: Path) -> Iterator[tuple[str, bytes]]:
    """(which, bytes) of a file damaged in many ways."""
    whole = path.read_bytes()
    for at in sorted({0, 1, 7, 8, 9, len(whole) // 2, len(whole) - 1}):
        yield f"bit {at}", whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :]
    for size in (0, 1, len(whole) // 2, len(whole) - 1):
        yield f"cut {size}", whole[:size]
    yield "longer", whole + b"\0"
    yield "zeros", bytes(len(whole))


def test_damaged_checkpoints_are_set_aside_where_an_older_one_is_intact(tmp_path: Path) -> None:
    good, *damaged = [save(tmp_path, step) for step in (1, 2, 3)]
    assert checkpoint.set_damaged_aside(tmp_path) == []
    (damaged[0] / "state.json").write_bytes(b"")
    (damaged[1] / "model.safetensors").unlink()
    lines = checkpoint.set_damaged_aside(tmp_path)
    assert checkpoint.latest(tmp_path) == good
    names = [f"damaged-{path.name}" for path in reversed(damaged)]
    assert [line.partition(" is damaged: ")[0] for line in lines] == [str(tmp_path / name) for name in names]
    assert all((tmp_path / name).is_dir() and line.endswith(good.name) for name, line in zip(names, lines, strict=True))
    again = save(tmp_path, 3, seed=4)  # after going back the same steps come again
    (again / "state.json").write_bytes(b"")
    assert len(checkpoint.set_damaged_aside(tmp_path)) == 1
    assert (tmp_path / f"damaged-{again.name}" / "model.safetensors").is_file()
    (good / "manifest.json").write_text("{")
    assert checkpoint.set_damaged_aside(tmp_path) == []
    assert checkpoint.latest(tmp_path) == good  # nothing is intact: nothing is hidden


def test_a_learner_reads_only_the_part_that_it_continues_from(tmp_path: Path) -> None:
    groups = {f"learner_{rank}/model": {"w": torch.full((3,), float(rank))} for rank in range(3)}
    learners = [{"learner_steps": steps} for steps in (5, 9, 7)]
    path = save_checkpoint(tmp_path, 1, groups, {"present": [0, 1], "learners": learners})
    whole = (path / "learner_0" / "model.safetensors").read_bytes()
    (path / "learner_0" / "model.safetensors").write_bytes(b"")
    for rank, alike, of in ((1, False, 1), (0, True, 1), (2, True, 1)):
        part = checkpoint.load_part(path, rank, alike, 60.0)
        assert (part.rank, part.tensors["model"]["w"].tolist()) == (of, [float(of)] * 3)
    assert [*checkpoint.load(path, ends=("1/model", "2/model"))[0]] == ["learner_1/model", "learner_2/model"]
    with pytest.raises(CoterieError, match=r"learner_0/model\.safetensors has 0 bytes instead of"):
        checkpoint.load_part(path, 2, False, 60.0)
    (path / "learner_0" / "model.safetensors").write_bytes(whole)
    assert checkpoint.load_part(path, 2, False, 60.0).rank == 0


@pytest.mark.parametrize("name", FILES)
def test_damage_to_any_file_is_refused_and_an_older_checkpoint_is_offered(tmp_path: Path, name: str) -> None:
    save(tmp_path, 1)
    good, bad = save(tmp_path, 2), save(tmp_path, 3)
    intact = (bad / name).read_bytes()
    for what, damaged in damages(bad / name):
        (bad / name).write_bytes(damaged)
        text = refused(bad)
        assert name in text, what
        assert f"{good.name} is intact" in text, what
        assert str(bad) in text
        if name != "manifest.json":
            assert ("bytes instead of" in text) == (len(damaged) != len(intact)), "says which of the two it is"
    (bad / name).unlink()
    assert name in refused(bad)
    (good / "model.safetensors").write_bytes(b"")
    assert "step_000000000001 is intact" in refused(bad)
    (tmp_path / "step_000000000001" / "state.json").unlink()
    assert " is intact" not in refused(bad)
    (bad / name).write_bytes(intact)
    assert checkpoint.load(bad)[1] == {"step": 3, "seed": None}


def test_latest_is_the_newest_complete_checkpoint_and_the_same_step_again_replaces_one(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path / "nowhere") is None
    assert checkpoint.latest(tmp_path) is None
    save(tmp_path, 999)
    new = save(tmp_path, 12_000, seed=1)
    unfinished = tmp_path / "step_000000020000"
    unfinished.mkdir()
    (unfinished / "state.json").write_text("{}")
    assert checkpoint.latest(tmp_path) == new
    assert save(tmp_path, 12_000, seed=2) == new
    assert checkpoint.load(new)[1]["seed"] == 2
    assert sorted(p.name for p in new.iterdir()) == FILES
    assert {p.name for p in tmp_path.iterdir()} == {"step_000000000999", "step_000000012000", unfinished.name}


def test_prune_keeps_the_last_checkpoints_and_the_best(tmp_path: Path) -> None:
    paths = [save(tmp_path, step) for step in range(6)]
    assert checkpoint.best(tmp_path)[0] is None
    checkpoint.mark_best(tmp_path, paths[1], 7.5)
    checkpoint.prune(tmp_path, 2)
    assert sorted(tmp_path.glob("step_*")) == [paths[1], paths[4], paths[5]]
    assert checkpoint.best(tmp_path) == (paths[1], 7.5)
    checkpoint.mark_best(tmp_path, paths[5], 8.0)
    checkpoint.prune(tmp_path, 1)
    assert sorted(tmp_path.glob("step_*")) == [paths[5]]
    checkpoint.prune(tmp_path, 0)
    assert checkpoint.latest(tmp_path) == paths[5], "the last one is never deleted"


def test_best_is_none_once_its_checkpoint_or_mark_is_gone(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    checkpoint.mark_best(tmp_path, path, 1.0)
    (tmp_path / "best.json").write_text('{"checkpoint": "step_00')
    assert checkpoint.best(tmp_path) == (None, None)
    checkpoint.mark_best(tmp_path, path, 1.0)
    (path / "manifest.json").unlink()
    assert checkpoint.best(tmp_path)[0] is None


def test_a_digest_depends_on_names_dtypes_shapes_and_bytes_but_not_on_order() -> None:
    a, b = torch.arange(4.0), torch.ones(2)
    digest = checkpoint.digest({"m": {"a": a, "b": b}, "n": {}})
    assert digest == checkpoint.digest({"n": {}, "m": {"b": b.clone(), "a": a[:]}})
    empty = torch.zeros(0, dtype=torch.int64)
    strided = empty.as_strided((0,), (0,))  # as numpy's are
    assert checkpoint.digest({"m": {"e": empty}}) == checkpoint.digest({"m": {"e": strided}})
    changed = [{"a": a, "c": b}, {"a": a.view(2, 2), "b": b}, {"a": a.view(torch.int32), "b": b}, {"a": a}]
    assert len({digest, *(checkpoint.digest({"m": m}) for m in (*changed, {"a": a, "b": b + 1e-7}))}) == 6


@pytest.mark.parametrize("call", ["fsync", "mkdir", "rename", "save_file"])
def test_a_full_disk_is_reported_and_spares_older_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    before = save(tmp_path, 1)
    with monkeypatch.context() as patch:

        def full(*args: Any, **kwargs: Any) -> None:
            if call == "save_file":
                raise SafetensorError(f"Error while serializing: I/O error: {os.strerror(errno.ENOSPC)} (os error 28)")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patch.setattr(checkpoint if call == "save_file" else os, call, full)
        for step in (1, 2):
            with pytest.raises(CoterieError, match=f"^checkpoint in {tmp_path} cannot be written: No space left on "):
                save(tmp_path, step)
    assert checkpoint.load(before)[1] == {"step": 1, "seed": None}
    assert checkpoint.load(save(tmp_path, 2))[1]["step"] == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000000000001", "step_000000000002"]


def test_a_run_folder_that_is_gone_is_not_made_again(tmp_path: Path) -> None:
    with pytest.raises(CoterieError, match="/run/checkpoints cannot be written: No such file or directory "):
        checkpoint.open_draft(tmp_path / "run" / "checkpoints", "order_1")
    assert not list(tmp_path.iterdir())


def test_an_abandoned_draft_is_renamed_before_its_files_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a learner that still writes into it can see that it was abandoned."""
    draft = checkpoint.open_draft(tmp_path, "order_1")
    checkpoint.write(draft, {"learner_0/model": {"w": torch.zeros(2)}})
    there = list[bool]()
    rmtree = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", lambda path, **how: (there.append(draft.exists()), rmtree(path, **how)))
    (tmp_path / ".draft-gone-once").mkdir()  # a crash while one was deleted
    checkpoint.open_draft(tmp_path, "order_2")
    assert there == [False, False]
    assert [p.name for p in tmp_path.iterdir()] == [".draft-order_2"]


def test_a_disk_that_does_not_answer_is_waited_for_once_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, answers, manifest = save(tmp_path, 1), threading.Event(), checkpoint.read_manifest
    monkeypatch.setattr(checkpoint, "read_manifest", lambda path: answers.wait(60) and manifest(path))
    with monkeypatch.context() as hurried:
        hurried.setattr(checkpoint, "latest", partial(checkpoint.latest, seconds=0.1))
        for what, read in ((path, lambda: checkpoint.load(path, 0.1)), (tmp_path, lambda: checkpoint.latest(tmp_path))):
            with pytest.raises(CoterieError, match=f"^{what} cannot be read: the disk does not answer$"):
                read()
        assert checkpoint.last_good(tmp_path) == ""
    answers.set()
    wait_until(lambda: not any(thread.name == "coterie-disk" for thread in threading.enumerate()), 10, "it answers")
    assert checkpoint.load(path)[1]["step"] == 1
    assert checkpoint.latest(tmp_path) == path


def test_the_state_is_read_without_the_tensors(tmp_path: Path) -> None:
    path = save(tmp_path, 5)
    assert checkpoint.load_state(path) == checkpoint.load(path)[1]
    (path / "model.safetensors").unlink()
    assert checkpoint.load_state(path)["step"] == 5
    (path / "state.json").write_text("{}")
    with pytest.raises(CoterieError, match=r"state\.json"):
        checkpoint.load_state(path)
