"""Presets against the papers' tables; tests/test_cli.py has what all presets share."""

from __future__ import annotations

import pytest

from coterie import matrix, presets
from coterie.envs import pool
from coterie.envs.make import make_spec

SCENARIO = "gfootball/11_vs_11_hard_stochastic-v1"
needs_football = pytest.mark.skipif(not pool.has_env(SCENARIO), reason="this EnvPool has no football")


@needs_football
def test_seed_football_is_the_papers_setting_for_scoring():
    config = presets.make("seed-football", **{"algo.entropy_coef": 0.5})
    assert (config.preset, config.env.id, config.acting, config.algorithm) == (
        "seed-football",
        SCENARIO,
        "central",
        "vtrace",
    )
    matrix.check(config, make_spec(config.env, config.atari))
    assert (config.env.action_repeat, config.reward.clip, config.steps) == (1, "none", 500_000_000)
    assert (config.model.torso, config.model.core) == ("football", "none")
    assert (config.central.batch_size, config.algo.unroll_length) == (32, 32)
    assert (config.algo.gamma, config.algo.gae_lambda, config.algo.entropy_coef) == (0.997, 0.9, 0.5)
    assert (config.optim.lr, config.optim.schedule.kind, config.optim.max_grad_norm) == (5.5339e-5, "constant", 0)
    assert config.vtrace.loss == "mean"


@needs_football
def test_seed_football_on_what_is_no_image_is_seed_vtrace():
    football, plain = (presets.make(name, "CartPole-v1") for name in ("seed-football", "seed-vtrace"))
    assert (football.model, football.algo, football.optim) == (plain.model, plain.algo, plain.optim)


def test_impala_is_the_papers_setting_for_atari():
    """Table G.1; half of the baseline's cost, since the paper's squared error is halved as well."""
    config = presets.make("impala", env="Pong-v5")
    assert (config.algorithm, config.acting, config.exchange) == ("vtrace", "decoupled", "auto")
    assert (config.algo.unroll_length, config.decoupled.batch_size) == (20, 32)
    assert (config.algo.gamma, config.algo.value_coef, config.algo.entropy_coef) == (0.99, 0.25, 0.01)
    assert (config.vtrace.loss, config.vtrace.rho_bar, config.vtrace.c_bar) == ("sum", 1.0, 1.0)
    assert (config.optim.rule, config.optim.lr, config.optim.eps) == ("rmsprop_tf", 6e-4, 0.01)
    assert (config.optim.alpha, config.optim.max_grad_norm, config.optim.schedule.kind) == (0.99, 40.0, "linear")
    assert (config.reward.clip, config.model.core) == ("clamp", "none")
    deep = presets.make("impala-deep", env="Pong-v5")
    assert (deep.model.torso, deep.optim) == ("impala", config.optim)
