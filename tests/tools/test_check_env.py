"""`coterie check-env` finds each fault of an env, and none in a sound one."""

from __future__ import annotations

import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import coterie
from coterie.cli.main import main
from coterie.config import Env
from coterie.envs.spaces import ObsField
from coterie.envs.testing import Catch, CountingEnv
from coterie.tools import check_env
from coterie.types import ObsSpec
from tests.support.masked import Masked


class Faulty(CountingEnv):
    """`fault`: what is wrong with it. `answers`: resets and steps of all."""

    answers = 0

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.fault = fault
        self.observation_space = spaces.Dict({"x": spaces.Box(-1, 1, (2,), np.float32)})

    def reset(self, *, seed=None, options=None):
        Faulty.answers += 1
        gymnasium.Env.reset(self, seed=None if self.fault == "seed" else seed)
        self.steps = 0
        return self.look(), {}

    def step(self, action):
        self.steps, Faulty.answers = self.steps + 1, Faulty.answers + 1
        if self.fault == "raise":
            {}["missing"]
        if self.fault == "exit":
            sys.exit("no license")
        if self.fault == "hang":
            time.sleep(600)
        reward = np.nan if self.fault == "reward" else 1.0
        return self.look(), reward, self.steps == 7 and self.fault != "endless", False, {}

    def close(self):
        1 / (self.fault != "close")

    def look(self):
        x = self.np_random.uniform(-1, 1, 2).astype(np.float64 if self.fault == "dtype" else np.float32)
        if self.fault == "nan":
            x[0] = np.nan
        return (
            {"x": x + 5 if self.fault == "bounds" else x[:1] if self.fault == "shape" else x}
            if self.fault != "key"
            else {}
        )


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("seed", "two copies with one seed begin differently: call super"),
        ("raise", "it raises KeyError: 'missing' ("),
        ("exit", "it raises SystemExit: no license ("),
        ("reward", "reward: nan; a run replaces"),
        ("endless", "no episode ended in 60 steps: truncate at a limit"),
        ("dtype", "observation 'x': type float64 (2,) where its space has float32 (2,)"),
        ("shape", "the observation['x'] has shape (1,), but its space has (2,)"),
        ("key", "the observation['x'] is not in its space: KeyError: 'x'"),
        ("close", "it raises ZeroDivisionError: division by zero ("),
        ("nan", "observation 'x': nan; a run replaces"),
        ("bounds", "observation 'x': values from "),
    ],
)
def test_a_fault_is_named(fault, says):
    assert coterie.check_env(Faulty, steps=60) == []
    found = coterie.check_env(Faulty, kwargs={"fault": fault}, steps=60)
    assert [line for line in found if line.startswith(says)], found
    assert [line for line in found[1:] if not line.startswith("gymnasium: ")] == []


def test_each_answer_is_a_sign_of_life(monkeypatch):
    """Or the check of a slow env ends as that of one that hangs."""
    monkeypatch.setattr(Faulty, "answers", 0)
    signs = list[int]()
    assert check_env._check(Env(f"{__name__}:Faulty"), 50, False, lambda: signs.append(Faulty.answers))[0] == []
    assert max(b - a for a, b in pairwise(signs)) <= 2  # a new instance resets its env, and is reset
    assert signs[-1] == Faulty.answers > 250


def test_a_check_of_an_env_that_hangs_ends():
    command = ["check-env", env := f"{__name__}:Faulty", "--env.kwargs", '{"fault": "hang"}']
    script = (
        f"from coterie.tools import check_env as c; c._HANGS_S = 5.0\nimport coterie.cli.main as m; m.main({command})"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert f" s: {env} does not answer, in its constructor, reset or step, as below" in done.stderr
    assert "in step" in done.stderr


def test_an_env_is_played_by_its_masks_and_self_play_by_its_seed(monkeypatch):
    assert coterie.check_env(Masked, steps=50) == coterie.check_env(lambda: Masked("info", "mixed"), steps=50) == []
    nothing = "action_mask: nothing is legal after 3 random actions, and no episode ended"
    assert coterie.check_env(lambda: Masked(stuck=3)) == [nothing]
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    assert coterie.check_env("selfplay/self_play:Nim", steps=100) == []


def test_the_command_says_what_it_saw_and_has_three_exit_codes(capsys):
    assert coterie.check_env(Catch) == []
    faulty = f"{__name__}:Faulty"
    assert main(["check-env", faulty, "--env.kwargs", '{"fault": "raise"}', "--steps", "9"]) == 1
    assert "\nfix: it raises KeyError: 'missing' (" in capsys.readouterr().out
    assert main(["check-env", "Catch-v0", "--steps", "40"]) == 0  # EnvPool's
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "observation: float32 (10, 5), as it is; numbers, for an MLP"
    for shape, dtype, use in (
        ((40, 48, 3), "uint8", "an image, for convolutions"),
        ((40, 48), "uint8", "numbers, for an MLP (an image is uint8 [height, width, channels])"),
    ):
        assert check_env._network(ObsField("", (), ObsSpec(shape, dtype), None)) == f"; {use}"
    assert lines[2].startswith("episodes: 4 of 9 to 9 steps, 4 terminated; is that a time limit?")
    assert lines[-1] == "nothing to fix"
    assert main(["check-env", "Catch-v0", "--steps", "40", "--render"]) == 1
    assert "fix: env.id: EnvPool cannot draw 'Catch-v0'" in capsys.readouterr().out
    mixed = ["check-env", "tests.support.masked:Masked", "--env.kwargs", '{"kind": "mixed"}', "--steps", "9"]
    main(mixed)
    assert "\naction: mixed, (4, 3, 2) and 2 numbers\n" in capsys.readouterr().out
    assert main(["check-env", "nowhere:Env"]) == 2
    assert main(["check-env", "Catch-v0", "--steps", "0"]) == 2
