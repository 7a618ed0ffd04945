"""Which part of a run goes to which machine of a cluster, and with which config."""

from __future__ import annotations

import math

import pytest

from coterie import presets
from coterie.build.resources import resolve_config
from coterie.build.validity import check
from coterie.config import Config
from coterie.envs.make import make_spec
from coterie.launch.ray.placement import Allocation, Machine, allocate, site_config, targets, worker_args
from coterie.ops.optim import scaled_lr
from coterie.runs.config_io import parse_cli, validate
from coterie.types import ConfigError

HERE, THERE, FAR = (Machine(name, f"10.0.0.{k}", 4, 0) for k, name in enumerate("abc", 1))
ONE, TWO = ("10.0.0.1", 9000), ("10.0.0.2", 9100)


def layout(
    preset: str, machines: list[Machine], sites: int = 0, env: str = "CartPole-v1", **changes: object
) -> Allocation:
    return allocate(presets.make(preset, env, launch="ray", **changes), machines, sites)


def site(found: Allocation, k: int = 0, keys: bool = True) -> Config:
    """The config of a site; there are two at most."""
    return site_config(found, found.sites[k], (ONE, TWO)[k], ONE, keys, steps=1000)


def places(found: Allocation) -> list[tuple[str, int, int, int]]:
    return [(s.machine.id, s.learners, s.cpus, s.gpus) for s in found.sites]


def test_gossiping_learners_are_spread_and_others_share_a_machine():
    five = places(layout("gala-a2c", [HERE, THERE, FAR], learners=5))
    assert five == [("a", 2, 2, 0), ("b", 2, 2, 0), ("c", 1, 1, 0)]
    assert places(layout("gala-a2c", [HERE, THERE, FAR], learners=2)) == [("a", 1, 1, 0), ("b", 1, 1, 0)]
    for exchange in ("allreduce", "hogwild", "store"):
        assert places(layout("a2c", [HERE, THERE], learners=3, exchange=exchange)) == [("a", 3, 3, 0)]
    trusted = {"allreduce.trusted_network": True}
    assert places(layout("a2c", [HERE, THERE], learners=3, **trusted)) == [("a", 3, 3, 0)]
    assert places(layout("a2c", [HERE, THERE, FAR], learners=6, **trusted)) == [("a", 3, 3, 0), ("b", 3, 3, 0)]
    assert places(layout("a2c", [HERE, THERE], learners="auto", **trusted)) == [("a", 4, 4, 0), ("b", 4, 4, 0)]
    assert places(layout("dqn", [HERE, THERE], learners="auto", **trusted)) == [("a", 4, 4, 0)]  # they have a replay


def test_auto_learners():
    assert places(layout("ppo", [HERE, THERE])) == [("a", 1, 1, 0)]
    assert places(layout("ppo", [HERE, THERE], learners="auto")) == [("a", 4, 4, 0)]
    assert layout("ppo", [HERE, THERE], learners="auto").config.exchange == "allreduce"
    assert places(layout("gala-ppo", [HERE, THERE])) == [("a", 4, 4, 0), ("b", 4, 4, 0)]
    assert layout("impala", [HERE, THERE], learners="auto", exchange="gossip").learners == 2


def test_learners_go_where_gpus_are():
    machines = [HERE, Machine("g", "10.0.0.9", 4, 2)]
    assert places(layout("seed-vtrace", machines)) == [("g", 1, 1, 1)]
    assert places(layout("seed-vtrace", machines, learners="auto")) == [("g", 2, 2, 2)]
    assert places(layout("seed-vtrace", machines, device="cpu")) == [("a", 1, 1, 0)]


def test_what_steps_envs_takes_the_cores_that_are_left():
    found = layout("seed-vtrace", [HERE, THERE], **{"env.num_envs": 16})
    assert [x.kind for x in found.workers] == ["envs"] * 4  # of 7: a divisor of 16
    assert {x.machine.id for x in found.workers} == {"a", "b"}
    found = layout("impala", [HERE, THERE], actors=4, **{"env.num_envs": 16})
    assert [(x.kind, x.machine.id) for x in found.workers] == [("actor", "b"), ("actor", "b"), ("actor", "a")]
    assert places(found) == [("a", 1, 2, 0)]  # with the first actor beside the learner
    for lockstep in ({"acting": "central", "central.lockstep": True}, {"env": "Pong-v5,Breakout-v5"}):
        env = str(lockstep.pop("env", "CartPole-v1"))
        preset = "ppo" if env == "CartPole-v1" else "seed-vtrace"
        assert layout(preset, [HERE, THERE], env=env, **lockstep).workers == ()


@pytest.mark.parametrize(
    ("preset", "changes", "said"),
    [
        ("seed-vtrace", {"actors": 3}, "actors: 3 do not share out"),
        ("seed-vtrace", {"actors": 8, "env.num_envs": 8}, "ray: the run needs 9 CPUs"),
        ("a2c", {"learners": 5, "exchange": "hogwild"}, "ray: the run needs 5 CPUs"),
        ("seed-vtrace", {"wire.bind": "127.0.0.1:1"}, "wire.bind: must be empty with launch ray"),
        ("gala-a2c", {"gossip.bind": "127.0.0.1:1"}, "gossip.bind: must be empty with launch ray"),
    ],
)
def test_what_does_not_fit_is_refused(preset, changes, said):
    with pytest.raises(ConfigError, match=said):
        layout(preset, [HERE], **changes)


def test_a_resumed_run_has_as_many_sites_as_before():
    assert len(layout("gala-a2c", [HERE, THERE, FAR], sites=2, learners=4).sites) == 2
    found = layout("gala-a2c", [HERE, THERE], sites=3, learners=3)  # and a machine less
    assert [s.machine.id for s in found.sites] == ["a", "b", "a"]
    assert len(layout("seed-vtrace", [Machine("x", "10.0.0.7", 2, 0)], sites=1, actors=8).workers) == 8  # most wait


def test_learners_are_shared_out_by_the_room_that_machines_have():
    big, small = Machine("big", "10.0.0.1", 8, 0), Machine("small", "10.0.0.2", 2, 0)
    assert places(layout("gala-a2c", [small, big], learners="auto")) == [("small", 2, 2, 0), ("big", 8, 8, 0)]
    machines = [Machine("four", "10.0.0.1", 8, 4), Machine("one", "10.0.0.2", 8, 1), HERE]
    found = layout("gala-a2c", machines, learners="auto")
    assert places(found) == [("four", 4, 4, 4), ("one", 1, 1, 1)]
    with pytest.raises(ConfigError, match="ray: 5 learners would share a machine that has 4 GPUs"):
        layout("a2c", machines, learners=5, exchange="allreduce")


def test_sites_share_the_budget_and_find_each_other():
    found = layout("gala-a2c", [HERE, THERE], learners=3, steps=1000, **{"env.num_envs": 16})
    hub, other = (site(found, k) for k in (0, 1))
    assert (hub.learners, other.learners) == (2, 1)
    assert targets(found, [0, 0]) == [667, 334]
    assert targets(found, [700, 0]) == [900, 100]  # what is left is shared out again
    with pytest.raises(ConfigError, match=r"--steps: the run already has 1,000 env steps; give a larger total"):
        targets(found, [500, 500])
    assert (hub.gossip.bind, other.gossip.connect) == ("10.0.0.1:9002", "10.0.0.1:9002")
    assert hub.wire.token_file == other.wire.token_file == "{here}/token"
    assert hub.seed != other.seed
    for one in (hub, other):  # the rate of all learners together
        assert math.isclose(scaled_lr(one.optim, 99), scaled_lr(found.config.optim, 48))
        assert one.launch == "local"
        validate(one)


def test_synchronous_sites_find_each_other():
    found = layout("ppo", [HERE, THERE], learners=6, **{"allreduce.trusted_network": True})
    hub, other = (site(found, k) for k in (0, 1))
    assert (hub.learners, hub.allreduce.bind, hub.allreduce.machines) == (3, "10.0.0.1:9003", 2)
    assert (other.learners, other.allreduce.connect, other.allreduce.bind) == (3, "10.0.0.1:9003", "")
    assert (hub.gossip.bind, hub.seed != other.seed, hub.env.num_envs) == ("", True, other.env.num_envs)
    for one in (hub, other):
        check(resolve_config(one), make_spec(one.env, one.atari))


def test_one_site_needs_no_gossip_with_others():
    found = layout("gala-a2c", [HERE], learners=3)
    own = site(found, keys=False)
    assert (own.gossip.bind, own.gossip.connect, own.wire.token_file, own.exchange) == ("", "", "", "gossip")


def test_an_actor_beside_each_learner_is_as_wide_as_those_elsewhere():
    found = layout("impala", [HERE, THERE], actors=4, **{"env.num_envs": 16, "env.max_episode_steps": 77})
    own = site(found)
    # impala's own batch size
    assert (own.actors, own.env.num_envs, own.decoupled.batch_size, own.wire.bind) == (1, 4, 8, "10.0.0.1:9000")
    args = worker_args(found, found.workers[0], ONE, keys=True)
    assert args[:5] == ["actor", "--connect", "10.0.0.1:9000", "--env", "CartPole-v1"]
    options = dict(zip(args[5::2], args[6::2], strict=True))
    assert options["--env.num-envs"] == "4"
    assert options["--env.max-episode-steps"] == "77"
    assert options["--cert"] == "{here}/cert.pem"


def test_a_workers_command_line_has_the_runs_env_torso_and_algorithm():
    found = layout("seed-vtrace", [HERE], actors=2, **{"env.num_envs": 8, "env.delay": 0.5, "model.torso": "a.b:c"})
    args = worker_args(found, found.workers[1], ("::1", 7), keys=False)
    assert args[:3] == ["envs", "--connect", "[::1]:7"]
    env = parse_cli(found.config, args[3:]).env
    assert (env.num_envs, env.delay, env.threads) == (4, 0.5, 1)
    assert args[-2:] == ["--model.torso", "a.b:c"]
    found = layout("impala", [HERE, THERE], **{"plugins.algorithm": "a.b:c"})
    actor = next(worker for worker in found.workers if worker.kind == "actor")
    assert worker_args(found, actor, ("::1", 7), keys=False)[-2:] == ["--plugins.algorithm", "a.b:c"]
