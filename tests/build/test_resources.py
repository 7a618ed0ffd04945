"""What `auto` comes to: learners, simulators, actors, exchange."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

import coterie
from coterie import presets
from coterie.build import resources
from coterie.build.factory import make_model
from coterie.build.resources import resolve_config
from coterie.build.validity import check
from coterie.cli.options import config_of
from coterie.config import Config, Env
from coterie.envs.make import make_spec
from coterie.errors import ConfigError
from coterie.runs.config_io import load_config
from coterie.runs.validate import validate
from tests.support.options import parse_cli


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


SEVERAL = "Pong-v5,Breakout-v5,Freeway-v5"
GOSSIP = ("--exchange", "gossip")
LOCKSTEP = ("--decoupled.lockstep", "True", "--decoupled.batch-size", "12")


@pytest.mark.parametrize(
    ("preset", "env", "count", "args", "expected"),
    [
        # An actor for each core, and as many simulators as fill a batch: the presets have 32 and 8 rollouts.
        *(("impala", "Breakout-v5", k, (), (1, k, 16 * k)) for k in (1, 2, 4, 8)),
        ("impala", "CartPole-v1", 4, (), (1, 4, 32)),
        ("impala", "CartPole-v1", 2, ("--decoupled.batch-size", "0"), (1, 2, 64)),
        ("impala", "CartPole-v1", 8, ("--decoupled.batch-size", "7"), (1, 8, 56)),
        ("impala", "CartPole-v1", 2, ("--actors", "3"), (1, 3, 24)),
        # Actors fit the simulators that are asked for.
        ("impala", "CartPole-v1", 4, ("--env.num-envs", "6", "--decoupled.batch-size", "6"), (1, 3, 6)),
        ("impala", "CartPole-v1", 4, ("--env.num-envs", "7", "--decoupled.batch-size", "7"), (1, 1, 7)),
        # In lockstep there is a simulator for each rollout of the batch.
        ("impala", "CartPole-v1", 2, LOCKSTEP, (1, 2, 12)),
        # Tasks are shared out evenly.
        ("impala", SEVERAL, 4, (), (1, 3, 16 * 3)),
        ("impala", SEVERAL, 4, ("--actors", "6"), (1, 6, 16 * 6)),
        ("impala", SEVERAL, 2, (), (1, 3, 16 * 3)),
        # Learners share the cores.
        ("impala", "CartPole-v1", 4, (*GOSSIP, "--learners", "2"), (2, 4, 16)),
        ("impala", "CartPole-v1", 4, (*GOSSIP, "--learners", "8"), (8, 8, 8)),
        ("a2c", "CartPole-v1", 4, (*GOSSIP, "--learners", "auto"), (4, 0, 32)),
        ("a2c", "CartPole-v1", 4, (), (1, 0, 128)),
        ("ppo", "Breakout-v5", 4, (), (1, 0, 64)),
        # Central acting has one host for all cores of a learner.
        ("seed-vtrace", "CartPole-v1", 4, (), (1, 1, 128)),
        ("seed-vtrace", "CartPole-v1", 4, ("--learners", "2"), (2, 2, 64)),
    ],
)
def test_auto_numbers_of_learners_actors_and_simulators_fit_the_cores(cores, preset, env, count, args, expected):
    cores(count)
    config = settled(preset, env, "--env.num-envs", "auto", *args)
    assert (config.learners, config.actors, config.env.num_envs) == expected


ENVS = {"sac": ["Pendulum-v1"]}  # it takes continuous actions only
ARGS = {"bc": ("--bc.dataset", "made-up")}


@pytest.mark.parametrize(
    ("preset", "env"),
    [(p, env) for p in sorted(presets.PRESETS) for env in ENVS.get(p, ["CartPole-v1", "Breakout-v5"])],
)
def test_no_preset_refuses_it_whatever_the_machine(cores, preset, env):
    for count in (1, 2, 16, 256):
        cores(count)
        for groups in ("0", "2"):
            args = "--env.num-envs", "auto", "--env.groups", groups, *ARGS.get(preset, ())
            assert settled(preset, env, *args).env.num_envs >= 1


@pytest.mark.parametrize(
    ("args", "groups"),
    [
        (["a2c", "--env", "Breakout-v5"], 2),
        (["impala", "--env", "Breakout-v5"], 1),  # an actor has one core, on which nothing overlaps
        (["impala", "--env", "Breakout-v5", "--env.delay", "0.01"], 2),  # but waiting
        (["a2c", "--env", "CartPole-v1", "--env.num-envs", "16"], 1),
        (["a2c", "--env", "CartPole-v1", "--env.num-envs", "32"], 2),
    ],
)
def test_groups_of_envs_are_chosen(args, groups):
    config = resolve_config(config_of(args))
    assert resources.resolve_resources(config, make_spec(config.env, config.atari), cores=2).groups == groups


def test_a_learner_with_one_core_has_one_group(monkeypatch):
    config = resolve_config(config_of(["gala-a2c", "--env", "Breakout-v5"]))
    spec = make_spec(config.env, config.atari)
    assert [resources.resolve_resources(config, spec, cores=n).groups for n in (1, 2)] == [1, 2]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # a GPU computes while the core steps envs
    assert resources.resolve_resources(replace(config, device="cuda", precision="fp32"), spec, cores=1).groups == 2


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
    def threads(precision, *options):
        given = ["--device", "cpu", "--precision", precision, *options]
        config = parse_cli(presets.make("dqn", "Breakout-v5"), given)
        return resources.resolve_resources(config, make_spec(config.env, config.atari), cores=4).torch_threads

    assert threads("bf16") == 1  # batches of 32
    assert threads("bf16", "--q.batch-size", "128") == 2
    assert threads("bf16", "--q.batch-size", "512") == 4
    assert threads("bf16", "--torch-threads", "3") == 3
    assert threads("fp32") == 2
    assert threads("fp32", "--q.batch-size", "128") == 4


@pytest.mark.parametrize(
    ("preset", "gpus", "cores", "learners"),
    [
        ("gala-a2c", 1, 8, 4),
        ("gala-a2c", 1, 2, 2),
        ("gala-a2c", 2, 8, 2),
        ("gala-a2c", 0, 3, 3),
        ("a3c-store", 1, 8, 1),
    ],
)
def test_gossiping_learners_share_a_lone_gpu(monkeypatch, preset, gpus, cores, learners):
    """GALA stacks its learners on one GPU: one alone would be plain A2C."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert resolve_config(presets.make(preset, env="CartPole-v1"), cores).learners == learners


@pytest.mark.parametrize(("gpus", "actors"), [(0, 16), (1, 15), (2, 14)])
def test_one_core_drives_each_gpu_and_the_others_act(monkeypatch, gpus, actors):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    found = resolve_config(presets.make("impala", env="Pong-v5", learners=max(1, gpus)), 16)
    assert (found.actors, found.env.num_envs * found.learners) == (actors, 16 * actors)


def test_a_process_with_one_core_computes_its_first_weights_with_one_thread(monkeypatch):
    """Threads that share a core wait for each other in vain: 84 s instead of 0.1."""
    seen, make = set(), torch.nn.init.orthogonal_
    monkeypatch.setattr(torch.nn.init, "orthogonal_", lambda *args: (seen.add(torch.get_num_threads()), make(*args))[1])
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        config = presets.make("impala", env="CartPole-v1")
        make_model(config, make_spec(config.env, config.atari))
        assert (seen, torch.get_num_threads()) == ({1}, 3)
    finally:
        torch.set_num_threads(before)


def test_threads_that_make_networks_at_once_get_the_same_weights(monkeypatch):
    """As the learners and actors of a replay do."""
    config, make = presets.make("impala", env="CartPole-v1"), torch.nn.init.orthogonal_
    monkeypatch.setattr(torch.nn.init, "orthogonal_", lambda *args: (time.sleep(0.005), make(*args))[1])
    with ThreadPoolExecutor(4) as pool:
        models = list(pool.map(lambda _: make_model(config, make_spec(config.env, config.atari)), range(4)))
    for model in models[1:]:
        for x, first in zip(model.parameters(), models[0].parameters(), strict=True):
            assert torch.equal(x, first)
