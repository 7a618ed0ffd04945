"""What mkdocs does besides: README.md is the first page, and each source file that a page links to is a page as well.

On GitHub and in an editor the links lead to the files themselves; here to pages under source/, so that the site has all
that it speaks of.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
LINK = re.compile(r"(?<=\]\()(?!https?:|#)([^)#\s]+)")


def _place(path: Path) -> str:
    """Where a file or folder of the repository is on the site, relative to its root."""
    if path == ROOT / "README.md":
        return "index.md"
    if path.is_file() and path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    inside = path.relative_to(ROOT).as_posix()
    return f"source/{inside}/index.md" if path.is_dir() else f"source/{inside}.md"


def _links(text: str, folder: Path) -> list[Path]:
    return [Path(os.path.normpath(folder / link)) for link in LINK.findall(text)]


def _source(path: Path) -> str:
    """A page with a file's text, or with a folder's files."""
    title = f"# {path.relative_to(ROOT).as_posix()}\n\n"
    if path.is_dir():
        return title + "\n".join(
            f"- [{one.name}]({os.path.relpath(_place(one), f'source/{path.relative_to(ROOT)}')})"
            for one in _files(path)
        )
    if path.suffix == ".ipynb":  # its text, cell by cell
        cells = json.loads(path.read_text())["cells"]
        texts = [(cell["cell_type"], "".join(cell["source"])) for cell in cells]
        return "\n\n".join(text if kind == "markdown" else f"```python\n{text}\n```" for kind, text in texts)
    if path.suffix == ".md":
        return _moved(path.read_text(), path.parent, _place(path))
    return f"{title}````{path.suffix.removeprefix('.') or 'text'}\n{path.read_text()}\n````\n"


def _files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.is_file() and p.suffix in (".py", ".proto", ".json"))


def on_files(files: Files, config: Any) -> Files:
    readme = (ROOT / "README.md").read_text()
    files.append(File.generated(config, "index.md", content=_moved(readme, ROOT, "index.md")))
    pages = [*ROOT.glob("*.md"), *DOCS.rglob("*.md")]
    wanted = {link for page in pages for link in _links(page.read_text(), page.parent)}
    wanted |= {one for folder in wanted if folder.is_dir() for one in _files(folder)}
    for path in sorted(p for p in wanted if p.exists() and _place(p).startswith("source/")):
        files.append(File.generated(config, _place(path), content=_source(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if page.file.generated_by:
        return markdown
    return _moved(markdown, (DOCS / page.file.src_uri).parent, page.file.src_uri)


def _moved(markdown: str, folder: Path, page: str) -> str:
    """The text of a file in `folder` for the page at `page`: links relative to that, and room around comments."""

    def move(found: re.Match[str]) -> str:
        target = Path(os.path.normpath(folder / found[1]))
        return os.path.relpath(_place(target), os.path.dirname(page) or ".") if target.exists() else found[1]

    return re.sub(r"^(<!-- .* -->)$", r"\n\1\n", LINK.sub(move, markdown), flags=re.M)
