"""A bug that no score shows: a mask that V-trace has lost is found by a run that was recorded before."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import coterie

MASKED, LOST = "torch.gt(mask, terminated) * gamma", "torch.logical_not(terminated) * gamma"


def run(code: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(code)}
    command = [sys.executable, "-m", "coterie", *words]
    return subprocess.run(command, env=env, cwd=code, capture_output=True, text=True, timeout=300)


def test_a_lost_mask_is_found_at_the_first_episode_that_was_cut_off(tmp_path):
    ours, folder = Path(coterie.__file__).parent, str(tmp_path / "run")
    limit = "--env.max-episode-steps", "10"
    options = "--env", "CartPole-v1", "--actors", "1", "--steps", "2000", "--log.digest-every", "1", *limit
    assert run(ours.parent, "train", "impala", *options, "--out", folder).returncode == 0
    assert run(ours.parent, "replay", folder).returncode == 0
    shutil.copytree(ours, tmp_path / "changed" / "coterie")
    file = tmp_path / "changed/coterie/ops/vtrace.py"
    assert MASKED in file.read_text()
    file.write_text(file.read_text().replace(MASKED, LOST))
    found = run(tmp_path / "changed", "replay", folder)
    assert found.returncode == 1
    assert re.search(r"differs: learner steps (\d+) to \1: .+ differ after equal rollouts", found.stdout + found.stderr)
