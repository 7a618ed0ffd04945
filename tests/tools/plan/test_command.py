"""The command `coterie plan`, with services measured here and from a file."""

from __future__ import annotations

import json

import pytest

from coterie.acting.table import ACTING
from coterie.build.validity import check
from coterie.cli.main import main
from coterie.envs.make import make_spec
from coterie.exchange.table import EXCHANGES
from coterie.presets import PRESETS, make
from coterie.tools.plan.measure import lone, sizes
from coterie.tools.plan.services import load, save
from tests.tools.plan.harness import services

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


def test_plan_prints_the_cheapest_layout_for_a_target_or_that_there_is_none(given, capsys):
    few = SHORT[1:]
    assert main([*PLAN, *given, *few, "--target", "100"]) == 0
    out = capsys.readouterr().out.splitlines()
    (line,) = [x for x in out if x.startswith("cheapest for 100 frames/s")]
    assert "dollars an hour" in line
    assert main([*PLAN, *given, *few, "--target", "1e7"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("no layout within these bounds makes 10,000,000 frames")


def test_plan_of_several_machines_has_their_exchanges_only(given, capsys):
    assert main([*PLAN, *given, "--cores", "2", "--machines", "2", "--latency", "0.01"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert "2 machine(s) of learners: 2 cores, 0 GPUs; 10 ms apart" in out[0]
    counts = {tuple(line.split()[:3]) for line in out if line.split()[0] in ACTING}
    assert counts == {(a, x, n) for a in ACTING for x, n in (("solo", "1"), ("allreduce", "4"), ("gossip", "4"))}
    assert "not possible: inline hogwild, inline store, " in out[-1]


def test_plan_with_gpus_needs_services_of_an_accelerator(given, capsys):
    assert main([*PLAN, *given, "--gpus", "1"]) == 2
    assert capsys.readouterr().err == (
        "coterie: --gpus: the services have no accelerator: measure them where there is one\n"
    )


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("env", ["CartPole-v1", "Pong-v5"])
def test_the_measured_learner_of_every_preset_is_a_valid_run(name, env):
    if name == "seed-football":
        env = "CartPole-v1"
    config = make(name, env)
    widths = sizes(config)
    assert 1 <= widths[0] < widths[1]
    for width in widths:
        one = lone(config, width, widths[-1])
        assert one.env.num_envs == width
        check(one, make_spec(one.env, one.atari))
