"""Action repeat: rewards add up, an end cuts it short, the fake step of a restart is made once."""

from __future__ import annotations

import numpy as np
import pytest

from coterie.config import Atari, Env
from coterie.envs.make import make_envs, make_spec


@pytest.mark.parametrize("backend", ["pool", "workers"])
def test_a_repeated_step_is_the_same_as_several(backend):
    """CartPole pays a point for each of its own steps: the return is their number, the env steps are a third."""
    env = Env(id="CartPole-v1", num_envs=3, backend=backend, action_repeat=3)
    assert make_spec(env, Atari()).action_repeat == 3
    rng, ends = np.random.default_rng(0), 0
    with make_envs(env, Atari(), seed=0, threads=1) as envs:
        ts = envs.recv(0)
        first_obs = ts.obs.copy()
        assert (np.abs(first_obs) <= 0.05).all()
        score, length = np.zeros(3), np.zeros(3)
        done = np.zeros(3, bool)
        for _ in range(120):
            envs.send(0, rng.integers(0, 2, 3))
            ts = envs.recv(0)
            assert (ts.is_first == done).all()
            assert (np.abs(ts.obs[ts.is_first]) <= 0.05).all(), "a restart shows a first observation"
            assert (ts.reward[ts.is_first] == 0).all()
            score += ts.reward
            length += ~ts.is_first
            going = ~ts.is_first & ~ts.terminated
            assert (ts.reward[going] == 3).all()
            assert ((ts.reward[ts.terminated] >= 1) & (ts.reward[ts.terminated] <= 3)).all()
            for i in np.flatnonzero(ts.terminated):
                assert ts.episode_return[i] == score[i]
                assert ts.episode_length[i] == length[i] == np.ceil(score[i] / 3)
                score[i] = length[i] = 0
                ends += 1
            done = ts.terminated | ts.truncated
    assert ends > 10
