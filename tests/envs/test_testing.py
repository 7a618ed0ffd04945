"""The test environments do what they say."""

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from coterie.envs.testing import Catch, CountingEnv, Cue


@pytest.mark.parametrize(
    "make_env", [CountingEnv, lambda: CountingEnv(obs="image"), Catch, lambda: Catch(image=True), Cue]
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_gymnasium_finds_no_fault_in_a_test_env(make_env):
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


def test_the_cue_is_all_that_tells_what_is_right():
    env, seen, paid = Cue(cues=3, delay=4), set(), []
    obs, _ = env.reset(seed=0)
    for _ in range(60):
        cue = int(obs[:3].argmax())
        assert obs.tolist() == [float(i == cue) for i in range(3)] + [0.0]
        between, reward, done = [], 0.0, False
        while not done:
            obs, reward, done, _, _ = env.step(cue)
            between.append(tuple(obs))
            assert done or reward == 0
        seen.add(tuple(between[:4]))  # what is seen before the choice
        paid.append(reward)
        assert len(between) == 5
        obs, _ = env.reset()
        for _ in range(5):
            wrong = env.step((env.cue + 1) % 3)
        assert wrong[1:3] == (-1.0, True)
        obs, _ = env.reset()
    assert paid == [1.0] * 60
    assert seen == {((0, 0, 0, 0),) * 3 + ((0, 0, 0, 1),)}
