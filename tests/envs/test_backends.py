"""EnvPool and worker processes through `Envs`: alignment by arithmetic, lives, limits, seeds, one-line errors."""

import numpy as np
import pytest
from gymnasium import logger

from coterie import config
from coterie.envs import pool
from coterie.envs.group import Group
from coterie.envs.make import make_envs, make_spec
from coterie.errors import ConfigError, CoterieError
from tests.envs.env_harness import COUNTING, FLAKY, Player, check_counting, check_returns, make, pattern, play

FOOTBALL = "gfootball/academy_empty_goal_close-v1"


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


@pytest.mark.parametrize("backend", ["pool", "workers"])
def test_a_repeated_step_is_the_same_as_several(backend):
    """CartPole pays a point for each of its own steps: the return is their number, the env steps are a third."""
    with make("CartPole-v1", 3, backend=backend, action_repeat=3) as envs:
        assert envs.spec.action_repeat == 3
        seen = play(envs, 120)
    assert (np.abs(seen.obs[seen.is_first]) <= 0.05).all(), "a restart shows a first observation"
    np.testing.assert_array_equal(seen.is_first[1:], seen.done[:-1])
    assert (seen.reward[seen.is_first] == 0).all()
    assert (seen.reward[1:][seen.real & ~seen.terminated[1:]] == 3).all()
    assert set(seen.reward[seen.terminated]) <= {1, 2, 3}
    assert seen.terminated.sum() > 10
    check_returns(seen)
    np.testing.assert_array_equal(seen.episode_length[seen.done], np.ceil(seen.episode_return[seen.done] / 3))


def test_atari_options_reach_the_env():
    spec = make_spec(config.Env(id="Pong-v5"), config.Atari(frame_skip=3, height=104, width=80, stack=1))
    assert spec.obs[""].shape == (1, 104, 80)
    assert spec.action_repeat == 3
    assert spec.action.sizes == (6,)
    assert make_spec(config.Env(id="Pong-v5"), config.Atari(full_action_set=True)).action.sizes == (18,)
    assert make_spec(config.Env(id="Pong-v5", kwargs='{"gray_scale": false}'), config.Atari()).obs[""].shape[0] == 12


@pytest.mark.parametrize("env_id", ["LunarLander-v3", COUNTING])
def test_seeds_depend_on_the_run_and_the_global_id_only(env_id):
    def start(n=4, **options):
        with make(env_id, n, **options) as envs:
            return play(envs, 3).obs[0]

    base = start()
    np.testing.assert_array_equal(base, start(groups=2, threads=2))
    np.testing.assert_array_equal(base[2:], start(2, first_env_id=2))
    assert len({tuple(row) for row in base}) == 4
    assert (base != start(seed=2)).any(1).all()


def test_whole_rollouts_are_reproducible_with_decorrelation():
    def run():
        with make("LunarLander-v3", 4, decorrelate=50) as envs:
            return play(envs, 100)

    a, b = run(), run()
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(x, y)


def test_dict_observations_line_up_with_actions():
    with make("BabyAI-GoToRedBall-v0", 2) as envs:
        shapes = {k: s.shape for k, s in envs.spec.obs.items()}
        seen = play(envs, 20)
    assert shapes == {"direction": (4,), "image": (7, 7, 3), "mission": (40,)}
    facing = seen.obs["direction"].argmax(-1)
    for action, turn in ((0, 3), (1, 1)):  # turn left, turn right
        taken = (seen.action == action) & seen.real
        assert taken.any()
        assert ((facing[1:] - facing[:-1])[taken] % 4 == turn).all()


def test_float64_boxes_are_float32_and_actions_are_clipped_and_stretched_to_their_bounds():
    with make("Pendulum-v1", 2) as envs:
        assert envs.spec.action.high == (2.0,)
        a = envs.recv(0).obs
        envs.send(0, np.array([[1.0], [9.0]], np.float32))  # clipped to 1, stretched to 2
        ts = envs.recv(0)
    assert ts.obs.dtype == np.float32
    cost = np.arctan2(a[:, 1], a[:, 0]) ** 2 + 0.1 * a[:, 2] ** 2 + 0.001 * 2.0**2
    np.testing.assert_allclose(ts.reward, -cost, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("env_id", "shape", "actions", "repeat"),
    [("Basic-v1", (12, 84, 84), 6, 4), (FOOTBALL, (72, 96, 4), 19, 1)],
    ids=["ViZDoom", "football"],
)
def test_images_of_other_families_have_numbered_actions_and_count_their_frames(env_id, shape, actions, repeat):
    with make(env_id, 1) as envs:  # EnvPool's ViZDoom has crashed once in starting two at the same moment
        assert envs.spec.obs[""].is_image
        assert (envs.spec.obs[""].shape, envs.spec.action.sizes, envs.spec.action_repeat) == (shape, (actions,), repeat)
        seen = play(envs, 3)
    assert seen.obs.shape == (4, 1, *shape)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"id": "Pnog-v5"}, "env.id 'Pnog-v5': .*nearest: Pong-v5.*; an id that your own .* is MODULE:ID"),
        ({"id": "Ant-v9", "backend": "pool"}, "EnvPool has no such environment; nearest: Ant-v"),
        ({"id": "Pong-v5", "kwargs": '{"color": 1}'}, "env.kwargs: EnvPool's 'Pong-v5' has no option 'color'"),
        ({"id": "Pong-v5", "kwargs": '{"num_envs": 1}'}, "env.kwargs: 'num_envs' is set by Coterie"),
        ({"id": "CartPole-v1", "kwargs": '{"max_episode_steps": 9}'}, "env.kwargs: 'max_episode_steps' is set by"),
        ({"id": "CartPole-v1", "kwargs": '{"num_envs": 1}', "backend": "vector"}, "env.kwargs: 'num_envs' is set by"),
        ({"id": "Pong-v5", "kwargs": "[1]"}, r"env.kwargs: '\[1\]' is not a JSON object"),
        ({"id": "coterie.envs.testing:Nope"}, "no attribute 'Nope'"),
        ({"id": "nowhere.at.all:make"}, "No module named"),
        ({"id": "nowhere:Walker-v0"}, "No module named 'nowhere'"),
        ({"id": "numpy:Walker-v0"}, "env.id 'numpy:Walker-v0' cannot be made: NameNotFound"),
        ({"id": COUNTING, "kwargs": '{"color": 1}'}, "env.kwargs: .*'color'"),
        ({"id": FLAKY}, "env.kwargs: TypeError: .*missing 1 required positional argument: 'how'"),
        ({"id": COUNTING, "num_envs": 3}, "env.num_envs must be even"),
        ({"id": "selfplay/classic/chess_v9"}, "PettingZoo has no such game; nearest: selfplay/classic/chess_v6"),
        ({"id": "pettingzoo.classic.tictactoe.tictactoe:env"}, "it is a game by turns: use selfplay/"),
        ({"id": "tests.support.crowd:nameless"}, "an env of several agents needs the list possible_agents"),
    ],
)
def test_bad_settings_are_one_line_for_the_user(options, says):
    with pytest.raises(ConfigError, match=says) as caught:
        make_envs(config.Env(**options), config.Atari(), seed=0, groups=2)
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
    pool._declared.cache_clear()
    with pytest.raises(ConfigError, match=says):
        make_spec(config.Env(id="CoinrunEasy-v0"), config.Atari())
    pool._declared.cache_clear()


def test_making_an_env_leaves_the_warning_filters_alone():
    with make("CartPole-v1", 1) as envs:
        envs.recv(0)
    with pytest.warns(UserWarning, match="still shown"):
        logger.warn("still shown")


# --- worker processes ---


@pytest.mark.parametrize(("groups", "threads", "kind"), [(1, 1, "vector"), (1, 3, "image"), (2, 2, "dict")])
def test_rewards_flags_and_observations_of_worker_processes_line_up(groups, threads, kind):
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
        assert envs.reports.replaced == 0


def test_continuous_actions_are_clipped_and_stretched_to_the_bounds():
    with make(COUNTING, 2, kwargs={"length": 4, "continuous": True}) as envs:
        action = envs.spec.action
        assert (action.kind, action.low, action.high) == ("continuous", (-2.0, -2.0), (6.0, 6.0))
        count = envs.recv(0).obs[:, 0]
        envs.send(0, np.array([[-1.0, 0.5], [3.0, -7.0]], np.float32))
        reward = envs.recv(0).reward
        np.testing.assert_allclose(reward - 16 * count, [-2 + 4, 6 - 2])


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


def test_groups_take_their_random_steps_at_the_same_time(monkeypatch):
    sent, step = [], Group._step
    monkeypatch.setattr(
        Group, "_step", lambda self, ids, action: (sent.append(self.env_id[0]), step(self, ids, action))
    )
    with make(COUNTING, 4, kwargs={"length": 40}, decorrelate=20) as one:
        alone = one.recv(0)
    sent.clear()
    with make(COUNTING, 4, kwargs={"length": 40}, decorrelate=20, groups=2) as two:
        both = [two.recv(0), two.recv(1)]
    assert sent[:4] == [0, 2, 0, 2]
    np.testing.assert_array_equal(np.concatenate([seen.obs for seen in both]), alone.obs)


def test_the_episode_begun_by_decorrelation_is_not_reported():
    with make(COUNTING, 8, kwargs={"length": 5}, decorrelate=30) as envs:
        seen = play(envs, 12)
        for env in range(8):
            ends = np.flatnonzero(seen.done[:, env])
            whole = ends[0] == 5  # its first episode began with the run
            assert np.isnan(seen.episode_return[ends[0], env]) != whole
            assert (seen.episode_length[ends[1:], env] == 5).all()


@pytest.mark.parametrize("env_id", [COUNTING, "Game2048-v1"])  # EnvPool does not enforce the limit of the second
def test_time_limits_of_an_env_truncate_or_terminate(env_id):
    kwargs = {"kwargs": {"length": 50}} if env_id == COUNTING else {}
    with make(env_id, 2, max_episode_steps=3, **kwargs) as envs:
        seen = play(envs, 9)
        assert pattern(seen, 0) == "F..TF..TF."
        assert envs.spec.max_episode_steps == 3
        assert (seen.episode_length[seen.done] == 3).all()
        if env_id != COUNTING:
            assert ((seen.obs["board"] > 0)[seen.is_first].sum((1, 2)) == 1).all()  # a fresh board
    with make(env_id, 2, max_episode_steps=3, time_limit="terminate", **kwargs) as envs:
        assert pattern(play(envs, 9), 0) == "F..DF..DF."


@pytest.mark.parametrize("backend", ["pool", "workers"])
def test_an_episode_that_ends_at_its_time_limit_is_not_bootstrapped(backend):
    with make("CartPole-v1", 8, backend=backend, max_episode_steps=12) as envs:
        seen = play(envs, 500)
    at_limit = seen.episode_length == 12
    fell = np.abs(seen.obs[..., 2]) > 0.2095
    np.testing.assert_array_equal(seen.terminated[at_limit], fell[at_limit])
    assert seen.truncated[at_limit].all()
    assert {*fell[at_limit]} == {False, True}


def test_an_env_that_only_the_worker_cannot_make_is_an_error_at_the_start(monkeypatch, tmp_path):
    with make(COUNTING, 1) as envs:
        envs.recv(0)  # the spec is cached: this process makes no env any more
    (tmp_path / "gymnasium.py").write_text("raise SystemExit(9)")
    monkeypatch.syspath_prepend(tmp_path)  # workers import from where their parent does
    with pytest.raises(CoterieError, match=r"env\.id .*worker ended before it was ready \(exit code 9\)"):
        make(COUNTING, 1)
