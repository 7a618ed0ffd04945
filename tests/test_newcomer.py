"""A new user's first hour: a fresh clone, and README's commands from top to bottom, each after the one before it.

They are typed as they stand there, into a shell, with nothing but the installed package; only budgets are small.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.test_docs import commands, shrink

ROOT = Path(__file__).parents[1]


def typed(line: str) -> str:
    """The line with a small budget."""
    words = shlex.split(line)
    if words[0] == "make":
        return f"{line} ARGS='--steps 3000 --env.num-envs 8'"
    return shlex.join(["coterie", *shrink(words)]) if words[0] == "coterie" else line


@pytest.mark.slow
def test_readme_top_to_bottom_on_a_fresh_clone(tmp_path):
    subprocess.run(["git", "clone", "-q", str(ROOT), str(tmp_path / "coterie")], check=True)
    here = tmp_path / "coterie"
    # Neither this checkout nor the environment that runs the tests is to be found.
    env = {k: x for k, x in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    env["PATH"] = f"{here / '.venv' / 'bin'}{os.pathsep}{env['PATH']}"  # as after `source .venv/bin/activate`
    lines = commands(here / "README.md")
    assert lines[0] == "make train"

    def shell(line: str) -> None:
        done = subprocess.run(
            ["bash", "-c", line], cwd=here, env=env, capture_output=True, text=True, check=False, timeout=1800
        )
        assert done.returncode == 0, f"{line}\n{done.stdout[-1000:]}\n{done.stderr[-2000:]}"

    for line in lines:
        shell(typed(line))
    assert Path(here / "moon.mp4").stat().st_size > 1000
    assert (here / "runs" / "moon" / "report.html").is_file()

    (code,) = re.findall(r"```python\n(.*?)```", (here / "README.md").read_text(), re.S)
    shell(shlex.join(["python", "-c", code.replace("20_000", "2_000")]))
