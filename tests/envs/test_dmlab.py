"""DeepMind Lab's levels, on a strict stand-in for its module (fake_lab): the real one was never at hand."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import coterie
from coterie import presets
from coterie.cli.main import main
from coterie.config import Atari, Env
from coterie.envs.dmlab import BUILD_PAGE, DMLab, LevelCache
from coterie.envs.make import make_rendered, make_spec
from coterie.types import ConfigError
from tests.envs.env_harness import make, pattern, play

LEVEL = "explore_goal_locations_small"
STEPS = 11  # env steps of a stand-in's episode: 42 frames, 4 at a time
# What IMPALA's nine actions set; the rest is 0.
NINE = [
    {"MOVE_BACK_FORWARD": 1},
    {"MOVE_BACK_FORWARD": -1},
    {"STRAFE_LEFT_RIGHT": -1},
    {"STRAFE_LEFT_RIGHT": 1},
    {"LOOK_LEFT_RIGHT_PIXELS_PER_FRAME": -20},
    {"LOOK_LEFT_RIGHT_PIXELS_PER_FRAME": 20},
    {"MOVE_BACK_FORWARD": 1, "LOOK_LEFT_RIGHT_PIXELS_PER_FRAME": -20},
    {"MOVE_BACK_FORWARD": 1, "LOOK_LEFT_RIGHT_PIXELS_PER_FRAME": 20},
    {"FIRE": 1},
]


@pytest.fixture(autouse=True)
def fake_lab(monkeypatch):
    """The stand-in, importable here and in worker processes, which import from where their parent does."""
    monkeypatch.syspath_prepend(Path(__file__).with_name("fake_lab"))
    monkeypatch.delitem(sys.modules, "deepmind_lab", raising=False)
    yield
    sys.modules.pop("deepmind_lab", None)


def told(frame):
    """(episode, frames played, num_steps), action and seed, read off a frame of the stand-in."""
    return frame[0, 0].tolist(), (frame[1, :7, 0].astype(int) - 128).tolist(), bytes(frame[2, :4, 0])


def test_nine_actions_reach_the_lab():
    env = DMLab(LEVEL)
    assert env.action_space == gymnasium.spaces.Discrete(9)
    names = [part["name"] for part in env.lab.action_spec()]
    env.reset(seed=0)
    for i, set_to in enumerate(NINE):
        _, reward, *_ = env.step(np.int64(i))
        action, num_steps = env.lab.log[-1]
        assert action.dtype == np.intc
        assert action.tolist() == [set_to.get(name, 0) for name in names]
        assert num_steps == 4
        assert reward == 4 * max(set_to.get("MOVE_BACK_FORWARD", 0), 0)
    assert len(env.lab.log) == 9


def test_what_the_lab_is_made_with():
    lab = DMLab(LEVEL, 120, 90, config={"datasetPath": "/data", "mixerSeed": 7}, renderer="hardware").lab
    assert lab.level == f"contributed/dmlab30/{LEVEL}"
    assert lab.config == {"width": "120", "height": "90", "datasetPath": "/data", "mixerSeed": "7"}
    assert (lab.renderer, lab.level_cache, lab.names) == ("hardware", None, ["RGB_INTERLEAVED"])
    assert DMLab(f"contributed/dmlab30/{LEVEL}").lab.level == f"contributed/dmlab30/{LEVEL}"
    assert DMLab("seekavoid_arena_01").lab.level == "seekavoid_arena_01"


def test_it_is_a_sound_gymnasium_environment():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that its spec has no id
        check_env(DMLab(LEVEL, action_repeat=2), skip_render_check=True)


def test_an_episode_ends_terminated_and_shows_its_last_frame_again():
    env = DMLab(LEVEL)
    frame, _ = env.reset(seed=3)
    assert (frame.shape, frame.dtype) == ((72, 96, 3), np.uint8)
    assert (frame[:, 50, 1] == np.arange(72)).all()
    for step in range(1, STEPS + 1):
        before = frame
        frame, reward, terminated, truncated, _ = env.step(0)
        assert (terminated, truncated) == (step == STEPS, False)
        if not terminated:
            assert told(frame)[0] == [0, 4 * step, 4]
    np.testing.assert_array_equal(frame, before)
    assert reward == 2  # of the two frames that were left
    np.testing.assert_array_equal(env.render(), frame)
    with pytest.raises(RuntimeError, match="wrong status"):
        env.step(0)
    frame, _ = env.reset()
    assert told(frame)[0] == [1, 0, 0]
    env.close()
    env.close()


def test_a_seed_restarts_the_same_series_of_episodes():
    def series(env, seed):
        return [told(env.reset(seed=s)[0]) for s in (seed, None, None)]

    env = DMLab(LEVEL)
    assert series(env, 5) == series(env, 5) == series(DMLab(LEVEL), 5)
    assert len({seed for *_, seed in series(env, 5) + series(env, 6)}) == 6
    assert [episode for (episode, _, _), *_ in series(env, 7)] == [0, 1, 2]
    assert series(DMLab(LEVEL), None) != series(DMLab(LEVEL), None)
    assert all(type(seed) is int for _, seed in env.lab.resets)


def test_levels_run_in_workers_each_env_with_a_seed_of_its_own():
    with make(f"dmlab/{LEVEL}", 4, groups=2, threads=2) as envs:
        assert envs.spec.obs[""].is_image
        assert envs.spec.action_repeat == 4
        assert "deepmind_lab" in sys.modules  # its spaces are found by making it once
        seen = play(envs, 2 * STEPS + 1)
        assert envs.replaced == 0
    assert pattern(seen, 0) == "F" + "." * (STEPS - 1) + "DF" + "." * (STEPS - 1) + "D"
    seeds = {told(seen.obs[t, env])[2] for t in (0, STEPS + 1) for env in range(4)}
    assert len(seeds) == 8
    for t in range(2 * STEPS + 1):
        for env in np.flatnonzero(~seen.is_first[t + 1]):
            named = NINE[seen.action[t, env]]
            frames = 2 if seen.terminated[t + 1, env] else 4
            assert seen.reward[t + 1, env] == frames * max(named.get("MOVE_BACK_FORWARD", 0), 0)
            if not seen.terminated[t + 1, env]:
                assert sorted(x for x in told(seen.obs[t + 1, env])[1] if x) == sorted(named.values())
    assert (seen.episode_length[seen.done] == STEPS).all()


def test_repeats_multiply_and_time_limits_truncate():
    env = Env(id="dmlab/seekavoid_arena_01", action_repeat=2, kwargs='{"action_repeat": 3}')
    assert make_spec(env, Atari()).action_repeat == 6
    assert make_spec(Env(id="CartPole-v1", backend="workers"), Atari()).action_repeat == 1
    with make("dmlab/seekavoid_arena_01", 1, max_episode_steps=3, kwargs={"width": 40, "height": 36}) as envs:
        assert envs.spec.obs[""].shape == (36, 40, 3)
        assert envs.spec.action_repeat == 4
        assert pattern(play(envs, 6), 0) == "F..TF.."


def test_an_instruction_is_given_where_asked_for():
    env = DMLab("language_execute_random_task", instruction=True)
    obs, _ = env.reset(seed=1)
    assert env.observation_space.contains(obs)
    assert obs["instruction"].startswith("Get the red hat")
    assert env.step(0)[0].keys() == {"image", "instruction"}
    spec = make_spec(Env(id="dmlab/language_execute_random_task", kwargs='{"instruction": true}'), Atari())
    assert spec.obs["instruction"].text
    assert spec.obs["image"].is_image


def test_one_frame_after_another_can_be_watched():
    envs, render = make_rendered(Env(id="dmlab/seekavoid_arena_01", num_envs=1), Atari(), seed=1)
    with envs:
        assert envs.spec.action_repeat == 4
        first = envs.recv(0).obs[0]
        np.testing.assert_array_equal(render(), first)
        envs.send(0, np.array([8]))
        np.testing.assert_array_equal(render(), envs.recv(0).obs[0])
        assert told(render())[1] == [0, 0, 0, 0, 1, 0, 0]


def test_maps_are_compiled_once_for_all_environments(tmp_path):
    folder = tmp_path / "maps" / "here"
    one, two = (DMLab("seekavoid_arena_01", level_cache=str(folder)) for _ in range(2))
    for env in (one, two):
        for seed in range(12):
            env.reset(seed=seed)
    assert one.lab.compiled == len(list(folder.iterdir())) == 3
    assert two.lab.compiled == 0


HAMMER = """
import sys
from pathlib import Path
from coterie.envs.dmlab import LevelCache
cache, mine, hits = LevelCache(sys.argv[1]), Path(sys.argv[2]), 0
for i in range(200):
    key = f"maze{i % 4}_noaas_00"
    whole = key.encode() * 50_000
    if cache.fetch(key, str(mine)):
        assert mine.read_bytes() == whole, "a map is torn"
        hits += 1
    mine.write_bytes(whole)
    cache.write(key, str(mine))
print(hits)
"""


def test_processes_share_a_cache(tmp_path):
    cache = tmp_path / "cache"
    command = [sys.executable, "-c", HAMMER, str(cache)]
    both = [subprocess.Popen([*command, str(tmp_path / x)], stdout=subprocess.PIPE, text=True) for x in "ab"]
    hits = [int(process.communicate(timeout=120)[0]) for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert min(hits) >= 196
    assert sorted(p.name for p in cache.iterdir()) == [f"maze{i}_noaas_00" for i in range(4)]  # nothing temporary


def test_a_map_that_cannot_be_kept_leaves_nothing_behind(tmp_path):
    cache, pk3 = LevelCache(str(tmp_path / "cache")), tmp_path / "maze.pk3"
    assert not cache.fetch("maze", str(pk3))
    pk3.write_bytes(b"a map")
    (cache.folder / "maze").mkdir()  # its name is taken
    with pytest.raises(IsADirectoryError):
        cache.write("maze", str(pk3))
    assert [p.name for p in cache.folder.iterdir()] == ["maze"]


def test_without_the_module_one_line_says_where_it_comes_from(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "deepmind_lab", None)
    args = ["train", "ppo", "--env", "dmlab/lt_chasm", "--out", str(tmp_path / "run")]
    with pytest.raises(ConfigError, match="no package registry has"):
        make_spec(Env(id="dmlab/lt_chasm"), Atari())
    assert main(args) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "env.id 'dmlab/lt_chasm' needs the module deepmind_lab" in line
    assert BUILD_PAGE in line


@pytest.mark.parametrize(
    ("level", "options", "says"),
    [
        ("nowhere", {}, "env.id 'dmlab/nowhere' cannot be made: RuntimeError: Invalid levelName"),
        (LEVEL, {"kwargs": {"colour": 1}}, "env.kwargs: .*'colour'"),
        (LEVEL, {"kwargs": {"action_repeat": 0}}, "env.kwargs: action_repeat must be at least 1"),
        (LEVEL, {"kwargs": {"instruction": True}}, "Unknown observation 'INSTR'"),
        (LEVEL, {"kwargs": {"renderer": "paper"}}, "Failed to set renderer"),
        (LEVEL, {"backend": "pool"}, "EnvPool has no such environment"),
        ("tests/custom_actions_test", {}, "its actions are .*SMILE; not those of the papers"),
    ],
)
def test_bad_settings_are_one_line_for_the_user(level, options, says):
    with pytest.raises(ConfigError, match=says) as caught:
        make(f"dmlab/{level}", **options)
    assert "\n" not in str(caught.value)


def train(tmp_path, preset, **changes):
    small = {"out": str(tmp_path / "run"), "env.num_envs": 4, "env.threads": 1, "log.tensorboard": False}
    size = {"width": 40, "height": 36, "level_cache": str(tmp_path / "maps")}
    made = presets.make(preset, f"dmlab/{LEVEL}", **{**small, "env.kwargs": json.dumps(size), **changes})
    summary = coterie.train(made, quiet=True)
    assert summary["status"] == "finished"
    return summary


def test_a_level_trains(tmp_path):
    one_pass = {"ppo.batch_size": 0, "ppo.minibatch_size": 32, "ppo.epochs": 2, "algo.unroll_length": 16}
    summary = train(tmp_path, "ppo", **one_pass, **{"steps": 384, "env.threads": 2, "env.decorrelate": 0})
    assert summary["env_steps"] >= 384 - 4 * STEPS
    assert summary["env_frames"] == 4 * summary["env_steps"]
    assert len(list((tmp_path / "maps").iterdir())) == 3


@pytest.mark.parametrize(("preset", "torso"), [("impala", "a3c"), ("impala-deep", "impala"), ("seed-vtrace", "impala")])
def test_presets_have_a_memory_that_sees_the_last_action_and_reward(preset, torso):
    config = presets.make(preset, env=f"dmlab/{LEVEL}")
    assert (config.model.torso, config.model.core, config.model.core_size) == (torso, "lstm", 256)
    assert config.model.last_action_reward
    assert (config.algo.unroll_length, config.reward.clip) == (100, "clamp")
    if preset != "seed-vtrace":
        assert (config.optim.rule, config.optim.lr, config.optim.eps) == ("rmsprop_tf", 4.8e-4, 0.1)
    assert presets.make(preset, env="Pong-v5").model.core == "none"


def test_a_level_trains_through_actors(tmp_path):
    actors = {"actors": 2, "decoupled.batch_size": 4}
    summary = train(tmp_path, "impala", **actors, **{"steps": 400, "algo.unroll_length": 10})
    assert summary["env_steps"] >= 400
