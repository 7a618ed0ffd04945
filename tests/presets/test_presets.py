"""Presets against the papers' tables; tests/cli/test_cli.py has what all presets share."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from coterie import presets
from coterie.build import validity
from coterie.build.resources import resolve_config
from coterie.config import Schedule
from coterie.envs.make import make_spec
from coterie.errors import ConfigError
from coterie.presets.common import image_rewards, vector_rewards
from coterie.types import ActionSpec, ObsSpec, Spec

SCENARIO = "gfootball/11_vs_11_hard_stochastic-v1"


@pytest.mark.parametrize("name", presets.PRESETS)
def test_the_first_line_about_a_preset_is_all_that_a_list_shows(name):
    first, blank, more = (presets.PRESETS[name].__doc__ or "").split("\n", 2)
    assert first.endswith(".")
    assert len(first) <= 65  # `coterie list presets` has 64 columns for it on a terminal of 80, and leaves out the dot
    assert ". " not in first
    assert not blank
    assert re.match(r" +[A-Z]", more)  # which is where the list ends its sentence


def test_seed_football_is_the_papers_setting_for_scoring():
    config = presets.make("seed-football", **{"algo.entropy_coef": 0.5})
    assert (config.preset, config.env.id, config.acting, config.algorithm) == (
        "seed-football",
        SCENARIO,
        "central",
        "vtrace",
    )
    validity.check(resolve_config(config), make_spec(config.env, config.atari))
    assert (config.env.action_repeat, config.reward.clip, config.steps) == (1, "none", 500_000_000)
    assert (config.model.torso, config.model.core) == ("football", "none")
    assert (config.central.batch_size, config.algo.unroll_length) == (32, 32)
    assert (config.algo.gamma, config.algo.gae_lambda, config.algo.entropy_coef) == (0.997, 0.9, 0.5)
    assert (config.optim.lr, config.optim.schedule.kind, config.optim.max_grad_norm) == (5.5339e-5, "constant", 0)
    assert config.vtrace.loss == "mean"


def test_seed_football_on_what_is_no_image_is_seed_vtrace():
    football, plain = (presets.make(name, "CartPole-v1") for name in ("seed-football", "seed-vtrace"))
    assert (football.model, football.algo, football.optim) == (plain.model, plain.algo, plain.optim)


def test_impala_paper_is_the_papers_setting_for_atari():
    """Table G.1; half of the baseline's cost, since the paper's squared error is halved as well."""
    config = presets.make(presets.impala_paper, env="Pong-v5")
    assert (config.preset, config.steps) == ("impala-paper", 50_000_000)
    assert (config.algorithm, config.acting, config.exchange) == ("vtrace", "decoupled", "auto")
    assert (config.algo.unroll_length, config.decoupled.batch_size) == (20, 32)
    assert (config.algo.gamma, config.algo.value_coef, config.algo.entropy_coef) == (0.99, 0.25, 0.01)
    assert (config.vtrace.loss, config.vtrace.rho_bar, config.vtrace.c_bar) == ("sum", 1.0, 1.0)
    assert (config.optim.rule, config.optim.lr, config.optim.eps) == ("rmsprop_tf", 6e-4, 0.01)
    assert (config.optim.alpha, config.optim.max_grad_norm, config.optim.schedule.kind) == (0.99, 40.0, "linear")
    assert (config.reward.clip, config.model.core) == ("clamp", "none")
    deep = presets.make("impala-deep", env="Pong-v5")
    assert (deep.model.torso, deep.optim) == ("impala", config.optim)


@pytest.mark.parametrize("env", ["Pong-v5", "LunarLander-v3", "Hopper-v5"])
def test_two_ppo_learners_that_gossip_make_as_many_updates_as_one(env):
    one, two = (presets.make(name, env) for name in ("ppo", "gala-ppo"))
    halves = (2 * two.env.num_envs, 2 * two.ppo.minibatch_size, 2 * two.ppo.batch_size)
    assert halves == (one.env.num_envs, one.ppo.minibatch_size, one.ppo.batch_size)


def test_an_image_env_that_steps_all_envs_together_takes_no_random_steps_first():
    config = presets.ppo(env="tests.support.vectors:images", **{"env.backend": "vector"})
    assert (config.env.decorrelate, presets.ppo(env="Pong-v5").env.decorrelate) == (0, 200)


@pytest.mark.parametrize(
    ("preset", "env", "kwargs", "expected"),
    [
        ("ppo", "Pong-v5,Breakout-v5", "{}", ("sign", 1.0, False)),
        ("impala-paper", "Pong-v5", "{}", ("clamp", 1.0, False)),
        ("seed-vtrace", "coterie.envs.testing:Catch", '{"image": true, "scale": 8}', ("none", 1.0, True)),
        ("gala-a2c", "coterie.envs.testing:Catch", '{"image": true, "scale": 8}', ("none", 1.0, True)),
        ("dqn", "coterie.envs.testing:Catch", '{"image": true, "scale": 8}', ("sign", 1.0, False)),
        ("ppo", "LunarLander-v3", "{}", ("none", 1.0, False)),
        ("gala-ppo", "coterie.envs.testing:Catch", "{}", ("none", 1.0, True)),
        ("a3c", "LunarLander-v3", "{}", ("none", 0.01, False)),
        ("a3c", "coterie.envs.testing:Catch", "{}", ("none", 1.0, True)),
        ("seed-vtrace", "coterie.envs.testing:Catch", "{}", ("none", 1.0, True)),
    ],
)
def test_only_rewards_of_envs_whose_sizes_are_known_are_clipped_or_scaled(preset, env, kwargs, expected):
    reward = presets.make(preset, env, **{"env.kwargs": kwargs}).reward
    assert (reward.clip, reward.scale, reward.normalize) == expected


def test_envs_are_known_by_whole_names():
    known = ("pettingzoo/atari/pong_v3", "ale_py:ALE/Pong-v5", "PongNoFrameskip-v4", "dmlab/x")
    assert [image_rewards(env).clip for env in (*known, "mine:Pong", "Pong-v5,mine:Pong")] == ["sign"] * 4 + [
        "none"
    ] * 2
    classic = ("LunarLanderContinuous-v3", "CartPole-v1,Acrobot-v1")
    others = ("CartPole-v1,mine:Env", "CartPoleSwingUp-v0", "Acrobots:Env")
    assert [vector_rewards(env).scale for env in (*classic, *others)] == [0.01] * 2 + [1.0] * 3


def test_a3c_paper_has_the_papers_defaults():
    config = presets.make("a3c-paper", env="LunarLander-v3")
    assert (config.exchange, config.learners, config.env.num_envs, config.algo.unroll_length) == ("hogwild", 64, 1, 20)
    assert (config.algo.gae_lambda, config.algo.entropy_coef, config.algo.value_target) == (1.0, 0.0, "n-step")
    assert (config.optim.rule, config.optim.lr, config.optim.schedule.kind) == ("adam", 1e-4, "constant")
    assert (config.optim.max_grad_norm, config.reward.scale, config.hogwild.statistics) == (0.0, 1e-3, "own")
    assert (config.model.hidden, config.model.core, config.model.forget_bias) == ((256, 256), "lstm", 0.0)
    assert presets.make("a3c-paper", env="MountainCar-v0").env.action_repeat == 4


def test_ppo_paper_has_the_papers_settings_for_atari():
    config = presets.make("ppo-paper", env="Pong-v5")
    assert (config.env.num_envs, config.algo.unroll_length, config.ppo.batch_size) == (8, 256, 2048)
    assert config.optim.max_grad_norm == 0
    assert (config.ppo.epochs, config.ppo.minibatch_size, config.ppo.clip, config.algo.value_coef) == (4, 512, 0.2, 1.0)
    assert (config.optim.rule, config.optim.lr, config.optim.eps) == ("adam_eps_hat", 1e-3, 1e-5)


# From docs/reference/sources.toml, in this order: env.num_envs, q.batch_size, optim.rule, optim.lr, optim.eps times
# the batch, q.n_step, q.target_every, q.learn_start, q.epsilon_end, q.epsilon_steps, replay.alpha.
VALUE_TABLE = {
    "dqn": (32, 32, "rmsprop_tf", 2.5e-4, 3.2e-5, 1, 10_000, 50_000, 0.1, 1_000_000, 0.0),
    "dqn-512": (32, 512, "rmsprop_tf", 7.5e-4, 5.12e-4, 1, 10_000, 50_000, 0.1, 1_000_000, 0.0),
    "dqn-async": (32, 512, "rmsprop_tf", 7.5e-4, 5.12e-4, 1, 10_000, 50_000, 0.1, 1_000_000, 0.0),
    "c51": (32, 32, "adam_eps_hat", 2.5e-4, 0.01, 1, 10_000, 50_000, 0.01, 1_000_000, 0.0),
    "c51-2048": (64, 2048, "adam_eps_hat", 4.2e-4, 0.01, 1, 10_000, 50_000, 0.01, 1_000_000, 0.0),
    "rainbow": (32, 32, "adam_eps_hat", 6.25e-5, 0.005, 3, 8_000, 20_000, 0.01, 62_500, 0.5),
    "rainbow-512": (32, 512, "adam_eps_hat", 6.25e-5, 0.005, 3, 8_000, 20_000, 0.01, 62_500, 0.5),
}


@pytest.mark.parametrize("name", VALUE_TABLE)
def test_value_presets_are_the_papers_settings_for_atari(name):
    config = presets.make(name, env="Pong-v5")
    q, optim = config.q, config.optim
    numbers = (
        config.env.num_envs, q.batch_size, optim.rule, optim.lr, pytest.approx(optim.eps * q.batch_size), q.n_step,
        q.target_every, q.learn_start, q.epsilon_end, q.epsilon_steps, config.replay.alpha,
    )  # fmt: skip
    assert numbers == VALUE_TABLE[name]
    assert (q.intensity, config.replay.capacity, config.algo.unroll_length, q.epsilon) == (8, 1_000_000, 4, 1)
    categorical = "c51" in name or "rainbow" in name
    assert (q.atoms, q.v_min, q.v_max) == (51 * categorical, -10, 10)
    assert (q.double, bool(q.dueling)) == ("rainbow" in name, "rainbow" in name)
    assert (config.exchange, config.learners) == (("store", 4) if name == "dqn-async" else ("auto", 1))
    assert optim.max_grad_norm == (10 if "rainbow" in name else 0)


def test_seed_r2d2_is_the_papers_setting_for_atari():
    """The losses of 80 steps are means: Adam's eps and the clip are an 80th of the paper's."""
    config = presets.make("seed-r2d2", env="Pong-v5")
    q, replay, r2d2 = config.q, config.replay, config.r2d2
    assert (r2d2.length, r2d2.burn_in, r2d2.stride, r2d2.eta, r2d2.rescale) == (80, 40, 80, 0.9, True)
    assert (q.n_step, q.batch_size, q.intensity, q.double, config.algo.gamma) == (5, 64, 0.75, True, 0.997)
    assert (replay.alpha, replay.beta, replay.beta_end, replay.initial) == (0.9, 0.6, 0.6, "acting")
    assert (config.optim.rule, config.optim.lr) == ("adam_eps_hat", 1e-4)
    assert (config.optim.eps * 80, config.optim.max_grad_norm * 80) == (pytest.approx(1e-3), 80)
    assert (config.model.core, config.model.core_size, q.dueling) == ("lstm", 512, 512)
    assert config.steps * config.atari.frame_skip == 40e9
    assert q.target_every == pytest.approx(2_500 * 80 * 64 / 0.75, rel=1e-3)


@pytest.mark.parametrize("env", ["Pong-v5", "CartPole-v1"])
@pytest.mark.parametrize("name", [n for n, f in presets.PRESETS.items() if "value" in f.__module__])
def test_a_run_of_a_value_preset_copies_its_target_network(name, env):
    config = presets.make(name, env=env)
    assert config.q.learn_start + 10 * config.q.target_every < config.steps / config.learners


@pytest.mark.parametrize("name", ["impala", "impala-deep", "seed-vtrace", "seed-r2d2", "apex-dqn"])
def test_three_tasks_are_shared_out_by_default(name):
    config = resolve_config(presets.make(name, env="Pong-v5,Breakout-v5,Seaquest-v5"))
    validity.check(config, make_spec(config.env, config.atari))
    assert config.actors % 3 == 0


@pytest.mark.parametrize("name", ["ppo", "gala-a2c", "impala", "seed-football", "rainbow", "apex-dqn", "seed-r2d2"])
def test_a_vector_beside_an_image_is_normalized(name):
    image, vector = ObsSpec((3, 64, 64), "uint8"), ObsSpec((2,), "float32")
    for obs, normalized in (({"a": image}, False), ({"a": image, "b": vector}, True)):
        config = presets.make(name, "made:Up", Spec("made:Up", obs, ActionSpec("categorical", (3,))))
        assert config.model.torso != "auto"
        assert config.model.normalize_obs == normalized


@pytest.mark.parametrize("agents", [2, 3, 5, 6, 7, 20])
@pytest.mark.parametrize("image", [False, True])
def test_presets_fit_teams_of_any_size(agents, image):
    obs = ObsSpec((4, 84, 84), "uint8") if image else ObsSpec((4,), "float32")
    spec = Spec("team", {"": obs}, ActionSpec("categorical", (3,)), agents=agents)
    for name in ("ppo", "impala", "impala-paper", "seed-vtrace"):
        config = presets.make(name, "CartPole-v1", spec)
        assert config.env.num_envs % agents == 0
        assert config.decoupled.batch_size % agents == 0
        assert config.decoupled.batch_size % (config.vtrace.minibatch or 1) == 0
    assert presets.make("impala", "CartPole-v1", spec, **{"decoupled.batch_size": 11}).decoupled.batch_size == 11


def test_the_env_decides_the_settings_however_it_is_given():
    lander = presets.make("dqn", "LunarLander-v3")
    assert presets.make("dqn", **{"env.id": "LunarLander-v3"}) == lander != presets.make("dqn", "CartPole-v1")
    with pytest.raises(ConfigError, match=r"^env\.id: give the env as env="):
        presets.dqn(**{"env.id": "LunarLander-v3"})


def test_a_preset_that_does_not_exist_is_told_those_that_do():
    with pytest.raises(AttributeError, match=r"^coterie\.presets has no 'td3'; presets are a2c, ppo, "):
        presets.td3  # noqa: B018


def test_overrides_from_python_are_nested_or_dotted():
    nested = {"optim": {"lr": 1e-3, "schedule": {"kind": "constant"}}, "env.kwargs": {"sutton_barto_reward": True}}
    nested["env.backend"] = "workers"
    config = presets.ppo(env="CartPole-v1", **nested, **{"algo.gamma": 0.98})
    plain = presets.ppo(env="CartPole-v1")
    assert config.optim == replace(plain.optim, lr=1e-3, schedule=Schedule())
    assert config.env == replace(plain.env, backend="workers", kwargs='{"sutton_barto_reward": true}')
    assert config.algo == replace(plain.algo, gamma=0.98)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"optm": {"lr": 1}}, r"optm\.lr: no such field; the nearest are optim\.lr"),
        ({"optim": {"lrr": 1}}, r"optim\.lrr: no such field; the nearest (is|are) optim\.lr"),
        ({"learning_rate": 1}, r"learning_rate: no such field; the nearest is optim\.lr$"),
        ({"lr": 1}, r"lr: no such field; the nearest is optim\.lr"),
        ({"optim": 3}, "optim: no such field; the fields of optim are optim.rule"),
        ({"env.kwargs": {"size": {3}}}, r"env\.kwargs: TypeError: .*; .* functools\.partial\(MyEnv, "),
        ({"env.id": "Pong-v5"}, r"env\.id: the env is given twice, as env, too"),
    ],
)
def test_a_bad_override_is_one_line(overrides, says):
    for preset in ("ppo", "appo"):
        with pytest.raises(ConfigError, match=f"^{says}"):
            presets.make(preset, env="CartPole-v1", **overrides)
        with pytest.raises(ConfigError, match=r"env\.id: None is not a name"):
            presets.make(preset, env=None)
