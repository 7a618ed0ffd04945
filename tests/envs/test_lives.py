"""Lost lives of Atari: episodes for training, but no restart of the game."""

from __future__ import annotations

import numpy as np
import torch
from gymnasium import spaces

from coterie import config
from coterie.envs.backend import Backend, StepResults, declare
from coterie.envs.events import EnvEvents
from coterie.envs.group import Group
from coterie.envs.news import Reports
from tests.envs.env_harness import check_returns, make, play

ATARI = config.Atari(noop_max=1, episodic_life=True, height=36, width=36, stack=2)


def test_a_lost_life_ends_the_episode_but_not_the_game():
    def run(training):
        with make("Breakout-v5", 2, atari=ATARI, training=training) as envs:
            return play(envs, 500)

    lives, whole = run(True), run(False)
    for seen in (lives, whole):
        assert np.isfinite(seen.episode_return).any()
        check_returns(seen)
    ends = np.isfinite(lives.episode_return)
    assert (lives.done & ~ends).sum() >= 4 * ends.sum()  # five lives
    np.testing.assert_array_equal(np.isfinite(whole.episode_return), whole.done)


def test_a_lost_life_costs_one_no_op_and_no_reset():
    """Where an episode of a lost life begins, the game goes on: its frames follow each other, no FIRE is pressed."""
    life = config.Atari(noop_max=30, episodic_life=True, stack=2)
    with make("Breakout-v5", 2, atari=life) as envs:
        seen = play(envs, 400)
    lost = seen.done & ~np.isfinite(seen.episode_return)
    assert lost.sum() >= 4
    for t, env in np.argwhere(lost[:-1]):
        assert seen.is_first[t + 1, env]
        np.testing.assert_array_equal(seen.obs[t + 1, env, 0], seen.obs[t, env, 1])


class Script(Backend):
    """One env whose steps end as the letters say: L a life, T the game by a time limit, . neither."""

    partial = True

    def __init__(self, letters):
        super().__init__(declare("Script", spaces.Box(-1, 1, (4,)), spaces.Discrete(2)), 1)
        self.letters = iter("." + letters)

    def step(self, ids, actions):
        pass

    def reset(self, ids):
        pass

    def recv(self):
        letter, flag = next(self.letters), np.zeros(1, bool)
        over, late = flag | (letter == "L"), flag | (letter == "T")
        info = {"told": torch.ones(1, 1), "wide": np.ones(7), "all": 2.0}
        return StepResults(np.zeros((1, 4), np.float32), np.ones(1, np.float32), over, late, late.copy(), info)


def test_a_time_limit_can_fall_on_the_no_op_after_a_lost_life():
    """The no-op's flags are not seen, the game's return is reported, and its restart is no step of an episode."""
    reports = Reports(config.Env())
    group = Group(Script("..LT.."), np.arange(1), 0, False, reports, EnvEvents())
    list(group.start(0))
    seen = [group.recv()]
    for _ in range(6):
        group.send(np.zeros(1, np.int64))
        seen.append(group.recv())
    assert [bool(x.is_first[0]) for x in seen] == [True, False, False, False, True, True, False]
    assert [bool(x.terminated[0] or x.truncated[0]) for x in seen] == [False, False, False, True, False, False, False]
    assert [x.episode_length[0] for x in seen if np.isfinite(x.episode_return[0])] == [3]
    assert reports.take().info == {"told": (1.0, 1), "all": (2.0, 1)}  # no "wide"
