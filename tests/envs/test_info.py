"""Which numbers in the info of envs count: those of each episode's last step, or of all steps."""

import numpy as np
import pytest

from tests.envs.env_harness import make, play

TELLING = "tests.support.telling:TellingEnv"


@pytest.mark.parametrize("groups", [1, 2])
def test_by_default_it_is_the_last_step_of_each_episode(groups):
    with make(TELLING, 4, threads=2, groups=groups) as envs:
        play(envs, 12)  # episodes of 5 steps, a restart, and 5 steps
        news = envs.news()
        assert not envs.news().info
    # Two episodes of each env: the first ends terminated, the second truncated.
    assert news.info == {"step": (40.0, 8), "deep/half": (20.0, 8), "success": (4.0, 8)}
    assert news.info.means("env/") == {"env/deep/half": 2.5, "env/step": 5.0, "env/success": 0.5}


def test_it_may_be_all_steps_or_none():
    with make(TELLING, 2, info="steps") as envs:
        play(envs, 8)  # rows 1 to 5, a restart, whose info does not count, and two more
        assert envs.news().info == {"step": (2 * (15.0 + 3), 14), "deep/half": (15.0 + 3, 14), "success": (2.0, 2)}
    with make(TELLING, 2, info="off") as envs:
        play(envs, 8)
        assert not envs.news().info


def test_with_action_repeat_it_is_the_last_of_the_repeated_steps():
    with make(TELLING, 2, action_repeat=2) as envs:
        play(envs, 4)
        assert envs.news().info == {"step": (10.0, 2), "deep/half": (5.0, 2), "success": (2.0, 2)}


def test_what_an_env_did_before_the_run_does_not_count():
    with make(TELLING, 4, decorrelate=4) as envs:
        first = play(envs, 6)
        whole = ~np.isnan(first.episode_length)
        assert envs.news().info.get("step", (0.0, 0))[1] == whole.sum()


def test_numbers_in_envpools_info_count_too():
    with make("HalfCheetah-v4", 2, max_episode_steps=5, info="steps") as envs:
        seen = play(envs, 5)
        total, count = envs.news().info["reward_run"]
    assert count == 10
    assert np.isfinite(total)
    assert seen.real.sum() == 10
    with make("Breakout-v5", 2, max_episode_steps=5) as envs:  # only what the other fields do not say
        play(envs, 7)
        assert set(envs.news().info) <= {"elapsed_step"}


@pytest.mark.parametrize("mode", ["NextStep", "Disabled", "SameStep"])
def test_numbers_in_the_info_of_a_vector_env_count_too(mode):
    success = 4.0 if mode == "NextStep" else 8.0  # elsewhere two resets for each episode: all numbers are even
    for which, wanted in (("episodes", (40.0, 8)), ("steps", (8 * 15.0, 40))):
        with make("tests.support.vectors:telling", 4, backend="vector", kwargs={"mode": mode}, info=which) as envs:
            play(envs, 12)  # episodes of 5 steps, a restart, 5 steps, and another restart
            assert envs.news().info == {"step": wanted, "success": (success, 8)}
