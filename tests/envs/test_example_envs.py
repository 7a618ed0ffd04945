"""examples/envs: DeepMind Lab and gfootball's own package, each on a stand-in with the calls that it documents; and
the examples of action masks and networks.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import coterie
from coterie import presets
from coterie.config import Atari, Env
from coterie.envs.make import make_spec
from coterie.errors import ConfigError
from tests.envs.env_harness import make, pattern, play

FOLDER = Path(__file__).parents[2] / "examples" / "envs"
LEVEL = "explore_goal_locations_small"
STEPS = 11  # env steps of the stand-in's episode: 42 frames, 4 at a time
# As docs/users/python_api.md of the lab has it. A frame shows what the lab received: row 0 the frames played, row 1 the
# action plus 128, row 2 the seed. A frame of forward movement pays a point.
LAB = """
import numpy as np

NAMES = ["LOOK_LEFT_RIGHT_PIXELS_PER_FRAME", "LOOK_DOWN_UP_PIXELS_PER_FRAME", "STRAFE_LEFT_RIGHT",
         "MOVE_BACK_FORWARD", "FIRE", "JUMP", "CROUCH"]

class Lab:
    def __init__(self, level, observations, config=None, renderer="software", level_cache=None):
        assert level.startswith("contributed/dmlab30/") or level == "seekavoid_arena_01", "Invalid levelName"
        assert observations in (["RGB_INTERLEAVED"], ["RGB_INTERLEAVED", "INSTR"])
        assert all(type(x) is str for pair in config.items() for x in pair)
        self.size, self.cache, self.compiled = (int(config["height"]), int(config["width"]), 3), level_cache, 0
    def action_spec(self):
        return [{"name": name, "min": -512, "max": 512} for name in NAMES]
    def reset(self, episode=-1, seed=None):
        assert type(seed) is int and 0 <= seed < 2**31 and type(episode) is int
        self.seed, self.played, self.action = seed, 0, np.zeros(7, np.intc)
        if self.cache is not None and not self.cache.fetch(f"maze{seed % 3}", "/dev/null"):
            self.compiled += 1
            self.cache.write(f"maze{seed % 3}", __file__)
    def step(self, action, num_steps):
        assert self.is_running() and action.dtype == np.intc and action.shape == (7,) and type(num_steps) is int
        frames, self.action = min(num_steps, 42 - self.played), action
        self.played += frames
        return float(frames * max(action[3], 0))
    def is_running(self):
        return self.played < 42
    def observations(self):
        assert self.is_running(), "Environment in wrong status"
        frame = np.zeros(self.size, np.uint8)
        frame[0, 0, 0], frame[1, :7, 0], frame[2, :4, 0] = self.played, self.action + 128, list(self.seed.to_bytes(4))
        return {"RGB_INTERLEAVED": frame, "INSTR": "Get the red hat."}
    def close(self):
        pass
"""


@pytest.fixture
def examples(monkeypatch, tmp_path):
    """The examples and the stand-in lab, importable here and in worker processes."""
    (tmp_path / "deepmind_lab.py").write_text(LAB)
    for path in (tmp_path, FOLDER):
        monkeypatch.syspath_prepend(path)
    yield
    for name in ("dmlab", "football", "deepmind_lab"):
        sys.modules.pop(name, None)


def test_a_lab_level_takes_nine_actions_and_ends_terminated(examples):
    with make(f"dmlab/{LEVEL}", 4, groups=2, threads=2) as envs:
        spec = envs.spec
        seen = play(envs, 2 * STEPS + 1)
    assert (spec.obs[""].shape, spec.action.sizes, spec.action_repeat) == ((72, 96, 3), (9,), 4)
    assert pattern(seen, 0) == "F" + "." * (STEPS - 1) + "DF" + "." * (STEPS - 1) + "D"
    ends = seen.terminated[1:]
    np.testing.assert_array_equal(seen.obs[1:][ends], seen.obs[:-1][ends])  # the lab shows no frame after the end
    assert len({tuple(seen.obs[t, env, 2, :4, 0]) for t in (0, STEPS + 1) for env in range(4)}) == 8
    # Forward, back, strafe left and right, look left and right, both of them while moving forward, fire.
    look, strafe = [0, 0, 0, 0, -20, 20, -20, 20, 0], [0, 0, -1, 1, 0, 0, 0, 0, 0]
    move, fire = [1, -1, 0, 0, 0, 0, 1, 1, 0], [0, 0, 0, 0, 0, 0, 0, 0, 1]
    sent = np.array([look, [0] * 9, strafe, move, fire]).T[seen.action]
    real = seen.real & ~ends
    np.testing.assert_array_equal(seen.obs[1:][real][:, 1, :5, 0].astype(int) - 128, sent[real])
    paid = np.where(ends, 2, 4) * np.maximum(sent[..., 3], 0)
    np.testing.assert_array_equal(seen.reward[1:][seen.real], paid[seen.real])


def test_lab_levels_may_have_instructions_and_share_compiled_maps(examples, tmp_path):
    env = Env(id="dmlab/seekavoid_arena_01", kwargs='{"instruction": true}')
    assert make_spec(env, Atari()).obs["instruction"].text
    from dmlab import DMLab  # type: ignore[import-not-found]

    both = [DMLab("seekavoid_arena_01", level_cache=str(tmp_path / "maps" / "here")) for _ in range(2)]
    for lab in both:
        for seed in range(12):
            lab.reset(seed=seed)
    assert [lab.lab.compiled for lab in both] == [3, 0]
    assert len(list((tmp_path / "maps" / "here").iterdir())) == 3  # no temporary file


def test_presets_for_lab_levels_have_a_memory(examples):
    for preset, torso in (("impala", "a3c"), ("impala-deep", "impala"), ("seed-vtrace", "impala")):
        config = presets.make(preset, env=f"dmlab/{LEVEL}")
        assert (config.model.torso, config.model.core, config.model.core_size) == (torso, "lstm", 256)
        assert (config.model.last_action_reward, config.algo.unroll_length, config.reward.clip) == (True, 100, "clamp")


def test_a_lab_level_without_the_example_is_refused_with_its_place():
    with pytest.raises(ConfigError, match=r"^env\.id: .*'dmlab'.*put the repository's examples/envs"):
        make_spec(Env(id="dmlab/nowhere"), Atari())


class Scenario:
    """The calls of a gfootball environment: three steps, ended by the match or by its clock in turns."""

    def __init__(self, scenario, stacked, rewards, representation, channel_dimensions):
        self.shape = (*channel_dimensions[::-1], 16 if stacked else 4)
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


def test_football_is_seeded_and_its_clock_truncates(examples, monkeypatch):
    scenarios = SimpleNamespace(all_scenarios=lambda: ["made_up"])
    monkeypatch.setitem(sys.modules, "gym", SimpleNamespace(__version__="0.25.2"))
    monkeypatch.setitem(sys.modules, "gfootball.env", SimpleNamespace(create_environment=Scenario))
    monkeypatch.setitem(sys.modules, "gfootball.env.scenario_builder", scenarios)
    from football import Football  # type: ignore[import-not-found]

    def episodes(seed):
        env, firsts, ends = Football("made_up", "scoring,checkpoints", "large"), [], []
        for i in range(2):
            obs, _ = env.reset(seed=seed if i == 0 else None)
            assert env.observation_space.contains(obs)
            *_, (_, reward, terminated, truncated, _) = [env.step(np.int64(2)) for _ in range(3)]
            firsts.append(int(obs[0, 0, 0]))
            ends.append((round(reward, 4), terminated, truncated))
        return firsts, ends

    assert episodes(1) == episodes(1)
    assert episodes(1)[0] != episodes(2)[0]
    assert episodes(1)[1] == [(0.2, False, True), (0.2, True, False)]
    with pytest.raises(ConfigError, match=r"^env\.kwargs: .*no scenario '12_vs_11'"):
        Football("12_vs_11")


@pytest.mark.parametrize(("preset", "angle"), [("ppo", True), ("dqn", False)])
def test_the_cannon_fires_only_shells_that_are_left(preset, angle, monkeypatch, tmp_path):
    """It raises otherwise."""
    monkeypatch.syspath_prepend(str(FOLDER.parent))
    small = {"env.num_envs": 4, "q.learn_start": 200, "ppo.batch_size": 0, "ppo.minibatch_size": 32}
    kwargs = {"env.kwargs": {"angle": angle}, "algo.unroll_length": 8, "out": tmp_path / "run", **small}
    summary = coterie.train(getattr(presets, preset)(env="action_masks:Cannon", steps=600, **kwargs), quiet=True)
    assert summary["status"] == "finished"
    assert 0 < summary["mean_return"] < 6


@pytest.mark.parametrize("script", ["networks", "pqn"])
def test_the_scripts_train(script, monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(str(FOLDER.parent))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [script, "3000"])
    runpy.run_path(str(FOLDER.parent / f"{script}.py"), run_name="__main__")
    assert float(capsys.readouterr().out.rpartition("mean return ")[2]) > 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "options", "at_least"),
    [
        ("ppo", {"model.network": "networks:Simba"}, 150),
        ("ppo", {"model.core": "networks:MinGRU", "model.core_size": 64}, 60),
        ("dqn", {"model.network": "networks:Simba"}, 60),
    ],
)
def test_the_example_networks_learn(preset, options, at_least, monkeypatch, tmp_path):
    """A random policy has a mean return of 20."""
    monkeypatch.syspath_prepend(str(FOLDER.parent))
    normalize = {} if preset == "dqn" else {"reward.normalize": True}
    config = getattr(presets, preset)("CartPole-v1", steps=30_000, out=tmp_path / "run", **normalize, **options)
    assert coterie.train(config, quiet=True)["mean_return"] > at_least
