"""The test environments do what they say."""

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from coterie.envs.testing import Catch, CountingEnv, FlakyEnv
from tests.envs.env_harness import CATCH, make, play


@pytest.mark.parametrize("make_env", [CountingEnv, lambda: CountingEnv(obs="image"), Catch, lambda: Catch(image=True)])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_gymnasium_finds_no_fault(make_env):
    check_env(make_env(), skip_render_check=True)


@pytest.mark.parametrize("blank", [False, True])
def test_catch_is_won_by_following_what_was_seen_first(blank):
    env = Catch(blank=blank)
    returns, informed = [], []
    for seed in range(30):
        obs, _ = env.reset(seed=seed)
        assert obs.sum() == 2
        ball, paddle, done, steps = int(obs[:5].argmax()), 2, False, 0
        informed.append(abs(ball - 2) <= 1)
        while not done:
            move = int(np.sign(ball - paddle))
            paddle += move
            obs, reward, done, _, _ = env.step(move + 1)
            steps += 1
            assert obs.sum() == (0 if blank else 1 if done else 2)
        assert steps == 9
        returns.append(reward)
    assert returns == [1.0] * 30
    assert 0 < sum(informed) < 30  # some balls cannot be reached by the one step that sees them


def test_catch_trains_through_workers():
    with make(CATCH, 8, threads=2, kwargs={"image": True}) as envs:
        seen = play(envs, 30)
        assert envs.spec.obs[""].is_image
    assert set(seen.episode_return[~np.isnan(seen.episode_return)]) == {-1.0, 1.0}
    assert (seen.episode_length[seen.done] == 9).all()


def test_flaky_fails_with_the_given_probability():
    failed = 0
    for seed in range(200):
        env = FlakyEnv("raise", probability=0.3)
        env.reset(seed=seed)
        try:
            env.step(0)
        except ValueError:
            failed += 1
    assert 35 < failed < 85
