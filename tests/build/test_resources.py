"""What `auto` comes to: learners, simulators, actors, exchange."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import coterie
from coterie import presets
from coterie.build import resources
from coterie.build.resources import resolve_config
from coterie.build.validity import check
from coterie.config import Config, Env
from coterie.envs.make import make_spec
from coterie.runs.config_io import load_config, parse_cli, validate
from coterie.types import ConfigError


@pytest.fixture
def cores(monkeypatch):
    def have(count: int) -> None:
        monkeypatch.setattr(resources, "available_cores", lambda: list(range(count)))

    return have


def settled(preset: str, env: str, *args: str) -> Config:
    """As the command line has it, and accepted by the matrix."""
    config = resolve_config(parse_cli(presets.make(preset, env), ["--device", "cpu", *args]))
    check(config, make_spec(config.env, config.atari))
    return config


def layout(preset: str, env: str, *args: str) -> tuple[Any, ...]:
    config = settled(preset, env, *args)
    return config.learners, config.actors, config.env.num_envs


def test_an_actor_for_each_core_and_as_many_simulators_as_fill_a_batch(cores):
    words = ("--env.num-envs", "auto")
    for count in (1, 2, 4, 8):
        cores(count)
        # The presets' batches have 32 and 8 rollouts: an actor's simulators divide them.
        assert layout("impala", "Breakout-v5", *words) == (1, count, 16 * count)
        assert layout("impala", "CartPole-v1", *words) == (1, count, 8 * count)
        assert layout("impala", "CartPole-v1", *words, "--decoupled.batch-size", "24") == (1, count, 24 * count)
        assert layout("impala", "CartPole-v1", *words, "--decoupled.batch-size", "0") == (1, count, 32 * count)
        assert layout("impala", "CartPole-v1", *words, "--decoupled.batch-size", "7") == (1, count, 7 * count)
        assert layout("impala", "CartPole-v1", *words, "--actors", "3") == (1, 3, 24)


def test_learners_share_the_cores(cores):
    words = ("--env.num-envs", "auto", "--exchange", "gossip")
    cores(4)
    assert layout("impala", "CartPole-v1", *words, "--learners", "2") == (2, 4, 16)
    assert layout("impala", "CartPole-v1", *words, "--learners", "8") == (8, 8, 8)
    assert layout("a2c", "CartPole-v1", *words, "--learners", "auto") == (4, 0, 32)
    assert layout("a2c", "CartPole-v1", "--env.num-envs", "auto") == (1, 0, 128)
    assert layout("ppo", "Breakout-v5", "--env.num-envs=auto") == (1, 0, 64)


def test_central_acting_has_one_host_for_all_cores_of_a_learner(cores):
    cores(4)
    assert layout("seed-vtrace", "CartPole-v1", "--env.num-envs", "auto") == (1, 1, 128)
    assert layout("seed-vtrace", "CartPole-v1", "--env.num-envs", "auto", "--learners", "2") == (2, 2, 64)


def test_tasks_are_shared_out_evenly(cores):
    cores(4)
    several = "Pong-v5,Breakout-v5,Freeway-v5"
    assert layout("impala", several, "--env.num-envs", "auto") == (1, 3, 16 * 3)
    assert layout("impala", several, "--env.num-envs", "auto", "--actors", "6") == (1, 6, 16 * 6)
    cores(2)
    assert layout("impala", several, "--env.num-envs", "auto") == (1, 3, 16 * 3)


def test_lockstep_has_a_simulator_for_each_rollout_of_the_batch(cores):
    cores(2)
    args = ("--env.num-envs", "auto", "--decoupled.lockstep", "True", "--decoupled.batch-size", "12")
    assert layout("impala", "CartPole-v1", *args) == (1, 2, 12)


def test_actors_fit_the_simulators_that_are_asked_for(cores):
    cores(4)
    assert layout("impala", "CartPole-v1", "--env.num-envs", "6", "--decoupled.batch-size", "6") == (1, 3, 6)
    assert layout("impala", "CartPole-v1", "--env.num-envs", "7", "--decoupled.batch-size", "7") == (1, 1, 7)


@pytest.mark.parametrize("preset", sorted(presets.PRESETS))
@pytest.mark.parametrize("env", ["CartPole-v1", "Breakout-v5"])
def test_no_preset_refuses_it_whatever_the_machine(cores, preset, env):
    if presets.make(preset, env).env.id != env:
        pytest.skip("the preset has an env of its own")
    for count in (1, 2, 16, 256):
        cores(count)
        for groups in ("0", "2"):
            assert settled(preset, env, "--env.num-envs", "auto", "--env.groups", groups).env.num_envs >= 1


def test_auto_is_a_word_of_this_option_only_and_is_settled_before_the_run(tmp_path):
    with pytest.raises(ConfigError, match=r"^--env\.threads: 'auto' is not an integer"):
        parse_cli(Config(), ["--env.threads", "auto"])
    with pytest.raises(ConfigError, match=r"^env\.num_envs: -1 must not be negative"):
        validate(presets.make("a2c", "CartPole-v1", **{"env.num_envs": -1}))
    word: Any = "auto"
    assert validate(Config(env=Env(num_envs=word))).env.num_envs == 0
    with pytest.raises(ConfigError, match=r"^env\.num_envs: 'many' is not an integer"):
        coterie.train(Config(env=replace(Env(), num_envs="many")))  # a dataclass takes anything
    made = presets.make("a2c", "CartPole-v1", **{"env.num_envs": "auto"}, out=str(tmp_path / "run"), steps=2000)
    coterie.train(replace(made, log=replace(made.log, tensorboard=False)), quiet=True)
    kept = load_config(tmp_path / "run" / "config.json")
    assert kept.env.num_envs == resolve_config(made).env.num_envs > 0


def test_a_thread_of_dqn_has_work_for_it():
    def threads(*options):
        config = parse_cli(presets.make("dqn", "Breakout-v5"), list(options))
        return resources.resolve_resources(config, make_spec(config.env, config.atari), cores=4).torch_threads

    assert threads() == 1  # batches of 32
    assert threads("--q.batch-size", "128") == 2
    assert threads("--q.batch-size", "512") == 4
    assert threads("--torch-threads", "3") == 3
