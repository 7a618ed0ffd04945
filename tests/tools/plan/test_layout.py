"""Layouts of presets on given hardware, the search among them, and the command `coterie plan`."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product

import pytest

from coterie import presets
from coterie.acting.actor import ActorMemory
from coterie.acting.table import ACTING
from coterie.algorithms.table import algorithm_class
from coterie.build.factory import make_model, memory_setup
from coterie.build.resources import resolve_config
from coterie.build.validity import check
from coterie.cli.main import main
from coterie.envs.make import make_spec
from coterie.envs.tasks import envs_per_child
from coterie.errors import ConfigError
from coterie.exchange.table import EXCHANGES
from coterie.parallel.params import FlatParams
from coterie.roles.learner_process import LearnerProcess
from coterie.runs.config_io import replace as changed
from coterie.tools.plan import command
from coterie.tools.plan.layout import Hardware, RunLayout, layout
from coterie.tools.plan.measure import lone, provenance, sizes
from coterie.tools.plan.search import candidates, cheapest
from coterie.tools.plan.services import fit, load, save
from coterie.tools.plan.simulate import simulate
from tests.tools.plan.harness import COSTS, services

IMPALA = presets.impala(env="CartPole-v1")
SPEC = make_spec(IMPALA.env, IMPALA.atari)


def layouts(config, hardware, learners) -> dict[str, RunLayout | ConfigError]:
    found: dict[str, RunLayout | ConfigError] = {}
    for acting, exchange in product(ACTING, EXCHANGES):
        try:
            found[f"{acting} {exchange}"] = layout(config, SPEC, hardware, acting, exchange, learners)
        except ConfigError as error:
            found[f"{acting} {exchange}"] = error
    return found


def test_every_acting_and_exchange_has_a_layout_or_a_refusal():
    found = layouts(IMPALA, Hardware(cores=4), 2)
    assert list(found) == [f"{a} {x}" for a in ACTING for x in EXCHANGES]
    assert not any(isinstance(x, ConfigError) for x in found.values())
    assert {x.learners for x in found.values()} == {1, 2}
    a2c = presets.a2c(env="CartPole-v1")
    found = layouts(a2c, Hardware(cores=4, hosts=2), 2)
    assert [k for k, x in found.items() if isinstance(x, ConfigError)] == [
        f"{a} {x}" for a in ("decoupled", "central") for x in EXCHANGES
    ]
    assert all(x.lockstep for k, x in layouts(a2c, Hardware(4), 2).items() if "inline" not in k)


@pytest.mark.parametrize("name", ["a2c", "ppo", "dqn"])
def test_a_planned_inline_layout_is_that_of_the_learner(name):
    config = presets.make(name, "CartPole-v1", **{"env.num_envs": 32, "q.learn_start": 5000})
    learner = LearnerProcess(resolve_config(replace(config, env=replace(config.env, threads=1))))
    try:
        own = layout(config, SPEC, Hardware(cores=1), "inline", "solo", 1)
        assert own.width == learner.acting.envs.num_envs
        assert own.unroll == learner.acting.recorder.unroll_length
        assert (own.groups, own.act_threads) == (len(learner.acting.envs.groups), learner.acting.team.size)
        assert own.chunk == learner.resources.chunk
    finally:
        learner.close()


@pytest.mark.parametrize("learners", [1, 2])
def test_a_planned_decoupled_layout_is_that_of_the_actors(learners):
    config = changed(IMPALA, {"learners": learners, "exchange": "gossip" if learners > 1 else "solo", "actors": 4})
    config = changed(config, {"env.num_envs": 16})
    own = layout(config, SPEC, Hardware(cores=2), "decoupled", config.exchange, learners)
    model = make_model(config, SPEC)
    memory = ActorMemory(memory_setup(config, SPEC, model, FlatParams(model)))
    try:
        assert own.producers == 4 // learners
        assert own.width == envs_per_child(config)
        assert (own.batches, own.batch // own.width) == (memory.slots.batches, memory.slots.per_batch)
    finally:
        memory.close()


def test_each_host_of_a_planned_layout_adds_its_own_simulators():
    config = changed(IMPALA, {"env.num_envs": 16})
    for acting, each in (("decoupled", 4), ("central", 1)):
        own = layout(config, SPEC, Hardware(cores=2, hosts=3, host_cores=4), acting, "solo", 1)
        assert (own.producers, own.width, own.envs) == (3 * each, 16 // each, 48)
    with pytest.raises(ConfigError, match="hosts: 3 actors or hosts cannot be shared out evenly among 2 learners"):
        layout(config, SPEC, Hardware(cores=2, hosts=3), "central", "gossip", 2)


def test_a_planned_layout_knows_the_share_of_one_frame():
    config = presets.make("seed-vtrace", "Pong-v5", **{"env.num_envs": 4})
    spec = make_spec(config.env, config.atari)
    assert layout(config, spec, Hardware(hosts=1), "central", "solo", 1).frame_share == 1 / 4
    assert layout(IMPALA, SPEC, Hardware(hosts=1), "central", "solo", 1).frame_share == 1


def test_learners_on_several_machines_are_laid_out_like_those_on_one():
    config = changed(IMPALA, {"env.num_envs": 16})
    found = layouts(config, Hardware(cores=2, machines=3), 6)
    one = layout(config, SPEC, Hardware(cores=2), "decoupled", "gossip", 2)
    three = found["decoupled gossip"]
    assert (three.learners, three.producers, three.width) == (6, one.producers, one.width)
    assert found["inline solo"].hardware.machines == 1
    for name in ("inline hogwild", "central store"):
        assert "need exchange allreduce or gossip" in str(found[name])
    with pytest.raises(ConfigError, match="machines: 4 learners cannot be shared out evenly among 3 machines"):
        layout(config, SPEC, Hardware(machines=3), "inline", "gossip", 4)
    dqn = presets.dqn(env="CartPole-v1")
    with pytest.raises(ConfigError, match="use exchange gossip"):
        layout(dqn, SPEC, Hardware(machines=2), "inline", "allreduce", 2)


def updates(config, columns: int, unroll: int):
    return algorithm_class(config).updates(config, columns, unroll)


def test_each_algorithm_has_its_number_of_updates():
    ppo = presets.ppo(env="CartPole-v1", **{"ppo.epochs": 3, "ppo.minibatch_size": 100})
    assert updates(ppo, 16, 40) == (3 * 6, 640 / 6)
    assert updates(presets.a2c(env="CartPole-v1"), 16, 5) == (1, 80)
    dqn = presets.dqn(env="CartPole-v1", **{"q.batch_size": 32, "q.intensity": 4.0})
    assert updates(dqn, 16, 4) == (8.0, 32)
    replayed = {"vtrace.replay_capacity": 64, "vtrace.replay_share": 0.5, "vtrace.minibatch": 4}
    assert updates(changed(IMPALA, replayed), 8, 20) == (4, 80)


def test_a_planned_layout_costs_its_cores_gpus_and_hosts():
    hardware = Hardware(cores=4, gpus=2, hosts=3, host_cores=8, core_hour=1.0, gpu_hour=10.0)
    cost = {k: x.dollars_per_hour for k, x in layouts(changed(IMPALA, {"env.num_envs": 16}), hardware, 1).items()}
    assert cost["inline solo"] == 4 + 10
    assert cost["central solo"] == 4 + 10 + 24


def test_the_search_finds_what_trying_everything_finds():
    config = changed(IMPALA, {"env.num_envs": 8, "decoupled.batch_size": 8, "algo.unroll_length": 5})
    most = Hardware(cores=4, hosts=2, host_cores=2, latency=0.001)
    some = services(COSTS, env_cv=0.2)
    rated = [simulate(x, some) for x in candidates(config, SPEC, most)]
    assert len(rated) > 50
    for target in (50.0, 150.0, 250.0):
        able = [r for r in rated if r.frames_per_s >= target]
        best, _ = cheapest(config, SPEC, some, most, target)
        assert best is not None
        price = min(r.layout.dollars_per_hour for r in able)
        assert best.layout.dollars_per_hour == price
        assert best.frames_per_s == max(r.frames_per_s for r in able if r.layout.dollars_per_hour == price)
    none, most_of = cheapest(config, SPEC, some, most, 1e6)
    assert none is None
    assert most_of is not None
    assert most_of.frames_per_s > 0.99 * max(r.frames_per_s for r in rated)


# --- the command ---

PLAN = ("plan", "impala", "--env", "CartPole-v1")
SHORT = ("--json", "--cores", "2", "--env.num-envs", "8", "--decoupled.batch-size", "0")


@pytest.fixture
def given(tmp_path):
    save(services(env_cv=0.2), tmp_path / "given.json")
    return ("--services", str(tmp_path / "given.json"))


def test_plan_measures_this_machine_saves_the_services_and_prints_a_table(tmp_path, capsys):
    path = tmp_path / "services.json"
    assert main([*PLAN, "--seconds", "3", "--env.num-envs", "8", "--save-services", str(path)]) == 0
    out = capsys.readouterr().out
    assert len([line for line in out.splitlines() if line.split()[0] in ACTING]) == len(ACTING) * len(EXCHANGES)
    assert max(map(len, out.splitlines())) <= 140
    found = load(path)
    costs = found.costs
    assert found.obs_bytes == 16
    assert 0.5 < found.valid <= 1
    assert min(found.weight_bytes, costs.act(8), costs.env(8), costs.train(64), costs.wire(8)) > 0
    assert min(costs.exchange.values()) == costs.exchange["solo"] > 0


def test_plan_with_the_same_seed_prints_the_same_json(given, capsys):
    outs = []
    for _ in range(2):
        assert main([*PLAN, *given, *SHORT, "--seed", "7"]) == 0
        outs.append(capsys.readouterr().out)
    assert outs[0] == outs[1]
    plan = json.loads(outs[0])
    assert len(plan["layouts"]) == len(ACTING) * len(EXCHANGES)
    assert plan["env"] == "CartPole-v1"
    assert {"frames_per_s", "lag_mean", "lag_max", "busy", "bottleneck", "dollars_per_billion_frames"} <= set(
        plan["layouts"][0]
    )
    assert main([*PLAN, *given, *SHORT, "--seed", "8"]) == 0
    assert capsys.readouterr().out != outs[0]


def test_plan_prints_the_fixed_cost_of_each_part(tmp_path, capsys):
    save(services(costs=replace(COSTS, env=replace(COSTS.env, fixed=0.339))), tmp_path / "slow.json")
    assert main([*PLAN, "--services", str(tmp_path / "slow.json"), *SHORT[1:]]) == 0
    assert main([*PLAN, "--services", str(tmp_path / "slow.json"), "--algorithm", "sac"]) == 2
    costs = "env 10000.0 (+ 339000 a call), forward 1000.0 (+ 2000 a call), training 2000.0 (+ 3000 a call)\n"
    assert costs in capsys.readouterr().out


def test_plan_says_which_measurements_were_too_noisy(tmp_path, capsys):
    noisy = replace(COSTS, act=fit([(1, 4, 1.2), (1, 16, 0.8)]), train=fit([(1, 4, 0.7), (1, 16, 0.72)]))
    save(services(costs=noisy), tmp_path / "noisy.json")
    assert main([*PLAN, "--services", str(tmp_path / "noisy.json"), *SHORT]) == 0
    assert capsys.readouterr().err == "coterie: too noisy to measure: act (use an idle machine, or --seconds 120)\n"


def test_plan_does_without_an_exchange_that_the_services_have_no_cost_of(tmp_path, capsys):
    some = {name: seconds for name, seconds in COSTS.exchange.items() if name != "gossip"}
    save(services(costs=replace(COSTS, exchange=some)), tmp_path / "s.json")
    given = ("--services", str(tmp_path / "s.json"))
    assert main([*PLAN, *given, "--cores", "2"]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith(
        "not possible: inline gossip, decoupled gossip, central gossip: the services have no cost of"
    )
    assert line.endswith(f" of exchange gossip, only of {', '.join(some)}")
    assert main([*PLAN, *given, "--cores", "2", "--target", "100"]) == 0
    assert "cheapest for 100 frames/s" in capsys.readouterr().out
    save(services(costs=replace(COSTS, exchange={})), tmp_path / "s.json")
    assert main([*PLAN, *given]) == 2
    assert capsys.readouterr().err.endswith("s.json is not a services file of this version: it lacks 'solo'\n")


def test_plan_says_where_the_services_were_measured_with_something_else(tmp_path, capsys):
    here = provenance(IMPALA)
    for about, other in ((here, ""), (here | {"env": "Pong-v5", "hidden": [8]}, "env Pong-v5, hidden [8]")):
        save(services(about=about), tmp_path / "s.json")
        assert main([*PLAN, "--services", str(tmp_path / "s.json"), *SHORT]) == 0
        assert capsys.readouterr().err == (
            other and f"coterie: the services were measured with other settings: {other}\n"
        )


def test_plan_makes_the_folder_of_the_services_before_it_measures(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "measure", lambda config, seconds: services())
    assert main([*PLAN, *SHORT, "--save-services", str(tmp_path / "new" / "s.json")]) == 0
    assert load(tmp_path / "new" / "s.json") == services()
    (tmp_path / "file").touch()
    capsys.readouterr()
    monkeypatch.setattr(command, "measure", None)
    for bad in (tmp_path / "file" / "s.json", tmp_path, "/proc/s.json"):
        assert main([*PLAN, "--save-services", str(bad)]) == 2
        assert capsys.readouterr().err.startswith("coterie: --save-services: ")


def test_plan_prints_the_cheapest_layout_for_a_target_or_that_there_is_none(given, capsys):
    few = SHORT[1:]
    assert main([*PLAN, *given, *few, "--target", "100"]) == 0
    out = capsys.readouterr().out.splitlines()
    (line,) = [x for x in out if x.startswith("cheapest for 100 frames/s")]
    assert "dollars an hour" in line
    assert main([*PLAN, *given, *few, "--target", "1e7"]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("no layout within these bounds reaches 10,000,000 fr")


def test_plan_of_several_machines_has_their_exchanges_only(given, capsys):
    assert main([*PLAN, *given, "--cores", "2", "--machines", "2", "--latency", "0.01"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert "2 machines of learners: 2 cores, 0 GPUs; 10 ms apart" in out[0]
    counts = {tuple(line.split()[:3]) for line in out if line.split()[0] in ACTING}
    assert counts == {(a, x, n) for a in ACTING for x, n in (("solo", "1"), ("allreduce", "4"), ("gossip", "4"))}
    assert "not possible: inline hogwild, inline store, " in out[-1]


def test_plan_with_gpus_needs_services_of_an_accelerator(given, capsys):
    assert main([*PLAN, *given, "--gpus", "1"]) == 2
    assert capsys.readouterr().err == (
        "coterie: --gpus: the services have no accelerator: measure them where there is one\n"
    )


@pytest.mark.parametrize("name", presets.PRESETS)
@pytest.mark.parametrize("env", ["CartPole-v1", "Pong-v5"])
def test_the_measured_learner_of_every_preset_is_a_valid_run(name, env):
    if name in ("seed-football", "sac"):
        env = "CartPole-v1" if name != "sac" else "Pendulum-v1"
    config = presets.make(name, env, **({"bc.dataset": "any"} if name == "bc" else {}))
    widths = sizes(config)
    assert 1 <= widths[0] < widths[1]
    assert all(width % 3 == 0 for width in sizes(config, 3))
    for width in widths:
        one = lone(config, width, widths[-1])
        assert one.env.num_envs == width
        check(one, make_spec(one.env, one.atari))
