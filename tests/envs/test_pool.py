"""EnvPool through `Envs`: alignment by each env's own arithmetic, lives, limits, seeds, and one-line errors."""

import numpy as np
import pytest
from gymnasium import logger

from coterie import config
from coterie.envs import pool
from coterie.envs.make import make_spec
from coterie.types import ConfigError
from tests.envs.env_harness import make, pattern, play

FOOTBALL = "gfootball/academy_empty_goal_close-v1"
ATARI = config.Atari(noop_max=1, episodic_life=True, height=36, width=36, stack=2)


@pytest.mark.parametrize(("groups", "backend"), [(1, "pool"), (2, "pool"), (1, "workers")])
def test_cartpoles_rewards_and_observations_line_up(groups, backend):
    with make("CartPole-v1", 4, groups=groups, backend=backend, max_episode_steps=7) as envs:
        seen = play(envs, 40)
    np.testing.assert_array_equal(seen.is_first[1:], seen.done[:-1])
    real = ~seen.is_first[1:]
    # CartPole's own Euler step: the position moves by the velocity before; its velocity follows the action's sign.
    moved = seen.obs[:-1, :, 0] + 0.02 * seen.obs[:-1, :, 1]
    np.testing.assert_allclose(seen.obs[1:, :, 0][real], moved[real], atol=1e-6)
    faster = seen.obs[1:, :, 1] > seen.obs[:-1, :, 1]
    np.testing.assert_array_equal(faster[real], seen.action[real] == 1)
    np.testing.assert_array_equal(seen.reward[1:], real.astype(np.float32))
    assert pattern(seen, 0).startswith("F......TF......T")
    ended = seen.done
    np.testing.assert_array_equal(~np.isnan(seen.episode_return), ended)
    assert (seen.episode_return[ended] == 7).all()
    assert (seen.episode_length[ended] == 7).all()


def test_time_limits_hold_where_envpool_does_not_enforce_them():
    with make("Game2048-v1", 3, max_episode_steps=5) as envs:
        assert set(envs.spec.obs) == {"board", "action_mask"}
        seen = play(envs, 17)
    for env in range(3):
        assert pattern(seen, env) == "F....TF....TF....T"[: len(pattern(seen, env))]
        for t in np.flatnonzero(seen.is_first[:, env]):
            assert (seen.obs["board"][t, env] > 0).sum() == 1  # a fresh board
    with make("Game2048-v1", 3, max_episode_steps=5, time_limit="terminate") as envs:
        assert pattern(play(envs, 6), 0) == "F....DF"


def test_a_lost_life_ends_the_episode_but_not_the_game():
    def run(training):
        with make("Breakout-v5", 2, atari=ATARI, training=training) as envs:
            return play(envs, 500)

    lives, whole = run(True), run(False)
    for seen in (lives, whole):
        reported = ~np.isnan(seen.episode_return)
        assert reported.any()
        for env in range(2):
            begin = 1
            for t in np.flatnonzero(reported[:, env]):
                assert seen.episode_return[t, env] == seen.reward[begin : t + 1, env].sum()
                assert seen.episode_length[t, env] == (~seen.is_first[begin : t + 1, env]).sum()
                begin = t + 1
    ends = np.isfinite(lives.episode_return)
    assert (lives.done & ~ends).sum() >= 4 * ends.sum()  # five lives
    np.testing.assert_array_equal(np.isfinite(whole.episode_return), whole.done)


def test_atari_options_reach_the_env():
    spec = make_spec(config.Env(id="Pong-v5"), config.Atari(frame_skip=3, height=104, width=80, stack=1))
    assert spec.obs[""].shape == (1, 104, 80)
    assert spec.action_repeat == 3
    assert spec.action.sizes == (6,)
    assert make_spec(config.Env(id="Pong-v5"), config.Atari(full_action_set=True)).action.sizes == (18,)
    assert make_spec(config.Env(id="Pong-v5", kwargs='{"gray_scale": false}'), config.Atari()).obs[""].shape[0] == 12


def test_seeds_depend_on_the_run_and_the_global_id_only():
    def start(n=4, **options):
        with make("LunarLander-v3", n, **options) as envs:
            return play(envs, 3).obs[0]

    base = start()
    np.testing.assert_array_equal(base, start(groups=2))
    np.testing.assert_array_equal(base[2:], start(2, first_env_id=2))
    assert len({tuple(row) for row in base}) == 4
    assert (base != start(seed=2)).any(1).all()


def test_the_whole_run_is_reproducible_with_decorrelation():
    def run():
        with make("LunarLander-v3", 4, decorrelate=50) as envs:
            return play(envs, 100)

    a, b = run(), run()
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(x, y)


def test_vizdoom_has_numbered_actions_and_counts_its_frames():
    spec = make_spec(config.Env(id="Basic-v1"), config.Atari())
    assert (spec.action.kind, spec.action.sizes) == ("categorical", (6,))
    assert spec.obs[""].shape == (12, 84, 84)
    assert spec.action_repeat == 4
    with make("Basic-v1", 2) as envs:
        envs.recv(0)
        envs.send(0, np.array([5, 0]))
        assert envs.recv(0).obs.shape == (2, 12, 84, 84)


def test_dict_observations_and_float64_boxes_and_bounds():
    with make("BabyAI-GoToRedBall-v0", 2) as envs:
        assert {k: s.shape for k, s in envs.spec.obs.items()} == {
            "direction": (4,),
            "image": (7, 7, 3),
            "mission": (40,),
        }
        seen = play(envs, 20)
        assert (seen.obs["direction"].sum(-1) == 1).all()
        turned = seen.obs["direction"][1:].argmax(-1) - seen.obs["direction"][:-1].argmax(-1)
        for action, turn in ((0, 3), (1, 1)):  # turn left, turn right
            taken = (seen.action == action) & ~seen.is_first[1:]
            assert taken.any()
            assert (turned[taken] % 4 == turn).all()
    with make("Pendulum-v1", 2) as envs:
        assert envs.spec.action.high == (2.0,)
        a = envs.recv(0).obs
        envs.send(0, np.array([[1.0], [9.0]], np.float32))  # clipped to 1, stretched to 2
        ts = envs.recv(0)
        assert ts.obs.dtype == np.float32
        angle = np.arctan2(a[:, 1], a[:, 0])
        cost = angle**2 + 0.1 * a[:, 2] ** 2 + 0.001 * 2.0**2
        np.testing.assert_allclose(ts.reward, -cost, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not pool.has_env(FOOTBALL), reason="this EnvPool has no football")
def test_football_shows_maps_and_pays_goals():
    with make(FOOTBALL, 4, groups=2) as envs:
        assert (envs.spec.obs[""].shape, envs.spec.obs[""].dtype) == ((72, 96, 4), "uint8")
        assert envs.spec.obs[""].is_image
        assert (envs.spec.action.sizes, envs.spec.action_repeat, envs.spec.max_episode_steps) == ((19,), 1, 400)
        seen = play(envs, 250)
    assert set(np.unique(seen.obs)) == {0, 255}
    assert ((seen.obs[..., 2:] > 0).sum((2, 3)) == 1).all()  # one ball, one active player
    assert seen.terminated.any()
    assert set(np.unique(seen.reward)) <= {0.0, 1.0}  # there is no opponent who could score
    np.testing.assert_array_equal(seen.is_first[1:], seen.done[:-1])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"id": "Pnog-v5"}, "env.id 'Pnog-v5': .*nearest: Pong-v5"),
        ({"id": "Ant-v9", "backend": "pool"}, "EnvPool has no such environment; nearest: Ant-v"),
        ({"id": "Pong-v5", "kwargs": '{"colour": 1}'}, "env.kwargs: 'Pong-v5' has no option 'colour'"),
        ({"id": "Pong-v5", "kwargs": '{"num_envs": 1}'}, "env.kwargs: 'num_envs' is set by Coterie"),
        ({"id": "Pong-v5", "kwargs": "[1]"}, "env.kwargs must be a JSON object"),
        ({"id": "Pong-v5", "kwargs": "{"}, "env.kwargs is not a JSON object"),
    ],
)
def test_bad_settings_are_one_line_for_the_user(options, says):
    with pytest.raises(ConfigError, match=says) as caught:
        make_spec(config.Env(**options), config.Atari())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("cause", "says"),
    [
        ("libQt5Gui.so.5: cannot open shared object file", r"libQt5Gui\.so\.5.*apt install libqt5gui5 libqt5core5a"),
        ("libOSMesa.so.8: cannot open shared object file", "apt install libosmesa6"),
        ("libstrange.so.1: cannot open shared object file", r"system library libstrange\.so\.1$"),
    ],
)
def test_a_missing_library_names_its_debian_package(monkeypatch, cause, says):
    def broken(env_id, **options):
        raise ImportError("needs something") from ImportError(cause)

    monkeypatch.setattr("envpool.make_spec", broken)
    pool.pool_declared.cache_clear()
    with pytest.raises(ConfigError, match=says):
        make_spec(config.Env(id="CoinrunEasy-v0"), config.Atari())
    pool.pool_declared.cache_clear()


def test_nothing_is_left_in_the_warning_filters():
    with make("CartPole-v1", 1) as envs:
        envs.recv(0)
    with pytest.warns(UserWarning, match="still shown"):
        logger.warn("still shown")
