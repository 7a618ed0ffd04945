"""The notebook's cells run from top to bottom, and CartPole is learned; no outputs are kept in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_the_notebook(tmp_path):
    pytest.importorskip("matplotlib")
    cells = json.loads((ROOT / "examples" / "cartpole.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert not any(cell.get("outputs") for cell in cells)
    claim = "import json\njson.dump([summary['mean_return'], score['mean_return'], steps], open('found', 'w'))"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "Agg", "SDL_VIDEODRIVER": "dummy"}
    done = subprocess.run(
        [sys.executable, "-c", "\n".join([*code, claim])],
        cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    trained, scored, steps = json.loads((tmp_path / "found").read_text())
    assert trained > 150
    assert scored > 300
    assert steps > 200
