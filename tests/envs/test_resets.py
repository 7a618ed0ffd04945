"""Reset modes: what a finished env shows until the rollout ends, and that slow resets do not stop the rollout."""

import time

import numpy as np
import pytest

from tests.envs.env_harness import COUNTING, Player, make, pattern

SLOW = 0.8


def timed(player, steps):
    begin = time.perf_counter()
    rows = []
    for _ in range(steps):
        player.step()
        rows.append(player.now)
    played = time.perf_counter() - begin
    player.envs.end_rollout()
    ended = time.perf_counter() - begin - played
    player.now = [player.envs.begin_rollout(g) for g in player.groups]
    return played, ended, time.perf_counter() - begin - played - ended


@pytest.mark.parametrize("reset", ["in_place", "wait", "swap"])
def test_slow_resets_run_while_the_learner_trains(reset):
    kwargs = {"length": 3, "slow_reset": SLOW}
    with make(COUNTING, 2, threads=2, reset=reset, reserve=2, kwargs=kwargs) as envs:
        played, ended, begun = timed(Player(envs), 5)
    if reset == "in_place":
        assert played > SLOW
        assert begun < SLOW / 2
    else:
        assert played < SLOW / 2
        assert ended < SLOW / 2
        assert begun > SLOW / 2


def test_wait_masks_a_finished_env_until_the_rollout_ends():
    with make(COUNTING, 4, groups=2, threads=2, reset="wait", kwargs={"length": 3}) as envs:
        player = Player(envs)
        for episode in range(3):
            seen = player.rollout(6)
            letter = "DTD"[episode]
            for env in range(4):
                assert pattern(seen, env) == f"F..{letter}FFF"
                assert (seen.obs[:4, env, 0] == seen.obs[0, env, 0] + np.arange(4)).all()
                assert (seen.obs[3:, env] == seen.obs[3, env]).all()
                assert seen.obs[0, env, 1] == episode
                assert not seen.reward[4:, env].any()
                assert np.flatnonzero(~np.isnan(seen.episode_return[:, env])).tolist() == [3]
            np.testing.assert_allclose(seen.reward[1:4], 16 * seen.obs[:3, :, 0] + seen.action[:3])


def test_an_env_that_finishes_with_the_last_step_begins_the_next_rollout_afresh():
    with make(COUNTING, 2, reset="wait", kwargs={"length": 3}) as envs:
        player = Player(envs)
        assert pattern(player.rollout(3), 0) == "F..D"
        seen = player.rollout(2)
        assert pattern(seen, 0) == "F.."
        assert (seen.obs[:, :, 1] == 1).all()
        assert np.isnan(seen.episode_return[0]).all()
        assert not seen.terminated[0].any()


def test_swap_takes_fresh_instances_and_then_waits():
    with make(COUNTING, 2, threads=2, reset="swap", reserve=1, kwargs={"length": 3}) as envs:
        player = Player(envs)
        seen = player.rollout(7)
        # The reserve holds one: slot 0 goes on after one masked step, slot 1 waits for the end.
        assert pattern(seen, 0) == "F..DF..D"
        assert pattern(seen, 1) == "F..DFFFF"
        count, episode = seen.obs[..., 0], seen.obs[..., 1]
        assert episode[4, 0] == 0  # another instance in its first episode
        assert (count[4:8, 0] == count[4, 0] + np.arange(4)).all()
        real = ~seen.is_first[1:]
        np.testing.assert_allclose(seen.reward[1:][real], (16 * count[:-1] + seen.action)[real])
        after = player.rollout(7)
        # Slot 0 finished with the last step and is reset, as are slot 1 and the instance swapped out.
        assert pattern(after, 0) == "F..TF..T"
        assert pattern(after, 1) == "F..TFFFF"
        assert (after.obs[0, :, 1] == 1).all()
        assert after.obs[4, 0, 1] == 1  # the one swapped out before is back
        assert envs.replaced == 0


@pytest.mark.parametrize("reset", ["wait", "swap"])
def test_envpool_holds_resets_back_too(reset):
    with make("CartPole-v1", 4, groups=2, reset=reset, reserve=4, max_episode_steps=5) as envs:
        player = Player(envs)
        for _ in range(3):
            seen = player.rollout(11)
            fresh = np.abs(seen.obs).max(-1) <= 0.05  # CartPole starts within 0.05
            for env in range(4):
                assert pattern(seen, env) == ("F....TFFFFFF" if reset == "wait" else "F....TF....T")
                assert fresh[0, env]
                assert fresh[6, env] == (reset == "swap")
            real = ~seen.is_first[1:]
            moved = seen.obs[:-1, :, 0] + 0.02 * seen.obs[:-1, :, 1]
            np.testing.assert_allclose(seen.obs[1:, :, 0][real], moved[real], atol=1e-6)
            assert (seen.episode_length[5] == 5).all()
