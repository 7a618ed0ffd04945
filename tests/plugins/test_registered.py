"""An acting and an exchange from outside the package, each in one file: they pass the conformance test, and train."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from coterie.acting.table import ACTING
from coterie.cli.main import main
from coterie.exchange.table import EXCHANGES
from coterie.tools.plan.services import save
from tests.plugins.page import coterie, train
from tests.test_conformance import check_cartpole, check_counting_env
from tests.tools.plan.harness import COSTS, services

PARTS = Path(__file__).parent / "parts"
MODULES = [f"tests.plugins.parts.{name}" for name in ("memory_acting", "elastic")]


@pytest.fixture
def _registered():
    """The parts are registered in this process for one test only: other tests go through all built-in ones."""
    for name in MODULES:
        importlib.import_module(name)
    yield
    del ACTING["memory"], EXCHANGES["elastic"]
    for name in MODULES:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("algorithm", "acting", "exchange"),
    [("a2c", "memory", "elastic"), ("dqn", "memory", "solo"), ("vtrace", "inline", "elastic")],
)
@pytest.mark.usefixtures("_registered")
def test_registered_parts_pass_the_conformance_test(algorithm, acting, exchange):
    actors = {"actors": 2} if acting == "memory" else {}
    check_counting_env(algorithm, acting, exchange, 1, **actors)
    check_cartpole(algorithm, acting, exchange, 1, **actors)


@pytest.mark.usefixtures("_registered")
def test_plan_simulates_a_registered_part_that_gives_its_simulation(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    costs = replace(COSTS, exchange={**COSTS.exchange, "elastic": 1.01})
    save(services(costs), Path("made-up.json"))
    args = ["plan", "a2c", "--env", "CartPole-v1", "--services", "made-up.json", "--cores", "2", "--learners", "2"]
    assert main([*args, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rates = {(x["layout"]["acting"], x["layout"]["exchange"]): x["env_steps_per_s"] for x in found["layouts"]}
    assert rates["inline", "elastic"] < 0.9 * rates["inline", "solo"] * 2  # it costs a second in every fourth step
    reason = "this acting or exchange was registered without a simulation"
    assert {k: v for k, v in found["refused"].items() if "memory" in k} == dict.fromkeys(
        (f"memory {exchange}" for exchange in EXCHANGES), reason
    )
    assert main([*args[:-2], "--target", "9"]) == 0


def test_registered_parts_train_and_resume_in_processes_of_their_own(tmp_path):
    for path in PARTS.glob("*.py"):
        shutil.copy(path, tmp_path)
    args = ["a2c", "--env", "CartPole-v1", "--acting", "memory", "--exchange", "elastic", "--env.groups", "1"]
    sizes = ["--learners", "2", "--actors", "4", "--env.num-envs", "8", "--steps", "4000"]
    summary = train(tmp_path, "run", *args, *sizes, "--plugins.modules", "memory_acting", "elastic")
    assert summary["status"] == "finished"
    assert summary["env_steps"] >= 4000
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (config["acting"], config["exchange"]) == ("memory", "elastic")
    done = coterie(tmp_path, "resume", "run", "--steps", "6000")
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--acting", "other"), "acting: 'other' is not one of inline, decoupled, central"),
        (("--exchange", "other"), "exchange: 'other' is not one of solo, allreduce, hogwild, store, gossip"),
        (("--plugins.modules", "nowhere"), "plugins.modules: cannot import 'nowhere': No module named 'nowhere'"),
    ],
)
def test_a_name_that_no_module_registered_is_one_line(tmp_path, monkeypatch, capsys, args, says):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "a2c", "--env", "CartPole-v1", *args, "--steps", "100", "--out", "run"]) == 2
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()
