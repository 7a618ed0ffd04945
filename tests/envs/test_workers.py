"""Conformance of envs in worker processes, by CountingEnv's arithmetic; seeding, decorrelation, limits, actions."""

import subprocess
import sys

import numpy as np
import pytest

from coterie.types import ConfigError, CoterieError
from tests.envs.env_harness import COUNTING, Player, check_counting, make, pattern, play


@pytest.mark.parametrize(("groups", "threads", "kind"), [(1, 1, "vector"), (1, 3, "image"), (2, 2, "dict")])
def test_rewards_flags_and_observations_line_up(groups, threads, kind):
    with make(COUNTING, groups=groups, threads=threads, kwargs={"length": 4, "obs": kind}) as envs:
        assert [len(range(*cols.indices(4))) for cols in envs.groups] == [4 // groups] * groups
        player = Player(envs)
        seen = player.rollout(17)
        vector = seen.obs
        if kind == "dict":
            assert set(envs.spec.obs) == {"inner.vector", "image"}
            vector = seen.obs["inner.vector"]
            assert (seen.obs["image"][..., 0, 3, 3] == vector[..., 0] % 256).all()
        if kind == "image":
            assert envs.spec.obs[""].is_image
            image = seen.obs.astype(int)
            start = image[0, :, 0, 3, 3]
            assert ((image[1:5, :, 0, 3, 3] - start) % 256 == np.arange(1, 5)[:, None]).all()
            assert pattern(seen, 0) == "F...DF...TF...DF.."
            return
        check_counting(seen, vector, seen.action, length=4)
        assert seen.is_first[0].all()
        np.testing.assert_array_equal(seen.env_id, np.tile(np.arange(4), (18, 1)))
        # The next rollout begins with the row where this one ended.
        again = player.rollout(3)
        np.testing.assert_array_equal(again.is_first[0], seen.is_first[-1])
        joined = again.obs["inner.vector"] if kind == "dict" else again.obs
        np.testing.assert_array_equal(joined[0], vector[-1])
        assert envs.replaced == 0


def test_workers_load_no_torch():
    code = "import sys, coterie.envs.worker_main, coterie.envs.make; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "coterie.envs.worker_main" in loaded
    assert "torch" not in loaded


def test_continuous_actions_are_clipped_and_stretched_to_the_bounds():
    with make(COUNTING, 2, kwargs={"length": 4, "continuous": True}) as envs:
        action = envs.spec.action
        assert (action.kind, action.low, action.high) == ("continuous", (-2.0, -2.0), (6.0, 6.0))
        count = envs.recv(0).obs[:, 0]
        envs.send(0, np.array([[-1.0, 0.5], [3.0, -7.0]], np.float32))
        reward = envs.recv(0).reward
        np.testing.assert_allclose(reward - 16 * count, [-2 + 4, 6 - 2])


def test_seeds_depend_on_the_run_and_the_global_id_only():
    def start(**options):
        with make(COUNTING, options.pop("n", 4), kwargs={"length": 3}, **options) as envs:
            return play(envs, 9).obs[..., 0]

    base = start()
    np.testing.assert_array_equal(base, start(groups=2, threads=2))
    np.testing.assert_array_equal(base[:, 2:], start(n=2, first_env_id=2))
    assert len(set(base[0])) == 4
    assert (base[0] != start(seed=2)[0]).all()


def test_decorrelation_takes_seeded_random_steps_that_do_not_count():
    def first(decorrelate, **options):
        with make(COUNTING, 16, kwargs={"length": 40}, decorrelate=decorrelate, **options) as envs:
            return envs.recv(0)

    plain, a, b = first(0), first(20), first(20, threads=2)
    taken = a.obs[:, 0] - plain.obs[:, 0]
    np.testing.assert_array_equal(a.obs, b.obs)
    assert (taken >= 0).all()
    assert (taken <= 20).all()
    assert len(set(taken)) > 6
    assert a.is_first.all()
    assert not a.reward.any()
    assert np.isnan(a.episode_return).all()


def test_the_episode_begun_by_decorrelation_is_not_reported():
    with make(COUNTING, 8, kwargs={"length": 5}, decorrelate=30) as envs:
        seen = play(envs, 12)
        for env in range(8):
            ends = np.flatnonzero(seen.done[:, env])
            whole = ends[0] == 5  # its first episode began with the run
            assert np.isnan(seen.episode_return[ends[0], env]) != whole
            assert (seen.episode_length[ends[1:], env] == 5).all()


def test_time_limits_truncate_or_terminate():
    with make(COUNTING, 2, kwargs={"length": 50}, max_episode_steps=3) as envs:
        seen = play(envs, 9)
        assert pattern(seen, 0) == "F..TF..TF."
        assert envs.spec.max_episode_steps == 3
        assert (seen.episode_length[seen.done] == 3).all()
    with make(COUNTING, 2, kwargs={"length": 50}, max_episode_steps=3, time_limit="terminate") as envs:
        assert pattern(play(envs, 9), 0) == "F..DF..DF."


@pytest.mark.parametrize(
    ("env_id", "options", "says"),
    [
        ("coterie.envs.testing:Nope", {}, "no attribute 'Nope'"),
        ("nowhere.at.all:make", {}, "No module named"),
        (COUNTING, {"kwargs": {"colour": 1}}, "env.kwargs: .*'colour'"),
        ("coterie.envs.testing:FlakyEnv", {"kwargs": {"how": "construct"}}, "RuntimeError: this env cannot be made"),
        (COUNTING, {"num_envs": 3, "groups": 2}, "env.num_envs must be even"),
    ],
)
def test_bad_settings_are_one_line_for_the_user(env_id, options, says):
    with pytest.raises(ConfigError, match=says) as caught:
        make(env_id, **options)
    assert "\n" not in str(caught.value)


def test_an_env_that_only_the_worker_cannot_make_is_an_error_at_the_start(monkeypatch, tmp_path):
    with make(COUNTING, 1) as envs:
        envs.recv(0)  # the spec is cached: this process makes no env any more
    (tmp_path / "gymnasium.py").write_text("raise SystemExit(9)")
    monkeypatch.syspath_prepend(tmp_path)  # workers import from where their parent does
    with pytest.raises(CoterieError, match=r"env\.id .*worker ended before it was ready \(exit code 9\)"):
        make(COUNTING, 1)
