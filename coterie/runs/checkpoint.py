"""Checkpoints: safetensors and JSON. The manifest with the checksums is written last and makes one complete.

    checkpoints/step_000000123456/learner_0/{model,exchange,algorithm,rng}.safetensors ..., state.json, manifest.json
    checkpoints/best.json

What a learner puts in is in roles/learner_process.py (`tensors`), what the run adds in launch/ledger.py (`state`). A
crash at any moment leaves complete checkpoints, and at most a draft that is never read.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import torch
from safetensors import SafetensorError
from safetensors.torch import load as from_bytes
from safetensors.torch import save_file
from torch import Tensor

from coterie.errors import CoterieError
from coterie.runs.files import ANSWER_S, answered, read, sync, write_whole
from coterie.runs.manifest import DAMAGE, MANIFEST, damage, is_intact, read_file, read_manifest, verify, write_manifest

Tensors = dict[str, dict[str, Tensor]]
_OLD = ".old"
LAST_GOOD = "; last good checkpoint: "  # before its path


def draft_path(root: Path, name: str) -> Path:
    return root / f".draft-{name}"


def open_draft(root: Path, name: str) -> Path:
    """A folder for the learners' parts, which is not read before `seal`."""
    draft = draft_path(root, name)

    def make() -> None:
        root.mkdir(exist_ok=True)  # not the run folder: that may be moved, or its disk unmounted
        sweep(root)
        draft.mkdir()

    with _writing(root):
        answered(make)
    return draft


def write(draft: Path, tensors: Tensors) -> None:
    """Write each group of tensors into the file of its name ("learner_0/model")."""
    with _writing(draft.parent):
        for name, group in tensors.items():
            file = draft / f"{name}.safetensors"
            file.parent.mkdir(exist_ok=True)
            for k, x in group.items():
                if not isinstance(x, Tensor):  # of the user's own part
                    raise TypeError(f"{name}: state_dict()[{k!r}] must be a tensor, not {type(x).__name__}")
            # safetensors refuses views that share one storage, as parameters do; a replay's arrays are not copied.
            storage = {k: x.untyped_storage().data_ptr() for k, x in group.items()}
            users = Counter(storage.values())
            copies = {k: x.detach().to("cpu", copy=users[storage[k]] > 1).contiguous() for k, x in group.items()}
            save_file(copies, file)


def seal(root: Path, draft: Path, step: int, state: dict[str, Any], seconds: float = 60.0) -> Path:
    """Complete a draft with its state and manifest; returns the checkpoint. An error leaves older checkpoints intact.

    `state`: nested dicts with text keys, lists, numbers (NaN and infinities included), text, None. `seconds`: for the
    disk to answer.
    """
    with _writing(root):
        return answered(partial(_seal_draft, root, draft, step, state), seconds)


def _seal_draft(root: Path, draft: Path, step: int, state: dict[str, Any]) -> Path:
    final = root / f"step_{step:012d}"
    (draft / "state.json").write_text(json.dumps(state))
    write_manifest(draft, step)
    for file in (p for p in draft.rglob("*") if p.is_file()):
        sync(file)
    for folder in {draft, *(p.parent for p in draft.rglob("*"))}:
        sync(folder)
    old = root / f"{final.name}{_OLD}"
    if final.exists():  # the same step again: after a resume, or at the end of a run
        final.rename(old)  # still a checkpoint, until the new one has the name
    draft.rename(final)
    sync(root)
    _discard(old)
    return final


@contextmanager
def _writing(root: Path) -> Iterator[None]:
    """Turn an error of writing a draft into one line."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise CoterieError(f"checkpoint in {root} cannot be written: {damage(error)}") from None


def load(path: Path, seconds: float = 450.0, ends: tuple[str, ...] = ("",)) -> tuple[Tensors, dict[str, Any]]:
    """Read a checkpoint, or the tensors whose names have one of these `ends`, and verify the checksums of that. If it
    is damaged the error names the newest intact one before it. `seconds`: for the disk to answer.
    """
    return read(path, partial(_load, path, lambda state, name: name.endswith(ends)), seconds)


def load_state(path: Path, seconds: float = 450.0, whole: bool = False) -> dict[str, Any]:
    """The state of a checkpoint, without its tensors. `whole`: verify every file, as `load` does."""
    return read(path, partial(_load, path, lambda *_: False, whole), seconds)[1]


def _load(path: Path, wanted: Callable[[Any, str], bool], whole: bool = False) -> tuple[Tensors, dict[str, Any]]:
    """The state, and the tensors that are `wanted`, by the state and their names."""
    try:
        files = verify(path) if whole else read_manifest(path)
        state = json.loads(read_file(path, "state.json", files))
        # From bytes, not mapped: the tensors are used while this very checkpoint may be pruned or replaced.
        names = [n.removesuffix(".safetensors") for n in files if n.endswith(".safetensors")]
        return {n: from_bytes(read_file(path, f"{n}.safetensors", files)) for n in names if wanted(state, n)}, state
    except (*DAMAGE, SafetensorError) as error:
        older = sorted((p for p in _complete(path.parent) if _age(p) < _age(path)), key=_age, reverse=True)
        before = next(filter(is_intact, older), None)
        again = f"`coterie resume {path.parents[1]} --or-earlier` goes on from there"
        offer = f"; {before.name} is intact: {again}" if before else ""
        raise CoterieError(f"checkpoint {path} is damaged: {damage(error)}{offer}") from None


def latest(root: Path, seconds: float = ANSWER_S) -> Path | None:
    """The newest complete checkpoint. `load` verifies the checksums. `seconds`: for the disk's answer."""
    return read(root, lambda: max(_complete(root), key=_age, default=None), seconds)


def env_steps(root: Path) -> int:
    """Env steps of the newest complete checkpoint; 0 where there is none."""
    return 0 if (path := latest(root)) is None else int(load_state(path)["env_steps"])


def set_damaged_aside(root: Path, seconds: float = 450.0) -> list[str]:
    """Rename the damaged checkpoints that are newer than the newest intact one; none where none is intact. Returns a
    line about each. `seconds`: for the disk to answer.
    """

    def rename() -> list[str]:
        damaged = []
        for path in sorted(_complete(root), key=_age, reverse=True):
            try:
                verify(path)
            except DAMAGE as error:
                damaged.append((path, damage(error)))
                continue
            lines = []
            for bad, reason in damaged:
                _discard(aside := bad.with_name(f"damaged-{bad.name}"))  # of the same step, earlier
                lines.append(f"{bad.rename(aside)} is damaged: {reason}; the run goes on from {path.name}")
            return lines
        return []

    return read(root, rename, seconds)


def last_good(root: Path) -> str:
    """Which checkpoint a run that has failed can go on from, for the end of its reason. Removes drafts."""
    sweep(root)
    with suppress(CoterieError):
        if kept := latest(root):
            return f"{LAST_GOOD}{kept}"
    return ""


def mark_best(root: Path, path: Path, score: float) -> None:
    """Mark a checkpoint as the best one, which `prune` keeps, unless another has a higher score."""
    text = json.dumps({"checkpoint": path.name, "score": score}) + "\n"
    try:
        before = answered(partial(_best, root))[1]
        if before is None or before <= score:
            answered(partial(write_whole, root / "best.json", text))
    except OSError as error:
        raise CoterieError(f"{root}/best.json cannot be written: {damage(error)}") from None


def _best(root: Path) -> tuple[Path | None, float | None]:
    """What best.json says, if its checkpoint is there."""
    with suppress(FileNotFoundError, ValueError, KeyError, TypeError):  # others say nothing about the best one
        entry = json.loads((root / "best.json").read_text())
        if (path := root / entry["checkpoint"]) in _complete(root):  # and not ../../elsewhere
            return path, float(entry["score"])
    return None, None


def best(root: Path) -> tuple[Path | None, float | None]:
    """The checkpoint marked best, and its score."""
    return read(root, partial(_best, root))


def prune(root: Path, keep: int) -> None:
    """Delete all but the last `keep` and the best."""

    def delete() -> None:
        kept = _best(root)[0]
        for path in sorted(_complete(root), key=_age, reverse=True)[max(keep, 1) :]:
            if path != kept:
                _discard(path)

    with suppress(OSError):  # later
        answered(delete)


class CheckpointPart(NamedTuple):
    """What a learner continues from: the tensors that learner `rank` has written, and the run's `state`."""

    tensors: Tensors
    state: dict[str, Any]
    checkpoint: str  # its name
    rank: int


def load_part(path: Path, rank: int, alike: bool, seconds: float) -> CheckpointPart:
    """What learner `rank` continues from: its own part, if it was there when the checkpoint was written, else that of
    another learner. Where all are `alike` it is that of the one that was furthest.
    """

    def whose(state: dict[str, Any]) -> int:
        present: list[int] = state["present"]
        if alike:
            return max(present, key=lambda other: (state["learners"][other]["learner_steps"], other == rank))
        return rank if rank in present else present[0]

    # Only that part: with many learners, all parts are much to read.
    tensors, state = read(
        path, partial(_load, path, lambda state, name: name.startswith(f"learner_{whose(state)}/")), seconds
    )
    one = whose(state)
    part = learner(tensors, one)  # if it is another learner's, without its random numbers
    return CheckpointPart(part if one == rank else part | {"rng": {}}, state, path.name, one)


def learner(tensors: Tensors, rank: int) -> Tensors:
    """The tensors of one learner; empty if the checkpoint has none."""
    prefix = f"learner_{rank}/"
    return {k.removeprefix(prefix): x for k, x in tensors.items() if k.startswith(prefix)}


def digest(tensors: Tensors) -> str:
    """SHA-256 over names, dtypes, shapes and bytes."""
    total = hashlib.sha256()
    for group in sorted(tensors):
        for name, x in sorted(tensors[group].items()):
            x = x.detach().cpu().contiguous()
            total.update(f"{group}/{name}:{x.dtype}:{tuple(x.shape)}:".encode())
            total.update(x.reshape(-1).view(torch.uint8).numpy().data if x.numel() else b"")  # numpy's empty: stride 0
    return total.hexdigest()


def _complete(root: Path) -> list[Path]:
    return [p for p in root.glob("step_*") if (p / MANIFEST).is_file()]


def _age(path: Path) -> tuple[str, bool]:
    """Sort key of checkpoints: the oldest comes first."""
    return path.name.removesuffix(_OLD), not path.name.endswith(_OLD)


def _aside(path: Path) -> Path:
    """Rename a checkpoint or draft before its files are deleted one by one: a crash must not leave a manifest without
    its files, nor half a draft to a learner that still writes into it.
    """
    return path.rename(path.with_name(f".draft-gone-{uuid4().hex}"))


def _discard(path: Path) -> None:
    if path.exists():
        shutil.rmtree(_aside(path), ignore_errors=True)


def sweep(root: Path) -> None:
    """Delete drafts, and old versions of checkpoints. A run folder has one writer."""

    def delete() -> None:
        for path in root.glob(".draft-*"):
            with suppress(OSError):  # a disk may be too full for another name
                path = _aside(path)
            shutil.rmtree(path, ignore_errors=True)
        for old in root.glob(f"step_*{_OLD}"):
            final = old.with_name(old.name.removesuffix(_OLD))
            with suppress(OSError):
                _discard(old) if final.exists() else old.rename(final)

    with suppress(OSError):
        answered(delete)
