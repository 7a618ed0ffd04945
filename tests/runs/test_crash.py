"""A process that is killed while it writes: whatever the moment, the next one finds a whole checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# A child for each moment: the k-th time that it touches the disk it kills itself with SIGKILL. The child's own code
# runs on; what matters is what the next process finds. Forked inside one subprocess, so that torch is imported once.
CRASH = """
import os, signal, sys, json
from pathlib import Path
from coterie.config import Config
from coterie.runs import checkpoint
from coterie.runs.config_io import load_config, replace, save_config
from tests.runs.test_checkpoint import save

def at_kth_touch(k):
    left = k
    def wrap(owner, name):
        real = getattr(owner, name)
        def touch(*args, **kwargs):
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)
        setattr(owner, name, touch)
    for owner, name in ((os, "fsync"), (os, "rename"), (os, "replace"), (os, "unlink"), (os, "rmdir"), (os, "mkdir"),
                        (checkpoint, "save_file"), (Path, "write_text")):
        wrap(owner, name)

def trial(root, k, act):
    child = os.fork()
    if child == 0:
        at_kth_touch(k)
        act()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def every_moment(root, what):
    k, survived = 0, False
    while not survived:
        k += 1
        here = root / f"{what}{k}"
        paths = [save(here, 1, seed=10), save(here, 2, seed=20)]
        checkpoint.mark_best(here, paths[what == "again"], 1.0)
        acts = {
            "new": lambda: save(here, 3, seed=30),
            "again": lambda: save(here, 2, seed=21),
            "prune": lambda: (checkpoint.mark_best(here, paths[1], 2.0), checkpoint.prune(here, 1)),
        }
        code = trial(here, k, acts[what])
        assert code in (0, -signal.SIGKILL), code
        survived = code == 0
        newest = checkpoint.load(checkpoint.latest(here))[1]["seed"]  # raises where it is damaged
        for complete in here.glob("step_*/manifest.json"):
            checkpoint.load(complete.parent)
        save(here, 4, seed=40)
        best = checkpoint.best(here)[0]
        checkpoint.load(best)
        yield newest, best.name, sorted(p.name for p in here.iterdir() if p.name.startswith((".draft", "step")))

def config_at_every_moment(root):
    k, survived, old = 0, False, replace(Config(), {"seed": 1})
    while not survived:
        k += 1
        here = root / f"config{k}.json"
        save_config(here, old)
        survived = trial(root, k, lambda: save_config(here, replace(Config(), {"seed": 2}))) == 0
        yield load_config(here).seed  # raises where it is cut

configs = list(config_at_every_moment(Path(sys.argv[1])))
acts = "new", "again", "prune"
print(json.dumps({"config": configs} | {what: list(every_moment(Path(sys.argv[1]), what)) for what in acts}))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_kill_9_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", CRASH, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    # Of each act and moment the newest checkpoint's seed, the best one's name and all names.
    crashes: dict[str, list[Any]] = json.loads(done.stdout)
    assert crashes["config"] == sorted(crashes["config"])  # the seed in config.json, which is the old file or the new
    assert {1, 2} == set(crashes["config"])
    for act, before, after, steps in (("new", 20, 30, [1, 2, 3]), ("again", 20, 21, [1, 2]), ("prune", 20, 20, [1, 2])):
        assert len(crashes[act]) > 5, "the child was hardly ever killed"
        newest = [row[0] for row in crashes[act]]
        assert set(newest) == {before, after}
        assert newest == sorted(newest), "once the new one is there it stays"
        for _, best, names in crashes[act]:
            assert best in ("step_000000000001", "step_000000000002")
            assert {"step_000000000002", "step_000000000004"} <= set(names) <= {f"step_{n:012d}" for n in (*steps, 4)}
