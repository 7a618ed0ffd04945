"""A checkpoint's manifest: its files with their sizes and checksums, and a checksum of its own."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from coterie.errors import CoterieError, reason_of

MANIFEST = "manifest.json"
FORMAT = 1  # of what this version writes; manifests of the first versions do not name it
DAMAGE = (OSError, ValueError, KeyError, TypeError, AttributeError)  # raised by reading a garbled file


def write_manifest(folder: Path, step: int) -> None:
    """Over all files that are there."""
    files = {}
    for file in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = file.relative_to(folder).as_posix()
        files[name] = {"sha256": _sha256(file), "bytes": file.stat().st_size}
    body: dict[str, Any] = {"format": FORMAT, "step": step, "files": files}
    (folder / MANIFEST).write_text(json.dumps({**body, "sha256": _seal(body)}, indent=1))


def read_manifest(path: Path) -> dict[str, dict[str, Any]]:
    """A checkpoint's files, with the size and checksum of each. Raises one of `DAMAGE` if the manifest is not as it was
    written, `CoterieError` if a newer version has written it.
    """
    manifest = json.loads((path / MANIFEST).read_text())
    if (found := int(manifest.get("format", 1))) > FORMAT:
        raise CoterieError(f"checkpoint {path} has format {found}, and this version of coterie reads 1 to {FORMAT}")
    if manifest.pop("sha256") != _seal(manifest):
        raise ValueError(f"{MANIFEST} does not match its checksum")
    files: dict[str, dict[str, Any]] = manifest["files"]
    return files


def read_file(path: Path, name: str, files: dict[str, dict[str, Any]]) -> bytes:
    """A file as it was written, or one of `DAMAGE`."""
    data = (path / name).read_bytes()
    _compare(name, files[name], len(data), hashlib.sha256(data).hexdigest())
    return data


def verify(path: Path) -> dict[str, dict[str, Any]]:
    """As `read_manifest`, which it calls; also raises one of `DAMAGE` if any file is not as it was written."""
    files = read_manifest(path)
    for name, entry in files.items():
        _compare(name, entry, (path / name).stat().st_size, _sha256(path / name))
    return files


def _compare(name: str, entry: dict[str, Any], size: int, sha256: str) -> None:
    if size != entry["bytes"]:
        raise ValueError(f"{name} has {size} bytes instead of {entry['bytes']}")
    if sha256 != entry["sha256"]:
        raise ValueError(f"{name} does not match its checksum")


def is_intact(path: Path) -> bool:
    try:
        verify(path)
    except (*DAMAGE, CoterieError):
        return False
    return True


def damage(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}" + (f" ({Path(str(error.filename)).name})" if error.filename else "")
    if isinstance(error, KeyError | TypeError | AttributeError | UnicodeDecodeError | json.JSONDecodeError):
        return f"{MANIFEST} is garbled ({type(error).__name__})"
    if found := re.search(r"I/O error: (.*?) \(os error", str(error)):  # of safetensors
        return found[1]
    return reason_of(error)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _seal(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
