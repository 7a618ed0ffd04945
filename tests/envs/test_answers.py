"""An env that returns what it must not is told what, instead of being trained on something else."""

from contextlib import closing
from typing import ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv

from coterie import config
from coterie.envs import answers
from coterie.envs.local import LocalBackend
from coterie.errors import CoterieError
from tests.envs.env_harness import make, play

BOX, BYTES = spaces.Box(-1, 1, (3,), np.float32), spaces.Box(0, 255, (2, 2, 3), np.uint8)
FINE = np.zeros(3, np.float32)
CASES = {
    "shape": (BOX, 0.5, 0.0, r"the observation has shape \(\), but its space has \(3,\)"),
    "one number": (BOX, np.array([0.5]), 0.0, r"the observation has shape \(1,\), but its space has \(3,\)"),
    "more numbers": (BOX, np.zeros(4), 0.0, r"the observation has shape \(4,\), but its space has \(3,\)"),
    "image": (BYTES, np.zeros((2, 2, 1), np.uint8), 0.0, r"has shape \(2, 2, 1\), but its space has \(2, 2, 3\)"),
    "floats for bytes": (BYTES, np.full((2, 2, 3), 0.5), 0.0, "numbers that its space's uint8 cannot hold: 0.5 to 0.5"),
    "large for bytes": (BYTES, np.full((2, 2, 3), 1000), 0.0, "its space's uint8 cannot hold: 1000 to 1000"),
    "discrete": (spaces.Discrete(4), 7, 0.0, r"is not in its space: ValueError: 7 is no integer from 0 to 3"),
    "several for one": (spaces.Discrete(4), np.array([1, 2]), 0.0, r"has shape \(2,\), but its space has \(\)"),
    "one for several": (
        spaces.Box(-1, 1, (3,), np.float64),
        np.ones(1),
        0.0,
        r"has shape \(1,\), but its space has \(3,\)",
    ),
    "large for bits": (spaces.MultiBinary(2), np.array([256, 0]), 0.0, "its space's int8 cannot hold: 0 to 256"),
    "halves for bits": (spaces.MultiBinary(2), np.array([0.5, 0]), 0.0, "its space's int8 cannot hold: 0.0 to 0.5"),
    "nothing": (spaces.Box(-1, 1, (0,)), np.zeros(0), 0.0, r"observation '' is empty, of shape \[0\]"),
    "key": (spaces.Dict(a=BOX, b=BOX), {"a": FINE}, 0.0, r"the observation\['b'\] is not in its space: KeyError: 'b'"),
    "reward": (BOX, FINE, np.array([1.0, 2.0]), r"step must return a number as its reward, not array\(\[1., 2.\]\)"),
    "no reward": (BOX, FINE, None, "step must return a number as its reward, not None"),
}


class Odd(gymnasium.Env):
    """Returns what the case says."""

    action_space = spaces.Discrete(2)

    def __init__(self, case):
        self.observation_space, self.obs, self.reward, _ = CASES[case]

    def reset(self, *, seed=None, options=None):
        return self.obs, {}

    def step(self, action):
        return self.obs, self.reward, False, False, {}


class Remembers(gymnasium.Env):
    """Its reward is the distance of an action from the last one, which it keeps and does not copy."""

    observation_space = action_space = BOX

    def reset(self, *, seed=None, options=None):
        self.last = np.zeros(3)
        return FINE, {}

    def step(self, action):
        reward, self.last = np.abs(action - self.last).sum(), action
        return FINE, float(reward), False, False, {}


@pytest.mark.parametrize("backend", ["workers", "auto"])
def test_an_action_that_an_env_keeps_stays_as_it_was(backend):
    with make("tests.envs.test_answers:Remembers", 3, backend=backend) as envs:
        seen = play(envs, 6)
    before = np.concatenate([np.zeros((1, 3, 3)), seen.action[:-1]])
    np.testing.assert_allclose(seen.reward[1:], np.abs(seen.action - before).sum(-1), atol=1e-5)


class Old(gymnasium.Env):
    """As envs were before gymnasium 0.26, in `reset` or in `step`."""

    observation_space, action_space = BOX, spaces.Discrete(2)

    def __init__(self, call):
        self.call = call

    def reset(self, *, seed=None, options=None):
        return FINE if self.call == "reset" else (FINE, {})

    def step(self, action):
        return FINE, 0.0, False, {}


class Older(Old):
    """As envs were before gymnasium 0.22."""

    def __init__(self):
        super().__init__("")

    def reset(self):
        return FINE


class Careless(Older):
    """Its own code makes the mistake."""

    def reset(self, **options):
        return super().reset(**options)


def unnamed():
    return Old()


def told(env, reason, **kwargs):
    with pytest.raises(CoterieError, match=reason), make(f"{__name__}:{env}", 1, kwargs=kwargs) as envs:
        play(envs, 3)


@pytest.mark.parametrize("case", CASES)
def test_what_does_not_fit_is_said(case):
    told("Odd", CASES[case][3], case=case)


class Spaceless:
    """Somebody's first attempt."""

    def reset(self, seed=None):
        return FINE

    def step(self, action):
        return FINE, 0.0, False, {}


def test_an_env_without_spaces_is_told_what_it_lacks():
    told("Spaceless", "it made Spaceless, which has no observation_space and no action_space, as a gymnasium")


class Closeless(Spaceless):
    """It has the interface, but not the rest of gymnasium's class."""

    observation_space, action_space = spaces.Box(0.0, 1.0, (2,)), spaces.Discrete(2)


def several():
    return SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 2)


class Keywords(gymnasium.Env):
    """Its attribute has the name of one of functools.partial's; it draws for people only."""

    metadata: ClassVar = {"render_modes": ["human"]}
    keywords: ClassVar = ["scale"]
    observation_space, action_space = spaces.Box(0.0, 1.0, (2,)), spaces.Discrete(2)

    def __init__(self, scale=1.0, render_mode=None):
        assert render_mode in (None, "human")

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}


def test_an_env_is_made_as_it_wants_to_be():
    env = config.Env(f"{__name__}:Keywords", kwargs='{"scale": 2.0}')
    with closing(LocalBackend(env, [1])) as made:
        made.reset(np.array([0]))


def test_an_env_with_an_id_is_drawn_only_if_its_constructor_can():
    gymnasium.register("Odd-v0", Odd)
    kwargs = '{"case": "shape"}'
    with closing(LocalBackend(config.Env("Odd-v0", kwargs=kwargs), [1])) as made:
        made.env.unwrapped.render = lambda: None
        with pytest.raises(CoterieError, match=r"gives no frames: .* unexpected keyword argument 'render_mode'"):
            made.render()
        made.env.unwrapped.render = lambda: np.zeros((3, 64, 64))
        with pytest.raises(CoterieError, match=r"draws float64 \[3, 64, 64\]; a frame must be uint8 \[H, W, 3\]$"):
            made.render()
    with pytest.raises(CoterieError, match=r"missing 1 required positional argument: .case."):
        LocalBackend(config.Env("Odd-v0"), [1])


def test_what_only_looks_like_an_env_is_told_what_to_be():
    told("Closeless", "Closeless is not a gymnasium.Env: inherit from it")
    told("several", "it made a VectorEnv: set env.backend to vector")


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ("reset", r"reset must return \(observation, info\), not ndarray"),
        ("step", r"step must return \(observation, reward, terminated, truncated, info\), not 4 values"),
    ],
)
def test_an_env_of_the_old_form_is_told_the_new_one(call, reason):
    told("Old", reason, call=call)


@pytest.mark.parametrize("limit", [0, 5])
@pytest.mark.parametrize(
    ("env", "then"),
    [
        ("Older", r"; gymnasium's reset takes seed and options, and returns \(obs, info\)$"),
        ("Careless", r" \(.*test_answers\.py, line \d+, in reset\)"),
    ],
)
def test_a_reset_that_takes_no_seed_is_told_the_new_form_unless_the_envs_code_calls_it(env, then, limit):
    says = rf"^env\.id '{__name__}:{env}': TypeError: Older\.reset\(\) got an unexpected keyword argument '\w+'{then}"
    with pytest.raises(CoterieError, match=says), make(f"{__name__}:{env}", 1, max_episode_steps=limit) as envs:
        play(envs, 1)


def test_an_argument_that_is_missing_in_the_users_code_is_a_bug():
    told("unnamed", r"cannot be made: TypeError: .*missing 1 required positional argument: 'call' \(.*, in unnamed\)")


def test_a_reward_may_be_an_array_of_one_number():
    assert answers.number(np.array([2.5])) == answers.number(np.float32(2.5)) == 2.5
