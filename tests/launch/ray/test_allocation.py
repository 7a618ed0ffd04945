"""Which part of a run goes to which machine of a cluster, what the nodes share, and what the sites come to together."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import pytest

from coterie import presets
from coterie.build.resources import resolve_config
from coterie.build.validity import check
from coterie.config import Config
from coterie.envs.make import make_spec
from coterie.errors import ConfigError, CoterieError
from coterie.launch.ray.allocation import Allocation, Machine, Site, Worker, allocate, site_config, targets, worker_args
from coterie.launch.ray.cluster import RayBoard
from coterie.launch.ray.run import sum_up
from coterie.ops.optim import scaled_lr
from coterie.runs.validate import validate
from tests.launch.ray.test_mirror import save
from tests.support.options import parse_cli

HERE, THERE, FAR = (Machine(name, f"10.0.0.{k}", 4, 0) for k, name in enumerate("abc", 1))
ONE, TWO = ("10.0.0.1", 9000), ("10.0.0.2", 9100)


def layout(
    preset: str, machines: list[Machine], sites: Sequence[int] = (), env: str = "CartPole-v1", **changes: object
) -> Allocation:
    return allocate(presets.make(preset, env, launch="ray", **changes), machines, sites)


def site(found: Allocation, k: int = 0, keys: bool = True) -> Config:
    """The config of a site; there are two at most."""
    return site_config(found, found.sites[k], (ONE, TWO)[k], ONE, keys, steps=1000)


def places(found: Allocation) -> list[tuple[str, int, int, int]]:
    return [(s.machine.id, s.learners, s.cpus, s.gpus) for s in found.sites]


TRUSTED = {"allreduce.trusted_network": True}
G, FOUR, ONE_GPU = Machine("g", "10.0.0.9", 4, 2), Machine("m", "10.0.0.8", 8, 4), Machine("o", "10.0.0.7", 8, 1)
BIG, SMALL = Machine("big", "10.0.0.1", 8, 0), Machine("small", "10.0.0.2", 2, 0)


@pytest.mark.parametrize(
    ("preset", "machines", "changes", "expected"),
    [
        # Gossiping learners are spread, by the room that machines have; others share a machine.
        ("gala-a2c", [HERE, THERE, FAR], {"learners": 5}, [("a", 2, 2, 0), ("b", 2, 2, 0), ("c", 1, 1, 0)]),
        ("gala-a2c", [HERE, THERE, FAR], {"learners": 2}, [("a", 1, 1, 0), ("b", 1, 1, 0)]),
        ("gala-a2c", [SMALL, BIG], {"learners": "auto"}, [("small", 2, 2, 0), ("big", 8, 8, 0)]),
        ("gala-a2c", [FOUR, ONE_GPU, HERE], {"learners": "auto"}, [("m", 4, 4, 4), ("o", 1, 1, 1)]),
        *(("a2c", [HERE, THERE], {"learners": 3, "exchange": x}, [("a", 3, 3, 0)]) for x in ("hogwild", "store")),
        ("a2c", [HERE, THERE], {"learners": 3, **TRUSTED}, [("a", 3, 3, 0)]),
        ("a2c", [HERE, THERE, FAR], {"learners": 6, **TRUSTED}, [("a", 3, 3, 0), ("b", 3, 3, 0)]),
        ("a2c", [HERE, THERE], {"learners": "auto", **TRUSTED}, [("a", 4, 4, 0), ("b", 4, 4, 0)]),
        ("dqn", [HERE, THERE], {"learners": "auto", **TRUSTED}, [("a", 4, 4, 0)]),  # they have a replay
        ("ppo", [HERE, THERE], {}, [("a", 1, 1, 0)]),
        ("ppo", [HERE, THERE], {"learners": "auto"}, [("a", 4, 4, 0)]),
        ("gala-ppo", [HERE, THERE], {}, [("a", 4, 4, 0), ("b", 4, 4, 0)]),
        # Learners go where GPUs are.
        ("seed-vtrace", [HERE, G], {}, [("g", 1, 1, 1)]),
        ("seed-vtrace", [HERE, G], {"learners": "auto"}, [("g", 2, 2, 2)]),
        ("seed-vtrace", [HERE, G], {"device": "cpu"}, [("a", 1, 1, 0)]),
    ],
)
def test_learners_are_placed_by_their_exchange_and_the_machines_room(preset, machines, changes, expected):
    assert places(layout(preset, machines, **changes)) == expected


def test_auto_is_an_exchange_and_a_number_of_learners_that_one_machine_has_room_for():
    assert layout("ppo", [HERE, THERE], learners="auto").config.exchange == "allreduce"
    assert layout("impala", [HERE, THERE], learners="auto", exchange="gossip").learners == 2
    with pytest.raises(ConfigError, match="ray: 5 learners would share a machine that has 4 GPUs"):
        layout("a2c", [FOUR, ONE_GPU, HERE], learners=5, exchange="allreduce")


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
    assert len(layout("gala-a2c", [HERE, THERE, FAR], sites=[2, 2], learners=4).sites) == 2
    found = layout("gala-a2c", [HERE, THERE], sites=[1, 1, 1], learners=3)  # and a machine less
    assert [s.machine.id for s in found.sites] == ["a", "b", "a"]
    found = layout("gala-a2c", [BIG, SMALL], sites=[2, 8], learners=10)  # another machine is the first: as it was
    assert [(s.machine.id, s.learners) for s in found.sites] == [("small", 2), ("big", 8)]
    assert len(layout("seed-vtrace", [Machine("x", "10.0.0.7", 2, 0)], sites=[1], actors=8).workers) == 8  # most wait


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
    own = site(layout("gala-a2c", [HERE], learners=3), keys=False)  # one site needs no other
    assert (own.gossip.bind, own.gossip.connect, own.wire.token_file, own.exchange) == ("", "", "", "gossip")


def test_an_actor_beside_each_learner_is_as_wide_as_those_elsewhere():
    found = layout(
        "impala", [HERE, THERE], actors=4, **{"env.num_envs": 16, "env.groups": 1, "env.max_episode_steps": 77}
    )
    own = site(found)
    # impala's own batch size
    assert (own.actors, own.env.num_envs, own.decoupled.batch_size, own.wire.bind) == (1, 4, 8, "10.0.0.1:9000")
    args = worker_args(found, found.workers[0], ONE, keys=True)
    assert args[:5] == ["actor", "--connect", "10.0.0.1:9000", "--env", "CartPole-v1"]
    options = dict(zip(args[5::2], args[6::2], strict=True))
    assert not {"--env.num-envs", "--env.groups", "--env.max-episode-steps"} & options.keys()  # which an actor refuses
    assert options["--wire.cert"] == "{here}/cert.pem"


def test_a_workers_command_line_has_the_runs_env_torso_and_algorithm():
    found = layout("seed-vtrace", [HERE], actors=2, **{"env.num_envs": 8, "env.delay": 0.5, "model.torso": "a.b:c"})
    args = worker_args(found, found.workers[1], ("::1", 7), keys=False)
    assert args[:3] == ["envs", "--connect", "[::1]:7"]
    env = parse_cli(found.config, args[3:]).env
    assert (env.num_envs, env.delay, env.threads) == (4, 0.5, 1)
    assert args[-2:] == ["--model.torso", "a.b:c"]
    path = "coterie.algorithms.vtrace:VTrace"  # a class: the run's layout asks it for its unroll length
    found = layout("impala", [HERE, THERE], **{"algorithm": path, "plugins.modules": ["coterie.choices"]})
    actor = next(worker for worker in found.workers if worker.kind == "actor")
    args = worker_args(found, actor, ("::1", 7), keys=False)
    assert args[-4:] == ["--algorithm", path, "--plugins.modules", "coterie.choices"]


def board(preset: str, hosts: int = 1, **changes: object) -> RayBoard:
    machines = [HERE, THERE, FAR]
    return RayBoard(layout(preset, machines, **changes), [m.address for m in machines[:hosts]])


def test_restarts_are_counted_for_the_whole_run():
    one = board("impala", restarts=1, **{"decoupled.restarts": 2})
    sites = [Site(k, HERE, 1, 1, 0) for k in range(2)]
    workers = [Worker("actor", k, 0, HERE) for k in range(3)]
    for part in (*sites, *workers, sites[0], *workers[:2]):
        one.begin(part)  # three of them for the second time
    assert one.collect()[0] == [
        f"{name}: its machine is gone or out of reach; it is restarted" for name in ("site 0", "actor 0", "actor 1")
    ]
    with pytest.raises(
        CoterieError, match=r"^its command failed; the limit of 1 restart in an hour \(restarts\) is reached$"
    ):
        one.restart(sites[1], "its command failed")
    with pytest.raises(CoterieError, match=r"the limit of 2 restarts in an hour \(decoupled.restarts\) is reached$"):
        one.begin(workers[2])
    assert one.summary() == {"machines": 1, "restarts": 5}


def test_parts_start_again_when_the_site_that_they_connect_to_has_moved():
    one = board("gala-ppo", hosts=3, learners=2)
    hub, other = (Site(k, (HERE, THERE)[k], 1, 1, 0) for k in range(2))
    worker = Worker("envs", 0, 1, FAR)
    assert one.report(other, []).terms.peer is None  # the first site has no place yet
    one.publish(0, ("10.0.0.1", 9000))
    one.publish(1, ("10.0.0.2", 9100))
    terms = {part: one.report(part, []).terms for part in (hub, other, worker)}
    assert [x.peer for x in terms.values()] == [("10.0.0.1", 9000), ("10.0.0.1", 9000), ("10.0.0.2", 9100)]
    one.publish(1, ("10.0.0.3", 9200))
    assert [one.report(part, []).terms == terms[part] for part in terms] == [True, True, False]
    one.publish(0, ("10.0.0.2", 9300))
    assert one.report(other, []).terms != terms[other]
    assert one.collect()[0] == ["site 0 is at 10.0.0.2 now: all go on from their checkpoints"]
    keys = terms[hub].keys
    one.publish(1, ("10.0.0.9", 9400))  # a machine that joined the cluster later: the certificate does not name it
    assert one.report(hub, []).terms.keys != keys
    one.stop(Site)
    assert (one.report(hub, []).stop, one.report(worker, []).stop) == (True, False)
    one.finish(0)
    assert not one.report(worker, []).stop
    one.finish(1)
    assert one.report(worker, []).stop, "it would look for the learners of its site in vain"


def test_the_report_of_a_lone_site_is_left_to_the_run():
    report = ["finished: 9 env steps in 1 s", "SIGTERM: checkpoint written", "resume:   coterie resume /tmp/run"]
    lone = Site(0, HERE, 1, 1, 0)
    for preset, changes, expected in (("ppo", {}, []), ("gala-ppo", {"learners": 2}, report[:2])):
        one = board(preset, hosts=3, **changes)
        one.report(lone, ["SIGTERM: saving a checkpoint", *report])
        assert [line.removeprefix("site 0: ") for line in one.collect()[0]] == [
            "SIGTERM: saving a checkpoint",
            *expected,
        ]


def test_a_site_without_a_summary_counts_with_its_last_checkpoint(tmp_path):
    folders = [tmp_path / name for name in "abc"]
    one = dict.fromkeys(
        ("env_steps", "env_frames", "learner_steps", "samples_trained", "episodes", "masked_steps"), 100
    )
    one |= {"rows": {"produced": 110, "learned": 100}, "env_steps_per_s": 5.0, "mean_return": 3.0, "seconds": 9.0}
    for folder in folders[:2]:
        folder.mkdir()
        (folder / "summary.json").write_text(json.dumps(one))
    save(folders[2], 70)
    total = sum_up(folders)
    assert (total["env_steps"], total["rows"]["produced"], total["without_summary"]) == (270, 220, ["site 2"])
    assert sum_up(folders[2:])["env_steps"] == 70
    assert "without_summary" not in sum_up(folders[:2])
    assert sum_up(folders[:1])["env_steps"] == 100


def test_sites_with_more_learners_have_more_hosts_and_a_larger_share_of_what_counts_for_all():
    machines = [Machine(name, f"10.0.0.{k}", 8, 0) for k, name in enumerate("ab", 1)]
    more = {"learners": 3, "actors": 12, "exchange": "gossip", "env.num_envs": 16, "eval.every": 900}
    found = layout("seed-r2d2", machines, **more, **{"replay.capacity": 30_000, "optim.schedule.at": (300, 600)})
    assert [one.learners for one in found.sites] == [2, 1]
    assert [sum(worker.site == k for worker in found.workers) for k in range(2)] == [8, 4]
    first, second = site(found, 0), site(found, 1)
    assert (first.replay.capacity, first.eval.every) == (20_000, 600)
    assert (second.replay.capacity, second.eval.every, second.optim.schedule.at) == (10_000, 300, (100, 200))
