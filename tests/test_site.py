"""The site builds without a warning, has every page, and fetches nothing from elsewhere."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FETCHED = (
    r'<(?:script|img|iframe|video|source)\b[^>]*\bsrc="([^"]*)"|<link\b[^>]*\bhref="([^"]*)"|url\(["\']?([^"\')]*)'
)


@pytest.mark.skipif(importlib.util.find_spec("material") is None, reason="needs mkdocs-material: the extra `docs`")
def test_the_site(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert 'not included in the "nav"' not in done.stderr
    for page in (ROOT / "docs").rglob("*.md"):
        assert (tmp_path / page.relative_to(ROOT / "docs").with_suffix(".html")).is_file()
    home = (tmp_path / "index.html").read_text()
    assert "<td>solo, allreduce, hogwild, store, gossip</td>" in home  # the matrix is a table
    structure = (tmp_path / "explanation" / "structure.html").read_text()
    assert 'href="../source/coterie/acting/inline.py.html"' in structure  # a source file is a page
    assert "class Inline" in re.sub(r"<[^>]*>", "", (tmp_path / "source/coterie/acting/inline.py.html").read_text())
    fetched = {
        target
        for file in tmp_path.rglob("*")
        if file.suffix in (".html", ".css")
        for found in re.findall(FETCHED, file.read_text())
        for target in found
        if re.match(r"(https?:)?//", target)
    }
    assert not fetched


@pytest.mark.parametrize("page", ["a2c", "a3c", "gala", "impala", "seed"])
def test_a_page_on_an_architecture_has_the_figure_the_file_and_the_command(page):
    text = (ROOT / "docs" / "explanation" / f"{page}.md").read_text()
    assert "```text" in text
    assert re.search(r"\]\(\.\./\.\./coterie/(acting|exchange)/\w+\.py\)", text)
    assert "\ncoterie train " in text
    assert "](../results/learning.md#" in text
