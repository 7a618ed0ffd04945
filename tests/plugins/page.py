"""The files that the guides on custom parts show, and runs in a folder that has nothing else."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from coterie.cli.main import main
from coterie.envs import workers
from coterie.plugins import set_command_folder
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


@contextmanager
def inside(folder: Path) -> Iterator[None]:
    """This process as one that a command was typed for in `folder`; what was imported from there is forgotten."""
    before, path = Path.cwd(), [*sys.path]
    os.chdir(folder)
    workers._declared.cache_clear()  # which is by name, and other tests have an env of that name
    try:
        yield
    finally:
        os.chdir(before)
        sys.path[:] = path
        set_command_folder("")
        for name, module in list(sys.modules.items()):
            if (getattr(module, "__file__", None) or "").startswith(str(folder)):
                del sys.modules[name]


def train_here(folder: Path, out: str, *args: str) -> dict[str, Any]:
    """As `train`, in this process."""
    with inside(folder):
        assert main(["train", *args, "--out", out, "--log.tensorboard", "False", "--device", "cpu"]) == 0
    found: dict[str, Any] = json.loads((folder / out / "summary.json").read_text())
    return found


def evaluate(folder: Path, run: str, episodes: int = 50) -> float:
    with inside(folder), redirect_stdout(io.StringIO()) as said:
        assert main(["eval", run, "--episodes", str(episodes), "--json"]) == 0
    return float(json.loads(said.getvalue())["mean_return"])
