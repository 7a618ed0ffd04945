"""Football: EnvPool's own scenarios, and the package's through `Football` (on a stand-in, and on the real one)."""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from coterie import presets
from coterie.envs import pool
from coterie.envs.football import SIZES, Football
from coterie.envs.make import make_spec
from coterie.types import ConfigError
from tests.envs.env_harness import make, play

FOOTBALL = "coterie.envs.football:Football"
EASY = "gfootball/academy_empty_goal_close-v1"
needs_package = pytest.mark.skipif(
    importlib.util.find_spec("gfootball") is None,
    reason="the package gfootball is not installed: it is built from source, docs/conventions.md",
)


@pytest.mark.skipif(not pool.has_env(EASY), reason="this EnvPool has no football")
def test_envpool_plays_football():
    with make(EASY, 4, groups=2) as envs:
        assert (envs.spec.obs[""].shape, envs.spec.obs[""].dtype) == ((72, 96, 4), "uint8")
        assert envs.spec.obs[""].is_image
        assert (envs.spec.action.sizes, envs.spec.action_repeat, envs.spec.max_episode_steps) == ((19,), 1, 400)
        seen = play(envs, 250)
    assert set(np.unique(seen.obs)) == {0, 255}
    assert ((seen.obs[..., 2:] > 0).sum((2, 3)) == 1).all()  # one ball, one active player
    assert seen.terminated.any()
    assert set(np.unique(seen.reward)) <= {0.0, 1.0}  # nobody is there to score against
    np.testing.assert_array_equal(seen.is_first[1:], seen.done[:-1])


class StandIn:
    """The calls of a gfootball environment: an episode of three steps, the game's end or the clock's by turns."""

    def __init__(self, scenario, stacked, rewards, representation, channel_dimensions):
        assert (scenario, rewards, representation) == ("made_up", "scoring,checkpoints", "extracted")
        width, height = channel_dimensions
        self.shape = (height, width, 16 if stacked else 4)
        self.action_space, self._config, self.unwrapped = SimpleNamespace(n=19), {}, self
        self.episode = self.t = 0

    def reset(self):
        self.episode, self.t = self.episode + 1, 0
        return np.full(self.shape, self._config["game_engine_random_seed"] % 256, np.uint8)

    def step(self, action):
        self.t += 1
        return np.zeros(self.shape, np.uint8), np.float32(0.1 * action), self.t == 3, {}

    def observation(self):
        return [{"steps_left": 3 - self.t if self.episode % 2 else 7}]

    def close(self):
        pass


@pytest.fixture
def package(monkeypatch):
    scenarios = SimpleNamespace(all_scenarios=lambda: ["made_up"])
    monkeypatch.setitem(sys.modules, "gym", gym := SimpleNamespace(__version__="0.25.2"))
    monkeypatch.setitem(sys.modules, "gfootball.env", SimpleNamespace(create_environment=StandIn))
    monkeypatch.setitem(sys.modules, "gfootball.env.scenario_builder", scenarios)
    return gym


def test_episodes_are_seeded_and_the_clock_truncates(package):
    def episodes(seed):
        env, firsts, ends = Football("made_up", "scoring,checkpoints", "large"), [], []
        for i in range(2):
            obs, _ = env.reset(seed=seed if i == 0 else None)
            assert env.observation_space.contains(obs)
            assert obs.shape == (108, 144, 16)
            steps = [env.step(np.int64(2)) for _ in range(3)]
            assert [round(step[1], 4) for step in steps] == [0.2] * 3
            assert not any(step[2] or step[3] for step in steps[:2])
            firsts.append(obs[0, 0, 0])
            ends.append(steps[2][2:4])
        return firsts, ends

    assert episodes(1) == episodes(1)
    assert episodes(1)[0] != episodes(2)[0]
    assert len(set(episodes(1)[0])) == 2
    assert episodes(1)[1] == [(False, True), (True, False)]


def test_the_preset_follows_the_reward(package):
    kwargs = '{"scenario": "made_up", "rewards": "scoring,checkpoints"}'
    config = presets.make("seed-football", FOOTBALL, **{"env.kwargs": kwargs})
    assert (config.optim.lr, config.algo.entropy_coef, config.algo.gae_lambda) == (1.2542e-4, 7.3309e-4, 1.0)
    assert make_spec(config.env, config.atari).obs[""].shape == (72, 96, 16)


def test_what_cannot_work_is_one_line(package, monkeypatch):
    for kwargs, says in (
        ({"rewards": "checkpoints"}, "rewards is 'scoring' or 'scoring,checkpoints'"),
        ({"size": "huge"}, "size is one of default, medium, large"),
        ({"scenario": "12_vs_11"}, "no scenario '12_vs_11'"),
    ):
        with pytest.raises(ConfigError, match=rf"^env\.kwargs: .*{says}"):
            Football(**kwargs)
    package.__version__ = "0.26.2"
    with pytest.raises(ConfigError, match="pip install 'gym<0"):
        Football()
    monkeypatch.setitem(sys.modules, "gfootball.env", None)
    with pytest.raises(ConfigError, match="needs the package gfootball"):
        Football()


@needs_package
@pytest.mark.parametrize("size", SIZES)
def test_the_real_package_stacks_maps_of_every_size(size):
    kwargs = {"scenario": "academy_empty_goal_close", "size": size, "rewards": "scoring,checkpoints"}
    with make(FOOTBALL, 2, kwargs=kwargs) as envs:
        width, height = SIZES[size]
        assert envs.spec.obs[""].shape == (height, width, 16)
        assert envs.spec.action.sizes == (19,)
        seen = play(envs, 150)
    moved = ~seen.is_first[1:]
    np.testing.assert_array_equal(seen.obs[1:, ..., :12][moved], seen.obs[:-1, ..., 4:][moved])  # the newest is last
    assert ((seen.obs[..., 2:4] > 0).sum((2, 3)) == 1).all()
    assert seen.terminated.any()
    returns = seen.episode_return[~np.isnan(seen.episode_return)]
    assert ((returns > -1e-3) & (returns < 2 + 1e-3)).all()  # a goal, and ten checkpoints of 0.1
    np.testing.assert_allclose(returns * 10, np.round(returns * 10), atol=1e-3)


@needs_package
def test_the_real_package_plays_the_same_game_for_the_same_seed():
    def game(seed):
        env, rng, seen = Football("academy_empty_goal", stacked=False), np.random.default_rng(0), []
        obs, _ = env.reset(seed=seed)
        for _ in range(60):
            seen.append(obs.copy())
            obs, _, terminated, truncated, _ = env.step(rng.integers(19))
            if terminated or truncated:
                obs, _ = env.reset()
        env.close()
        return np.stack(seen)

    first = game(3)
    np.testing.assert_array_equal(first, game(3))
    assert (first != game(4)).any()
