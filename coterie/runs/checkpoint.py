"""Checkpoints: safetensors and JSON, complete when the manifest with checksums is written, which is last.

    checkpoints/step_000000123456/{model,exchange,algorithm,rng}.safetensors, state.json, manifest.json
    checkpoints/best.json

A crash at any moment leaves a complete checkpoint or rubbish with a name that nobody reads.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from coterie.types import CoterieError

Tensors = dict[str, dict[str, Tensor]]
_MANIFEST = "manifest.json"


def save(root: Path, step: int, tensors: Tensors, state: dict[str, Any]) -> Path:
    """Write one checkpoint; returns its folder. On an error nothing that was there before is touched."""
    final = root / f"step_{step:012d}"
    draft = root / f".draft-{final.name}-{os.getpid()}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        _sweep(root)
        draft.mkdir()
        for name, group in tensors.items():
            # Flat views share one storage, which safetensors refuses to write: it gets copies.
            save_file(
                {k: x.detach().cpu().clone().contiguous() for k, x in group.items()}, draft / f"{name}.safetensors"
            )
        (draft / "state.json").write_text(json.dumps(state))
        files = {}
        for file in sorted(draft.iterdir()):
            _sync(file)
            files[file.name] = {"sha256": _sha256(file), "bytes": file.stat().st_size}
        (draft / _MANIFEST).write_text(json.dumps({"step": step, "files": files}, indent=1) + "\n")
        _sync(draft / _MANIFEST)
        _sync(draft)
        if final.exists():  # the same step again, after a resume or at the end of a run
            old = root / f".draft-old-{final.name}-{os.getpid()}"
            final.rename(old)
            draft.rename(final)
            shutil.rmtree(old, ignore_errors=True)
        else:
            draft.rename(final)
        _sync(root)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(draft, ignore_errors=True)
        reason = error.strerror if isinstance(error, OSError) and error.strerror else " ".join(str(error).split())
        raise CoterieError(f"checkpoint {final} cannot be written: {reason}") from None
    return final


def load(path: Path) -> tuple[Tensors, dict[str, Any]]:
    """Read a checkpoint whose every file matches its checksum; otherwise refuse, and offer the one before."""
    try:
        files = json.loads((path / _MANIFEST).read_text())["files"]
        for name, entry in files.items():
            file = path / name
            if file.stat().st_size != entry["bytes"]:
                raise ValueError(f"{name} has {file.stat().st_size} bytes instead of {entry['bytes']}")
            if _sha256(file) != entry["sha256"]:
                raise ValueError(f"{name} does not match its checksum")
        tensors = {Path(n).stem: load_file(path / n) for n in files if n.endswith(".safetensors")}
        return tensors, json.loads((path / "state.json").read_text())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        before = latest(path.parent, before=path)
        offer = f"; the one before can be used: remove {path} and resume from {before.name}" if before else ""
        raise CoterieError(f"checkpoint {path} is damaged: {' '.join(str(error).split())}{offer}") from None


def latest(root: Path, before: Path | None = None) -> Path | None:
    """The newest complete checkpoint, or the newest complete one older than `before`."""
    found = [p for p in root.glob("step_*") if (p / _MANIFEST).is_file() and (before is None or p.name < before.name)]
    return max(found, key=lambda p: p.name, default=None)


def mark_best(root: Path, path: Path, score: float) -> None:
    """Mark one checkpoint as the best; it outlives pruning."""
    draft = root / ".best.json"
    try:
        draft.write_text(json.dumps({"checkpoint": path.name, "score": score}) + "\n")
        _sync(draft)
        draft.rename(root / "best.json")
    except OSError as error:
        raise CoterieError(f"{root}/best.json cannot be written: {error.strerror}") from None


def _best(root: Path) -> dict[str, Any] | None:
    try:
        entry = json.loads((root / "best.json").read_text())
        return entry if (root / entry["checkpoint"] / _MANIFEST).is_file() else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def best(root: Path) -> Path | None:
    """The checkpoint marked best."""
    entry = _best(root)
    return root / entry["checkpoint"] if entry else None


def best_score(root: Path) -> float | None:
    entry = _best(root)
    return float(entry["score"]) if entry else None


def prune(root: Path, keep: int) -> None:
    """Delete all but the last `keep` and the best."""
    marked = best(root)
    for path in sorted(root.glob("step_*"))[:-keep]:
        if path != marked:
            shutil.rmtree(path, ignore_errors=True)


def digest(tensors: Tensors) -> str:
    """SHA-256 over names, dtypes, shapes and bytes."""
    total = hashlib.sha256()
    for group in sorted(tensors):
        for name, x in sorted(tensors[group].items()):
            x = x.detach().cpu().contiguous()
            total.update(f"{group}/{name}:{x.dtype}:{tuple(x.shape)}:".encode())
            total.update(x.reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sweep(root: Path) -> None:
    """Remove the drafts that a crash left; a run folder has one writer."""
    for path in root.glob(".draft-*"):
        shutil.rmtree(path, ignore_errors=True)
