"""The simulated run and its parts against closed forms, what holds in every layout, and services in files."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace

import numpy as np
import pytest
import simpy

from coterie.errors import ConfigError
from coterie.tools.plan.des import Barrier, Cores
from coterie.tools.plan.layout import Hardware
from coterie.tools.plan.search import ceiling
from coterie.tools.plan.services import LinearCost, fit, load, save
from coterie.tools.plan.simulate import World, simulate
from tests.tools.plan.harness import BARE, COSTS, EXCHANGE, layout, services

TWO = Hardware(cores=2)


def test_one_env_on_one_core_takes_the_sum_of_its_parts():
    result = simulate(layout(), services())
    c = COSTS
    seconds = 4 * (c.env(1) + c.act(1)) + c.unroll(1) + c.train(4) + EXCHANGE["solo"]
    assert result.env_steps_per_s == pytest.approx(4 / seconds, rel=1e-9)
    assert (result.lag_mean, result.lag_max) == (0, 0)
    assert result.busy["learner cores"] == pytest.approx(1.0)
    assert result.parts["learner cores"]["env"] == pytest.approx(4 * c.env(1) / seconds)
    assert result.bottleneck == "learner cores: env"
    counted = simulate(layout(), services(action_repeat=4, valid=0.5))
    assert counted.frames_per_s == pytest.approx(2 * result.env_steps_per_s)
    dollars = Hardware().core_hour / (3600 * 4 / seconds) * 1e9
    assert result.dollars_per_billion_frames == pytest.approx(dollars)


def test_two_groups_hide_the_shorter_of_env_and_forward():
    """Bare costs: a group's envs take 20 ms, its forward 2: each group in turn, 2 groups, 2 cores and a thread each."""
    two = layout(hardware=TWO, width=4, batch=4, groups=2, act_threads=2, train_threads=2, unroll=100)
    assert simulate(two, services(BARE)).env_steps_per_s == pytest.approx(4 / 0.022, rel=0.01)
    one = replace(two, act_threads=1, env_threads=1)  # one thread acts: its two forwards hide behind the envs
    assert simulate(one, services(BARE)).env_steps_per_s == pytest.approx(4 / 0.022, rel=0.02)


def test_envs_that_wait_leave_the_core_to_others():
    """A step of 10 ms needs a core for 1 ms of it; a forward takes 2."""
    waits = services(BARE, env_waits=0.9)
    own = layout(width=4, batch=4, env_threads=4, unroll=100)
    assert simulate(own, waits).env_steps_per_s == pytest.approx(4 / (4 * 0.001 + 0.009 + 0.002), rel=0.01)
    actors = layout("decoupled", hardware=TWO, producers=2, width=4, batch=8, env_threads=2)  # unrolls of 4 steps
    found = simulate(actors, waits)
    assert found.env_steps_per_s == pytest.approx(2 * 16 / (16 * (0.001 + 0.009 / 2) + 4 * 0.002), rel=0.01)
    assert found.env_steps_per_s < ceiling(actors, waits)
    assert found.bottleneck.startswith("waiting")


def test_two_hogwild_learners_are_one_update_stale():
    result = simulate(layout("inline", "hogwild", TWO, learners=2), services(env_cv=0.1))
    assert result.stale_mean == pytest.approx(1.0, abs=0.1)  # the other one updates once meanwhile
    assert result.lag_max == 0


@pytest.mark.parametrize("batches", [2, 3, 5])
def test_the_lag_of_local_actors_is_bounded_by_the_batches(batches):
    """A slow learner: all open batches are full, and each was acted with weights as old as its opening."""
    slow = replace(COSTS, train=LinearCost(1.0, 0.0))
    own = layout("decoupled", hardware=Hardware(cores=4), producers=2, batch=2, batches=batches)
    result = simulate(own, services(slow))
    assert result.lag_max <= batches
    assert result.lag_mean == pytest.approx(batches - 1)
    assert result.bottleneck == "learner"
    assert simulate(replace(own, lockstep=True, batches=1), services(slow)).lag_max == 0


def test_decoupled_actors_and_the_learner_share_the_cores():
    """No core is idle while there is work: two actors and a learner on two cores do both cores' worth of it."""
    own = layout("decoupled", hardware=TWO, producers=2, width=4, batch=8)
    c = COSTS
    work = 4 * (4 * c.env.each + c.act(4)) + c.unroll(4)  # of an actor's unroll
    work += (c.train(32) + EXCHANGE["solo"]) / 2
    assert simulate(own, services()).env_steps_per_s == pytest.approx(2 * 16 / work, rel=0.03)


def test_central_with_one_server_is_a_closed_queue():
    """N clients that think for Z seconds and one server that takes S for each: min(N / (Z + S), 1 / S)."""
    for hosts in (1, 6, 12):
        hardware = Hardware(cores=4, hosts=hosts)
        own = layout("central", hardware=hardware, producers=hosts, unroll=50, batches=50, **{"central.batch_max": 1})
        rate = simulate(own, services(BARE)).env_steps_per_s
        assert rate == pytest.approx(min(hosts / 0.012, 1 / 0.002), rel=0.02)


def test_central_acting_waits_for_its_smallest_batch_but_not_without_end():
    hardware = Hardware(cores=4, hosts=2)
    patient = {"central.batch_min": 2, "central.wait": 1.0}
    own = layout("central", hardware=hardware, producers=2, unroll=50, batches=50, **patient)
    assert simulate(own, services(BARE)).env_steps_per_s == pytest.approx(2 / 0.012, rel=0.02)
    alone = replace(own, producers=1, hardware=replace(hardware, hosts=1))
    assert simulate(alone, services(BARE)).env_steps_per_s == pytest.approx(1 / 0.012, rel=0.02)  # no more are there


def test_the_lag_of_central_acting_is_bounded_by_max_lag():
    """A slow learner: its memory has room for far more rollouts than may begin."""
    slow, own = replace(COSTS, train=LinearCost(1.0, 0.0)), layout("central", producers=4, batches=20)
    bounded = replace(own, config=replace(own.config, max_lag=9))
    assert simulate(bounded, services(slow)).lag_max <= 9 < simulate(own, services(slow)).lag_mean


def test_latency_and_bandwidth_slow_a_host_down():
    own = layout("central", hardware=Hardware(cores=4, hosts=1, latency=0.01), unroll=50, batches=50)
    assert simulate(own, services(BARE)).env_steps_per_s == pytest.approx(1 / (0.012 + 0.02), rel=0.01)
    thin = replace(own, hardware=Hardware(cores=4, hosts=1, bandwidth=1000.0))
    result = simulate(thin, services(BARE, obs_bytes=100.0))
    assert result.env_steps_per_s == pytest.approx(1 / (0.012 + 0.1 + 0.008), rel=0.01)
    newest = layout("central", hardware=thin.hardware, unroll=50, batches=50, **{"central.newest_frame": True})
    result = simulate(replace(newest, frame_share=0.25), services(BARE, obs_bytes=100.0))
    assert result.env_steps_per_s == pytest.approx(1 / (0.012 + 0.025 + 0.008), rel=0.01)
    many = replace(thin, producers=20, hardware=replace(thin.hardware, hosts=20))
    full = simulate(many, services(BARE, obs_bytes=100.0))
    assert full.env_steps_per_s == pytest.approx(10.0, rel=0.02)
    assert full.bottleneck == "network in"


def test_actors_on_hosts_pay_for_weights_and_rollouts():
    hardware = Hardware(cores=4, hosts=1, bandwidth=1000.0, latency=0.05)
    own = layout("decoupled", hardware=hardware, batches=3)
    result = simulate(own, services(BARE, obs_bytes=10.0, weight_bytes=100.0))
    unroll = 4 * 0.012
    assert result.env_steps_per_s == pytest.approx(4 / (unroll + 0.1 + 4 * 0.05 + 0.04), rel=0.01)


def test_a_stores_lock_is_held_by_one_learner_at_a_time():
    costs = replace(BARE, env=LinearCost(), act=LinearCost(), exchange=EXCHANGE)
    for chunks in (1, 3):
        own = layout("inline", "store", Hardware(cores=4), learners=4, **{"store.chunks": chunks})
        rate = simulate(own, services(costs)).env_steps_per_s / 4
        assert rate == pytest.approx(min(chunks, 4) / EXCHANGE["store"], rel=0.05)


def test_an_all_reduce_between_machines_takes_its_messages_time():
    """A ring of 4: six messages of a quarter of the weights, one after the other (exchange/elastic.py)."""
    hardware = Hardware(machines=4, latency=0.01, bandwidth=1000.0)
    own = layout("inline", "allreduce", hardware, learners=4)
    costs = replace(BARE, exchange=dict.fromkeys(EXCHANGE, 0.0))
    result = simulate(own, services(costs, weight_bytes=80.0))
    assert result.env_steps_per_s == pytest.approx(16 / (4 * 0.012 + 6 * (0.01 + 0.02)), rel=1e-6)
    assert result.layout.dollars_per_hour == pytest.approx(4 * hardware.core_hour)
    assert result.busy["network in"] == pytest.approx(6 * 0.02 / (4 * 0.012 + 0.18))
    thin = replace(own, hardware=replace(hardware, bandwidth=10.0))
    assert simulate(thin, services(costs, weight_bytes=80.0)).bottleneck.startswith("network")


def test_gossip_between_machines_waits_for_messages_only_in_lockstep():
    near, far = Hardware(machines=3), Hardware(machines=3, latency=0.5)
    rates = [
        simulate(layout("inline", "gossip", h, learners=3, **{"gossip.tau": tau}), services()).env_steps_per_s
        for h, tau in ((near, -1), (far, -1), (far, 0))
    ]
    assert rates[1] == pytest.approx(rates[0], rel=1e-9)
    assert rates[2] < 3 * 4 / 1.0


EVERY = [
    layout("inline", "gossip", Hardware(2, machines=2, bandwidth=1e5), learners=4, width=4, batch=4),
    layout("central", "allreduce", Hardware(2, machines=2, hosts=2), learners=2, producers=1, width=4, batch=4),
    layout("inline", "store", TWO, learners=2, width=4, batch=4, groups=2, **{"store.chunks": 3}),
    layout("decoupled", "gossip", TWO, learners=2, producers=2, width=4, batch=8),
    layout("decoupled", "solo", Hardware(2, hosts=2, host_cores=2, bandwidth=1e5), producers=4, batch=2),
    layout("central", "allreduce", TWO, learners=2, producers=2, width=4, groups=2, batch=3),
    layout("central", "solo", Hardware(2, hosts=3, latency=0.01), producers=3, width=4, groups=2, batch=5),
    layout("central", "solo", TWO, producers=2, width=2, batch=4, lockstep=True, batches=1),
    layout("central", "hogwild", TWO, learners=2, steps=0.5),
]


@pytest.mark.parametrize("own", EVERY, ids=lambda x: f"{x.name} {x.hosts}")
def test_shares_lag_and_ceiling_are_consistent_in_every_layout(own):
    some = services(env_cv=0.5, obs_bytes=10.0, weight_bytes=100.0)
    result = simulate(own, some, seed=3)
    assert result.env_steps_per_s > 0
    assert result == simulate(own, some, seed=3)
    assert result.env_steps_per_s != simulate(own, some, seed=4).env_steps_per_s
    for name, mine in result.parts.items():
        assert result.busy[name] == pytest.approx(sum(mine.values()), rel=0.02)
    assert all(0 <= share <= 1 + 1e-6 for share in result.busy.values())
    assert result.env_steps_per_s <= 1.1 * ceiling(own, some)
    assert 0 <= result.lag_mean <= result.lag_max
    if own.lockstep:
        assert result.lag_max == 0


def test_value_learning_trains_as_often_as_its_intensity_says():
    half = layout(steps=0.5, samples=8.0)
    world = World(half, services())
    world.run(10)
    (learner,) = world.learners
    assert (learner.rollouts, learner.steps) == (10, 5)


def test_an_accelerator_takes_acting_and_training_off_the_cores():
    hardware = Hardware(cores=2, gpus=1)
    some = services(accelerator=replace(COSTS, act=LinearCost(0.001, 0.0), train=LinearCost(0.001, 0.0)))
    result = simulate(layout(hardware=hardware), some)
    seconds = 4 * (COSTS.env(1) + 0.001) + COSTS.unroll(1) + 0.001 + EXCHANGE["solo"]
    assert result.env_steps_per_s == pytest.approx(4 / seconds)
    assert set(result.parts["learner cores"]) == {"env"}
    assert result.layout.dollars_per_hour == pytest.approx(2 * hardware.core_hour + hardware.gpu_hour)


# --- the parts ---


def test_a_job_runs_on_one_core_at_most():
    sim = simpy.Environment()
    cores = Cores(sim, 4)
    sim.run(until=cores.work(2.0, "x"))
    assert sim.now == pytest.approx(2.0)
    assert cores.work(0.0, "x").triggered


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_sojourn_under_processor_sharing_depends_on_the_load_only(load):
    """M/G/1 with processor sharing: E[T] = E[S] / (1 - rho), here for services that vary and for some that do not."""
    for fixed in (True, False):
        sim, rng = simpy.Environment(), np.random.default_rng(0)
        cores, took = Cores(sim, 1), []

        def job(cores=cores, took=took, sim=sim, rng=rng, fixed=fixed):
            begin = sim.now
            yield cores.work(1.0 if fixed else rng.gamma(0.5, 2.0), "x")
            took.append(sim.now - begin)

        def arrivals(sim=sim, rng=rng, job=job):
            for _ in range(20_000):
                yield sim.timeout(rng.exponential(1 / load))
                sim.process(job())

        sim.process(arrivals())
        sim.run()
        assert np.mean(took) == pytest.approx(1 / (1 - load), rel=0.1)


def test_a_barrier_begins_when_all_members_have_joined():
    sim, begun = simpy.Environment(), []
    barrier = Barrier(sim, 2)

    def member(pause: float):
        for _ in range(2):
            yield sim.timeout(pause)
            yield barrier.join()
            begun.append(sim.now)

    sim.process(member(1.0))
    sim.process(member(5.0))
    sim.run()
    assert begun == [5.0, 5.0, 10.0, 10.0]


def test_fitted_costs_recover_the_line_that_was_measured():
    line = LinearCost(0.003, 0.0005)
    assert fit([(1, n, line(n)) for n in (4, 16)]) == LinearCost(pytest.approx(0.003), pytest.approx(0.0005))
    parts = [(1, 160, line(160)), (4, 1280, 4 * line.fixed + 1280 * line.each)]  # `fixed` for each of four parts
    assert fit(parts) == LinearCost(pytest.approx(0.003), pytest.approx(0.0005))


def test_fitted_costs_are_never_negative_seconds():
    assert fit([(1, 4, 1.0), (1, 16, 5.0)]) == LinearCost(0.0, pytest.approx(0.3))  # would begin below 0
    assert fit([(1, 4, 1.2), (1, 16, 0.8)]) == LinearCost(pytest.approx(1.0), 0.0)  # would fall
    assert fit([(1, 4, 1.2), (1, 16, 0.8)]).misfit == pytest.approx(0.25)  # 1.0 where 0.8 was measured
    assert fit([(1, 320, 1.0), (4, 1280, 4.0)]) == LinearCost(0.0, pytest.approx(1 / 320))  # cannot be told apart


def test_measured_services_are_saved_and_loaded(tmp_path):
    some = services(env_cv=0.3, action_repeat=4, accelerator=COSTS, about={"env": "made-up"})
    save(some, tmp_path / "s.json")
    assert load(tmp_path / "s.json") == some


WRONG = [{"accelerator": asdict(replace(COSTS, train=LinearCost(x)))} for x in (-1, "x", math.inf)]
WRONG += [{"env_cv": math.nan}, {"env_cv": 10**400}, {"about": 3}]


@pytest.mark.parametrize(
    "change", [{"costs": None}, {"costs": {"act": 3}}, {"alone": {}}, {"valid": 2}, {"action_repeat": "much"}, *WRONG]
)
def test_a_file_that_is_not_of_services_is_refused(tmp_path, change):
    save(services(), tmp_path / "s.json")
    data = json.loads((tmp_path / "s.json").read_text())
    (tmp_path / "s.json").write_text(json.dumps(data | change))
    with pytest.raises(ConfigError, match="is not a services file of this version"):
        load(tmp_path / "s.json")
