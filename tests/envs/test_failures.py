"""Envs that raise, give NaN, die or hang: one masked step, a fresh env, a counted reason; and a budget."""

import os
import re
import signal

import numpy as np
import pytest

from coterie import config
from coterie.envs.backend import StepResults
from coterie.envs.group import Envs
from coterie.envs.spaces import action_map, spaces
from coterie.types import CoterieError, ObsSpec, Spec
from tests.envs.env_harness import COUNTING, FLAKY, Player, make, pattern, play, worker_pids

REASONS = {
    "raise": "ValueError: flaky by design",
    "nan_reward": "reward is not finite",
    "nan_obs": "observation is not finite",
    "exit": r"its worker process died \(exit code 3\)",
    "kill": r"its worker process died \(killed by SIGKILL\)",
    "hang": r"no answer in env\.timeout 1\.5 s",
}


@pytest.mark.parametrize("how", REASONS)
def test_a_failure_costs_one_masked_step(how, tmp_path):
    kwargs = {"how": how, "at": 7, "length": 5, "marker": str(tmp_path / "once")}
    with make(FLAKY, 4, threads=2, timeout=1.5, kwargs=kwargs) as envs:
        seen = play(envs, 20)
        failures, replaced = envs.failures(), envs.replaced
    # A lost process takes its two envs along; the marker lets one fail only.
    assert replaced == len(failures) == (2 if how in ("exit", "kill", "hang") else 1)
    assert all(re.fullmatch(f"env [0-3]: .*{REASONS[how]}", reason) for reason in failures)
    expected = "F....DF....TF....DF.."  # 5 steps, one restart, and so on
    at = next(t for t in range(20) if any(pattern(seen, e)[t] != expected[t] for e in range(4)))
    hit = [e for e in range(4) if pattern(seen, e)[at] != expected[at]]
    assert len(hit) == replaced
    assert at == 8  # the 7th env step is the 8th row: one row is the restart's
    for env in range(4):
        if env not in hit:
            assert pattern(seen, env) == expected
            continue
        assert pattern(seen, env) == "F....DF.F....DF....TF"
        count, episode = seen.obs[:, env, 0], seen.obs[:, env, 1]
        assert episode[8:14].tolist() == [0] * 6  # a new env in its first episode
        assert (count[8:14] == count[8] + np.arange(6)).all()
        assert seen.reward[8, env] == 0
        np.testing.assert_array_equal(np.flatnonzero(~np.isnan(seen.episode_return[:, env])), [5, 13, 19])
        assert seen.episode_return[13, env] == seen.reward[9:14, env].sum()
    np.testing.assert_array_equal(seen.reward[1:][seen.real], (16 * seen.obs[:-1, :, 0] + seen.action)[seen.real])


def test_over_the_budget_the_run_fails_with_the_last_reason():
    envs = make(FLAKY, 2, replace_budget=3, kwargs={"how": "raise", "at": 2})
    with envs:
        workers = worker_pids(envs)
        with pytest.raises(
            CoterieError, match=r"^4 envs .* env\.replace_budget 3; the last: env 1: ValueError: flaky by"
        ):
            play(envs, 10)
    assert envs.replaced == 4
    assert not any(os.path.exists(f"/proc/{pid}") for pid in workers)


def test_a_worker_killed_from_outside_is_replaced():
    with make(COUNTING, 4, threads=2, kwargs={"length": 4}) as envs:
        player = Player(envs)
        player.rollout(6)
        for _ in range(2):
            os.kill(worker_pids(envs)[1], signal.SIGKILL)
            player.rollout(6)
        assert envs.replaced >= 4
        seen = player.rollout(12)
    assert not np.isnan(seen.obs).any()
    np.testing.assert_array_equal(seen.obs[1:, :, 0][seen.real], seen.obs[:-1, :, 0][seen.real] + 1)
    np.testing.assert_array_equal(seen.reward[1:][seen.real], (16 * seen.obs[:-1, :, 0] + seen.action)[seen.real])
    assert seen.done[4:].any()
    assert (seen.episode_length[4:][seen.done[4:]] == 4).all()


def test_a_replaced_env_has_another_seed_that_is_reproducible(tmp_path):
    def run(name):
        kwargs = {"how": "raise", "at": 3, "marker": str(tmp_path / name)}
        with make(FLAKY, 1, kwargs=kwargs) as envs:
            return play(envs, 4).obs[:, 0, 0]

    a, b = run("a"), run("b")
    np.testing.assert_array_equal(a, b)
    assert a[3] not in (a[0], a[2] + 1)


class Scripted:
    """A backend whose observations count each instance's requests, with NaNs where `bad` has them."""

    num_instances = 3
    action_map = action_map("scripted", spaces.Discrete(2))
    spec = Spec("scripted", {"": ObsSpec((1,), "float32")}, action_map.spec)

    def __init__(self, bad):
        self.bad, self.time, self.log = bad, -1, []
        self.count = np.zeros(3)

    def step(self, ids, actions):
        self.count[ids] += 1
        self.ids = ids.copy()
        self.time += 1

    def reset(self, ids):
        self.count[ids] = 100
        self.ids = ids.copy()
        self.log.append(("reset", ids.tolist()))

    def replace(self, ids, seeds):
        self.log.append(("replace", list(ids)))

    def recv(self):
        n = len(self.ids)
        obs, reward = self.count[self.ids, None].astype(np.float32), np.ones(n, np.float32)
        over = np.zeros(n, bool)
        for instance, what in self.bad.pop(self.time, {}).items():
            if what in ("reward", "over"):
                reward[self.ids == instance] = np.inf
                over[self.ids == instance] = what == "over"
            else:
                obs[self.ids == instance] = np.nan
        return StepResults(obs, reward, over, np.zeros(n, bool), over.copy())

    def close(self):
        pass


def test_numbers_that_are_not_finite_are_found_in_any_backend():
    backend = Scripted({1: {0: "reward"}, 3: {1: "obs", 2: "over"}})
    with Envs(lambda seeds: backend, config.Env(num_envs=3), seed=0) as envs:
        backend.log.clear()
        rows = [envs.recv(0)]
        for _ in range(6):
            envs.send(0, np.zeros(3, np.int64))
            rows.append(envs.recv(0))
        first = np.stack([r.is_first for r in rows[1:]])
        reward = np.stack([r.reward for r in rows[1:]])
        obs = np.stack([r.obs[:, 0] for r in rows[1:]])
    np.testing.assert_array_equal(np.argwhere(first), [[1, 0], [3, 1], [3, 2]])
    np.testing.assert_array_equal(reward, ~first)
    np.testing.assert_array_equal(obs[first], 100)
    assert not any(r.terminated.any() for r in rows)
    assert backend.log == [("replace", [0]), ("reset", [0]), ("replace", [1, 2]), ("reset", [1, 2])]
    assert envs.failures() == [
        "env 0: reward is not finite",
        "env 1: observation is not finite",
        "env 2: reward is not finite",
    ]
