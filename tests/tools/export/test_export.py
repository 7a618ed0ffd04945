"""The file beside the network, for each kind of network in the presets, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

import coterie
from coterie.cli.main import main
from coterie.errors import CoterieError
from coterie.tools.export import command
from coterie.tools.export.check import TOLERANCE, Checked, check
from coterie.tools.export.describe import describe
from coterie.tools.export.graph import Graph, to_onnx
from tests.tools.export.runs import make_run

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

ROOT = Path(__file__).parents[3]
HERE = "tests.tools.export.runs"
ACTOR_CRITIC, VALUES = {"action", "value", "logits"}, {"action", "value", "q_values"}
CORE = {"is_first", "core_state"}
LSTM = {"model.core": "lstm", "model.core_size": 16}
REWARD = {"model.last_action_reward": True}
FAST = ("mlp, normalized", "sac", "masked, mixed")
DTYPES = {"float32": "tensor(float)"} | {
    name: f"tensor({name})" for name in ("int64", "int32", "int16", "int8", "uint8", "bool")
}
NETS = {
    "mlp, normalized": ("ppo", "CartPole-v1", {}, {"obs"}, ACTOR_CRITIC),
    "continuous, lstm": (
        *("ppo", f"{HERE}:Swimmer", {**LSTM, **REWARD}, {"obs", "prev_action", "prev_reward", *CORE}),
        {"action", "value", "mean", "std", "next_core_state", "next_prev_action"},
    ),
    "a3c-gae, lstm": ("a3c", "Pong-v5", {}, {"obs", *CORE}, {*ACTOR_CRITIC, "next_core_state"}),
    "impala": ("impala-deep", "Pong-v5", {}, {"obs"}, ACTOR_CRITIC),
    "nature, dqn": ("dqn", "Pong-v5", {}, {"obs"}, VALUES),
    "rainbow, noisy": ("rainbow", "Pong-v5", {"q.noisy": True}, {"obs"}, VALUES),
    "r2d2": (
        *("seed-r2d2", "CartPole-v1", REWARD, {"obs", "prev_action", "prev_reward", *CORE}),
        {*VALUES, "next_core_state", "next_prev_action"},
    ),
    "text and codes": (
        *("impala", "BabyAI-GoToObj-v0", {}, {"obs.image", "obs.direction", "obs.mission"}, ACTOR_CRITIC),
    ),
    "gru": ("ppo", "CartPole-v1", {"model.core": "gru"}, {"obs", *CORE}, {*ACTOR_CRITIC, "next_core_state"}),
    "gtrxl": (
        *("seed-r2d2", "CartPole-v1", {"model.core": "gtrxl", "model.core_size": 16, **REWARD}),
        {"obs", "prev_action", "prev_reward", *CORE},
        {*VALUES, "next_core_state", "next_prev_action"},
    ),
    "sac": ("sac", "Hopper-v5", {}, {"obs"}, {"action", "mean", "std"}),
    "own network": ("c51", "CartPole-v1", {"model.network": "tests.support.networks:Mixer"}, {"obs"}, VALUES),
    "own network, memory": (
        *("ppo", "CartPole-v1", {"model.network": "tests.support.networks:Counter"}),
        {"obs", "prev_action", "prev_reward", *CORE},
        {*ACTOR_CRITIC, "next_core_state", "next_prev_action"},
    ),
    "own core": (
        *("ppo", "CartPole-v1", {"model.core": "tests.support.networks:Leaky", "model.core_size": 16}),
        {"obs", *CORE},
        {*ACTOR_CRITIC, "next_core_state"},
    ),
    "masked, mixed": (
        *("ppo", "tests.support.masked:Masked", {"env.kwargs": '{"kind": "mixed", "where": "info"}'}),
        {"obs.observation", "obs.action_mask"},
        {*ACTOR_CRITIC, "mean", "std"},
    ),
    "masked, c51": ("c51", "tests.support.masked:Masked", {}, {"obs.count", "obs.action_mask"}, VALUES),
    "many choices": (
        *("ppo", f"{HERE}:Many", {**LSTM, **REWARD}),
        {"obs.inner.flags", "obs.inner.kind", "obs.far", "obs.is_first", "prev_action", "prev_reward", *CORE},
        {*ACTOR_CRITIC, "next_core_state", "next_prev_action"},
    ),
}


def export(*args: object) -> int:
    return main(["export", *map(str, args)])


def test_a_file_with_other_outputs_is_not_written(tmp_path, capsys, monkeypatch):
    run = make_run(tmp_path / "run", "ppo", "CartPole-v1")
    policy = coterie.load(run)
    graph = Graph(policy.model, policy.actions)
    with torch.no_grad():
        policy.model.value.bias += 6 * TOLERANCE
    wrong = to_onnx(graph)
    monkeypatch.setattr(command, "to_onnx", lambda graph: wrong)
    assert export(run) == 1
    err = one_line(capsys)
    assert "onnxruntime's value differs" in err
    assert "nothing is written" in err
    assert not (run / "export").exists()


@pytest.mark.parametrize("net", [net if net in FAST else pytest.param(net, marks=pytest.mark.slow) for net in NETS])
def test_each_kind_of_network_is_exported(net, tmp_path, capsys):
    """The command compares the two itself; here its report and its files are checked."""
    preset, env, changes, inputs, outputs = NETS[net]
    if net == "text and codes" and torch.__version__.startswith("2.6."):
        pytest.skip("torch 2.6 cannot export text's LSTM")
    run = make_run(tmp_path / "run", preset, env, **changes)
    there = tmp_path / "there"
    assert export(run, "--out", there, "--learner", "0") == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert float(re.search(r"by at most (\S+)", out)[1]) < TOLERANCE
    assert sorted(p.name for p in there.iterdir()) == ["policy.json", "policy.onnx"]
    session = onnxruntime.InferenceSession(there / "policy.onnx")
    about = json.loads((there / "policy.json").read_text())
    both = ((about["inputs"], session.get_inputs(), inputs), (about["outputs"], session.get_outputs(), outputs))
    for described, real, names in both:
        assert {p["name"] for p in described} == names
        assert [(p["name"], p["shape"], DTYPES[p["dtype"]]) for p in described] == [
            (p.name, p.shape, p.type) for p in real
        ]
    assert str(ROOT).encode() not in (there / "policy.onnx").read_bytes()


@pytest.mark.slow
def test_a_file_that_loses_its_state_is_detected(tmp_path):
    """Even if each step alone is right."""
    run = make_run(tmp_path / "run", "ppo", "CartPole-v1", **LSTM)
    policy = coterie.load(run)
    graph = Graph(policy.model, policy.actions)
    forward = graph.forward

    def forgetful(*tensors):
        *found, state = forward(*tensors)
        return (*found, 0 * state)

    graph.forward = forgetful
    with pytest.raises(CoterieError, match="onnxruntime's next_core_state differs"):
        check(policy, graph, to_onnx(graph))


def described(run: Path) -> dict[str, Any]:
    """`policy.json` of a run, made without the file that it describes."""
    policy = coterie.load(run)
    return json.loads(json.dumps(describe(policy, Graph(policy.model, policy.actions), Checked(0.0, 1), "0")))


def test_the_description_has_the_envs_options_and_the_actions_bounds(tmp_path):
    changes = {"atari.sticky_actions": 0.25, "model.torso": "mlp"}
    about = described(make_run(tmp_path / "run", "a2c", "Pong-v5", **changes))
    assert (about["preset"], about["env_steps"], about["learner"]) == ("a2c", 5, "0")
    env = about["env"]
    assert (env["id"], env["frames_per_step"], env["atari"]["stack"]) == ("Pong-v5", 4, 4)
    assert env["atari"]["sticky_actions"] == 0.25
    assert about["action"] == {"kind": "categorical", "sizes": [6], "low": 0, "high": 5}
    about = described(make_run(tmp_path / "many", "ppo", f"{HERE}:Many"))
    assert (about["action"]["low"], about["action"]["high"]) == ([[1, 0], [5, -1]], [[2, 2], [8, 0]])
    (kind,) = (p for p in about["inputs"] if p["name"] == "obs.inner.kind")
    assert (kind["path"], kind["shape"]) == (["inner", "kind"], ["batch", 4])
    assert "one-hot" in kind["form"]


@pytest.mark.slow
def test_the_example_in_the_docs_plays_as_coterie_does(tmp_path, monkeypatch):
    """An LSTM with its last action and reward, with and without Coterie."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/guides/export.md").read_text(), re.S)
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    run = make_run(Path("runs/cartpole"), "ppo", "CartPole-v1", **LSTM, **REWARD)
    assert export(run) == 0
    found = {}
    exec(code, found)
    policy = coterie.load(run)
    env = gymnasium.make("CartPole-v1")
    obs, _ = env.reset(seed=0)
    total, reward, over = 0.0, 0.0, False
    while not over:
        action = policy(obs[None], reward=np.array([reward]))
        obs, reward, terminated, truncated, _ = env.step(int(action[0]))
        total, over = total + reward, terminated or truncated
    assert found["total"] == total > 1


@pytest.mark.slow
def test_a_network_that_cannot_be_traced_is_refused(tmp_path, capsys):
    run = make_run(tmp_path / "run", "ppo", "CartPole-v1", **{"model.torso": f"{HERE}:Stubborn"})
    assert export(run) == 2
    assert "model: PyTorch cannot export this network: " in one_line(capsys)
    assert not (run / "export").exists()


def test_errors_of_export_are_one_line(tmp_path, capsys, monkeypatch):
    run = make_run(tmp_path / "run", "ppo", "CartPole-v1")
    assert export(run, "--learner", "3") == 2
    assert "learner: '3' is not one of 0" in one_line(capsys)
    monkeypatch.setattr(command, "_NEEDS", ("onnx", "onnxruntime", "a_package_that_is_not_there"))
    assert export(run) == 2
    assert "[export]'" in one_line(capsys)


def one_line(capsys) -> str:
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1, err
    return err
