"""A bug that no score shows: a mask that V-trace has lost is found by a run that was recorded before."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import coterie
from tests.support.commands import python
from tests.tools.replay.test_replay import LAYOUTS, run

MASKED, LOST = "torch.gt(mask, terminated) * gamma", "torch.logical_not(terminated) * gamma"


def test_a_lost_mask_is_found_at_the_first_episode_that_was_cut_off(tmp_path):
    run(tmp_path / "run", **LAYOUTS["impala"], **{"env.max_episode_steps": 10})
    changed = tmp_path / "changed"
    shutil.copytree(Path(coterie.__file__).parent, changed / "coterie")
    file = changed / "coterie/ops/vtrace.py"
    assert MASKED in file.read_text()
    file.write_text(file.read_text().replace(MASKED, LOST))
    found = python("-P", "-m", "coterie", "replay", str(tmp_path / "run"), PYTHONPATH=str(changed))
    assert found.returncode == 1
    assert re.search(r"differs: learner steps (\d+) to \1: .+ differ after equal rollouts", found.stdout + found.stderr)
