"""`coterie check-env` finds each fault of a vector env and of a user's own backend, and none in sound ones."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

import coterie
from coterie.cli.main import main
from coterie.envs.backend import Backend, StepResults, declare
from coterie.envs.spaces import on_host
from coterie.errors import ConfigError
from tests.support.vectors import Counting


class Walks(Backend):
    """Random walks of 7 steps. `fault`: what is wrong with it."""

    def __init__(self, env_id: str, seeds: Any, fault: str = "") -> None:
        box = spaces.Box(-20, 20, (1,), np.float32)
        if fault != "no super":
            super().__init__(declare(env_id, box, spaces.Discrete(2)), len(seeds))
        self.rng = np.random.default_rng(None if fault == "seed" else list(seeds))
        self.fault, self.tensors = fault, fault == "torch"
        self.place, self.steps = np.zeros((len(seeds), 1), np.float32), np.zeros(len(seeds), int)

    def reset(self, ids: Any) -> None:
        self.place[ids], self.steps[ids] = self.rng.uniform(-1, 1, (len(ids), 1)), 0
        self.ids, self.begin = ids, np.ones(len(ids), bool)

    def step(self, ids: Any, actions: Any) -> None:
        if self.fault == "raise":
            {}["missing"]
        assert isinstance(actions, torch.Tensor if self.tensors else np.ndarray)
        self.ids, self.begin = ids, self.steps == 7
        self.place += 2 * on_host(actions)[:, None] - 1
        self.steps += 1
        self.steps[self.begin] = 7 if self.fault == "goes on" else 0
        self.place[self.begin] = 0

    def recv(self) -> Any:
        ids, fault = self.ids, self.fault
        if fault == "tuple":
            return self.place, {}
        obs, done = self.place[ids], self.steps[ids] == 7
        reward = np.where(self.begin & (fault != "reward"), 0, np.float32(1))
        over = np.zeros_like(done) if fault == "never over" else ~done if fault == "over" else done
        obs = obs.astype(np.float64) if fault == "dtype" else obs * 30 if fault == "bounds" else obs
        obs = self.place if fault == "shared" else {"x": obs} if fault == "names" else obs
        obs = torch.from_numpy(obs) if self.tensors else obs[:, 0] if fault == "shape" else obs
        if fault == "endless":
            done = over = np.zeros_like(done)
        flags = (done[:, None] if fault == "flags" else done.astype(int) if fault == "ints" else done), done & False
        return StepResults(obs, reward, *flags, over)

    def replace(self, ids: Any, seeds: Any) -> None:
        if self.fault == "no replace":
            super().replace(ids, seeds)
        self.fault = "shared" if self.fault == "all rows" else self.fault


class Lazy(Counting):
    """`fault`: what is wrong with it."""

    def __init__(self, num_envs: int, fault: str = "", **kwargs: Any) -> None:
        super().__init__(num_envs, **kwargs)
        self.fault, self.buffer = fault, np.zeros((num_envs, 2), np.float32)
        if fault == "says NextStep":
            self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        if options and self.fault == "resets all":
            options = {"reset_mask": np.ones(self.num_envs, bool)}
        return super().reset(seed=seed, options=options)

    def _see(self) -> Any:
        if self.fault == "shared":
            self.buffer[:] = super()._see()
            return self.buffer
        obs = super()._see()
        return obs.astype(np.float64) if self.fault == "dtype" else obs


BACKEND = [
    ("seed", "two copies with one seed begin differently: draw from the seeds"),
    ("raise", "it raises KeyError: 'missing' ("),
    ("goes on", "the step after an episode's end has a reward, or ends an episode: it must only"),
    ("reward", "the step after an episode's end has a reward, or ends an episode: it must only"),
    ("never over", "game_over: False at each of 28 ends of episodes"),
    ("over", "game_over: True where neither terminated nor truncated is"),
    ("dtype", "observation: type float64, not float32: convert it"),
    ("bounds", "observation: values from "),
    ("shared", "observation: the array changes after it was given; give a new one each time"),
    ("names", "env.id 'walks': the observations are ['x'], where the space has ['']"),
    ("shape", "env.id 'walks': observation has shape (4,), not (4, 1)"),
    ("flags", "env.id 'walks': terminated has shape (4, 1), not (4,)"),
    ("ints", "terminated: type int64, not bool: convert it"),
    ("endless", "no episode ended in 240 steps: truncate at a limit"),
    ("tuple", "recv returned tuple, not StepResults"),
    ("all rows", "env.id 'walks': observation has shape (4, 1), not (1, 1)"),
]


@pytest.mark.parametrize(("fault", "says"), BACKEND)
def test_a_fault_of_a_backend_is_named(fault: str, says: str) -> None:
    kwargs = json.dumps({"fault": fault})
    found = coterie.check_env("walks", backend=Walks, kwargs=kwargs, steps=60)
    assert [line for line in found if line.startswith(says)], found


@pytest.mark.parametrize("fault", ["", "torch", "no replace"])
def test_a_sound_backend_has_none(fault: str) -> None:
    assert coterie.check_env("walks", backend=Walks, kwargs=json.dumps({"fault": fault}), steps=60) == []


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"fault": "shared"}, "observation: the array changes after it was given"),
        ({"fault": "dtype"}, "observation: type float64, not float32: convert it"),
        ({"fault": "says NextStep", "mode": "SameStep"}, "the step after an episode's end has a reward"),
        ({"fault": "resets all", "mode": "Disabled"}, 'reset(options={"reset_mask": mask}): it changes the obs'),
        ({"mode": "SameStep", "lacks": "final_obs"}, "env.id 'tests.tools.test_check_backend:Lazy': no final_obs in"),
        ({"nan": 9}, "observation: nan; a run replaces an env that gives it"),
    ],
)
def test_a_fault_of_a_vector_env_is_named(kwargs: dict[str, Any], says: str) -> None:
    found = coterie.check_env(Lazy, backend="vector", kwargs=json.dumps(kwargs), steps=60)
    assert [line for line in found if line.startswith(says)], found


@pytest.mark.parametrize("mode", ["NextStep", "Disabled", "SameStep"])
@pytest.mark.parametrize("kind", ["numpy", "torch", "dlpack"])
def test_a_sound_vector_env_has_none(mode: str, kind: str) -> None:
    assert coterie.check_env(Lazy, backend="vector", kwargs=json.dumps({"mode": mode, "kind": kind}), steps=60) == []


@pytest.mark.parametrize("mode", ["NextStep", "Disabled", "SameStep"])
def test_gymnasiums_own_and_masks_have_none(mode: str) -> None:
    kwargs = json.dumps({"mode": mode})
    assert coterie.check_env("tests.support.vectors:gymnasiums", backend="vector", kwargs=kwargs, steps=60) == []
    assert coterie.check_env("tests.support.vectors:masked", backend="vector", steps=60) == []


def test_the_command_checks_a_vector_env(capsys: Any) -> None:
    options = ["--env.backend", "vector", "--env.num-envs", "3", "--steps", "300"]
    assert main(["check-env", "CartPole-v1", *options]) == 0
    shown = capsys.readouterr().out
    assert "env steps/s of 3 envs" in shown
    assert "a NaN ends the run" in shown
    with pytest.raises(ConfigError, match="--render: only envs that run apart"):
        coterie.check_env("CartPole-v1", backend="vector", render=True)
