"""The files that the guides on custom parts show, and runs in a folder that has nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tests.support.commands import ROOT, coterie

PAGES = sorted((ROOT / "docs" / "guides").glob("custom-*.md"))


def write_files(folder: Path, *pages: Path) -> list[str]:
    """Write the titled blocks of Python of these pages (default: `PAGES`) as files; returns their names."""
    texts = [page.read_text() for page in pages or PAGES]
    blocks = [block for text in texts for block in re.findall(r'```python title="([\w.]+)"\n(.*?)```', text, re.S)]
    for name, text in blocks:
        (folder / name).write_text(text)
    return [name for name, _ in blocks]


def train(folder: Path, out: str, *args: str) -> dict[str, Any]:
    """`coterie train ARGS --out OUT`; returns its summary."""
    done = coterie(folder, "train", *args, "--out", out, "--log.tensorboard", "False", "--device", "cpu")
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads((folder / out / "summary.json").read_text())
    return found


def evaluate(folder: Path, run: str, episodes: int = 50) -> float:
    done = coterie(folder, "eval", run, "--episodes", str(episodes), "--json")
    assert done.returncode == 0, done.stderr[-2000:]
    return float(json.loads(done.stdout)["mean_return"])
