"""Parts from outside the package: how they are named, and that registered ones pass the conformance test and train."""

from __future__ import annotations

import importlib
import json
import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from coterie import choices, presets
from coterie.acting.inline import Inline
from coterie.acting.table import ACTING, register_acting
from coterie.algorithms.table import ALGORITHMS, algorithm_class, register_algorithm
from coterie.cli.main import main
from coterie.config import Config
from coterie.envs.workers import worker_declared
from coterie.errors import ConfigError, CoterieError
from coterie.exchange.solo import Solo
from coterie.exchange.table import EXCHANGES, register_exchange
from coterie.plugins import named
from coterie.roles.life import not_restored
from coterie.runs.config_io import replace as changed
from coterie.tools.plan.services import save
from tests.plugins.page import train, write_files
from tests.support.commands import coterie
from tests.support.options import parse_cli
from tests.test_conformance import check_cartpole, check_counting_env
from tests.tools.plan.harness import COSTS, services

COUNTS = """
import torch
from coterie.algorithms.a2c import A2C
from coterie.algorithms.base import combine

class Number(A2C):
    n = 0

    def batches(self, model, rollout):
        self.n += 1
        yield from super().batches(model, rollout)

    def state_dict(self):
        return {**super().state_dict(), "n": self.n}

class Forgets(Number):
    def state_dict(self):
        return {**super().state_dict(), "n": torch.tensor(self.n)}

    def load_state_dict(self, state):
        super().load_state_dict({k: x for k, x in state.items() if k != "n"})

class Mean(A2C):
    def loss(self, model, batch):
        params, value, _ = model(batch.inputs, batch.core_state)
        return combine({"policy_loss": (1.0, value.mean())}, {}, batch.mask, batch.count)
"""
PARTS = Path(__file__).parent / "parts"
MODULES = [f"tests.plugins.parts.{name}" for name in ("memory_acting", "elastic")]


@pytest.fixture
def _registered():
    """The parts are registered in this process for one test only: other tests go through all built-in ones."""
    for name in MODULES:
        importlib.import_module(name)
    yield
    del ACTING.kinds["memory"], EXCHANGES.kinds["elastic"]
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
    reason = "this acting mode or exchange was registered without a simulation"
    assert {k: v for k, v in found["refused"].items() if "memory" in k} == dict.fromkeys(
        (f"memory {exchange}" for exchange in EXCHANGES), reason
    )
    assert main([*args[:-2], "--target", "9"]) == 0


@pytest.mark.usefixtures("_registered")
def test_modules_that_register_parts_are_kept_for_other_processes():
    config = changed(Config(), {"acting": "memory", "exchange": "elastic", "plugins.modules": ("mine",)})
    assert sorted(choices.with_modules(config).plugins.modules) == ["mine", *sorted(MODULES)]
    assert choices.with_modules(Config()).plugins.modules == ()


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
        (("--algorithm", "nowhere:Mine"), "algorithm: cannot import 'nowhere:Mine': No module named 'nowhere'"),
        (
            ("--algorithm", "__main__:X"),
            "has no attribute 'X'; give the object itself, or move it to a file of its own",
        ),
        (("--acting", "late:Nope"), "plugins.acting: cannot import 'late:Nope': module 'late' has no attribute 'Nope'"),
        (("--exchange", ":"), "plugins.exchange: cannot import ':': it is not package.module:callable"),
        (("--exchange", ".mine:X"), "plugins.exchange: cannot import '.mine:X': it is not package.module:callable"),
        (("--acting", "late:Late.every"), "plugins.acting: 'late:Late.every' is int, which cannot be called"),
        (("--exchange", "local_sgd:LocalSGD"), "local_sgd:LocalSGD is a subclass of AllReduce, but this run uses Solo"),
        (("--exchange", "late:short"), "plugins.exchange: late:short must take other arguments: too many positional"),
        (("--algorithm", "late:Half"), "algorithm: late:Half must define batches, loss"),
        (("--exchange", "late:Part"), "plugins.exchange: late:Part must define load_state_dict, state_dict, step"),
        (("--algorithm", "late:short"), "algorithm: late:short is not a subclass of coterie.algorithms.base.Algorithm"),
        *(
            (("--model.network", f"tests.support.networks:{name}"), says)
            for name, says in (
                ("narrow", "model.network: it returned parameters of shape (6, 1), not (6, 2)"),
                ("valueless", "model.network: it returned values of shape None, not (6,)"),
                ("wide", "model.network: it returned values of shape (6, 2), not (6,)"),
                ("stateful", "model.network: it returned a core state of shape (6,), not None"),
                ("stateless", "model.network: its forward must return parameters, values and the next core state"),
                ("centered", "model: what it makes of an env depends on the other envs of the batch"),
                ("Endless", "model: where is_first is True, the core state of the episode before must have no effect"),
                ("Lengthy", "model: two steps at once must give what they do one by one, with the core state between"),
                ("not_a_module", "model.network: it must be a torch.nn.Module, not NoneType"),
                ("Leaky", "model.network: tests.support.networks:Leaky must take other arguments: too many"),
                ("Batched", "model: forward changes the buffer body.layers.3.running_mean"),
                ("Dropping", "model: two passes over the same rows differ; dropout, for example, is not supported"),
            )
        ),
        (("--algorithm", "mine"), "package.module:Class, or a module of plugins.modules registers it"),
        (("--acting", "other"), "acting: 'other' is not one of inline, decoupled, central"),
        (("--exchange", "other"), "exchange: 'other' is not one of solo, allreduce, hogwild, store, gossip"),
        (("--plugins.modules", "nowhere"), "plugins.modules: cannot import 'nowhere': No module named 'nowhere'"),
        (("--env", "nowhere:Env"), "or on PYTHONPATH: change to the folder that has it, or add that to PYTHONPATH"),
        (("--model.torso", "late:none"), "model.torso: it must be a torch.nn.Module with size, the width of its"),
    ],
)
def test_a_part_that_cannot_be_used_is_one_line_and_leaves_nothing(tmp_path, monkeypatch, capsys, args, says):
    write_files(tmp_path)
    with (tmp_path / "late.py").open("a") as file:
        file.write("\ndef short():\n    return None\n\ndef none(obs, config):\n    return None\n")
        file.write("\nfrom coterie.algorithms.base import AlgorithmBase\n\n")
        file.write("\nclass Half(AlgorithmBase):\n    on_policy, act = True, short\n")
        file.write("\nfrom coterie.exchange.base import Exchange\n\n\nclass Part(Exchange):\n")
        file.write("    def __init__(self, setup):\n        pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["train", "a2c", "--env", "CartPole-v1", "--learners", "1", *args, "--out", "run"]) == 2
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_state_that_is_not_restored_or_no_tensor_is_named(tmp_path, monkeypatch, capsys):
    (tmp_path / "counts.py").write_text(COUNTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    sizes = ["--env.num-envs", "2", "--algo.unroll-length", "8", "--log.tensorboard", "False"]
    run = ["train", "a2c", "--env", "CartPole-v1", "--learners", "1", *sizes]
    assert main([*run, "--algorithm", "counts:Forgets", "--steps", "32", "--out", "run"]) == 0
    assert main(["resume", "run", "--steps", "64"]) == 0
    assert "algorithm: load_state_dict has not restored 'n': it is not as in" in (tmp_path / "run/log.txt").read_text()
    assert main([*run, "--algorithm", "counts:Number", "--steps", "32", "--out", "other"]) == 1
    assert "algorithm: state_dict()['n'] must be a tensor, not int" in capsys.readouterr().err
    assert main([*run, "--algorithm", "counts:Mean", "--steps", "32", "--out", "third"]) == 1
    assert "algorithm: the loss's 'policy_loss' has shape [], not [16]: one number" in capsys.readouterr().err


def test_the_state_of_an_exchange_from_outside_is_compared():
    config: Any = changed(Config(), {"learners": 2, "exchange": "allreduce", "plugins.exchange": "local:SGD"})
    kept = {"n": torch.tensor(3), "x": torch.tensor([math.nan])}
    part: Any = SimpleNamespace(state_dict=lambda: {**kept, "n": torch.tensor(0)})
    (line,) = not_restored(config, {"algorithm": {}, "exchange": kept}, part, part)
    assert line.startswith("exchange: load_state_dict has not restored 'n'")


@pytest.mark.parametrize(("wrong", "error"), [("1 / 0", "ZeroDivisionError"), ("dict.x", "AttributeError")])
def test_an_error_in_a_users_module_is_shown_whole(tmp_path, monkeypatch, wrong, error):
    (tmp_path / "broken.py").write_text(f"{wrong}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for field, use in (
        ("plugins.acting", lambda field: named(field, "broken:Any")),
        ("plugins.modules", lambda field: algorithm_class(changed(Config(), {field: ("broken",)}))),
        ("env.id", lambda field: worker_declared(changed(Config(), {field: "broken:Any"}).env)),
    ):
        with pytest.raises(CoterieError, match=rf"^{field}: cannot import 'broken.*': {error}: .*line 1") as e:
            use(field)
        assert wrong in e.value.trace


def test_a_part_is_registered_once_and_its_module_takes_the_place_of_the_script(monkeypatch):
    monkeypatch.setattr(choices, "_MODULES", {("acting", "mine"): "__main__"})
    table = choices.Choices(mine=1, ppo=2)
    (lambda: choices.register(table, "acting", "mine", 3, int))()
    assert (table["mine"], choices._MODULES) == (3, {("acting", "mine"): __name__})
    (lambda: choices.register(choices.Choices(), "acting", "dqn", 3, int))()
    assert not choices.is_own("algorithm", changed(Config(), {"algorithm": "dqn"}))
    with pytest.raises(ConfigError, match=r"^acting: 'ppo' is registered already$"):
        (lambda: choices.register(table, "acting", "ppo", 4, int))()


@pytest.mark.parametrize(
    ("add", "wrong", "right"),
    [
        (register_algorithm, 3, ALGORITHMS["ppo"]),
        (register_acting, Inline, ACTING["inline"]),
        (register_exchange, Solo, EXCHANGES["solo"]),
    ],
)
def test_a_part_that_is_no_kind_or_has_no_name_is_not_registered(add, wrong, right):
    for name, kind, says in (
        ("mine", wrong, "it needs|is not a subclass"),
        ("", right, "it needs a name"),
        ("a:b", right, "it needs a name"),
    ):
        with pytest.raises(ConfigError, match=says):
            add(name, kind)


@pytest.mark.parametrize("part", ["acting", "exchange"])
def test_a_name_with_a_colon_is_a_users_part(part):
    for args in ([f"--{part}", "m:c"], [f"--{part}=m:c"], [f"--plugins.{part}", "m:c"]):
        config = parse_cli(Config(), args)
        assert (getattr(config.plugins, part), getattr(config, part)) == ("m:c", getattr(Config(), part))
    assert changed(Config(), {part: "m:c"}).plugins == config.plugins
    assert getattr(presets.a2c(env="CartPole-v1", **{part: "m:c"}).plugins, part) == "m:c"


def test_a_users_part_takes_the_place_of_the_one_that_is_named_beside_it():
    config = parse_cli(Config(), ["--exchange", "gossip", "--exchange", "m:c", "--learners", "2"])
    assert (config.exchange, config.plugins.exchange) == ("gossip", "m:c")
