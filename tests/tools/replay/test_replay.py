"""A run is executed again along its flight record, and comes to the same weights, bit by bit."""

from __future__ import annotations

import io
import re
import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from coterie.cli.main import main
from coterie.config import Config
from coterie.errors import ConfigError, CoterieError
from coterie.flight.record import FlightRecorder, lives
from coterie.launch.session import resume, train
from coterie.roles.callbacks import Callback, Run
from coterie.runs.config_io import replace as changed
from coterie.runs.trust import open_run
from coterie.tools.replay.asked import ReplayRequest
from coterie.tools.replay.command import replay_run
from tests.conftest import make_config

TWO, ACTORS = {"learners": 2}, {"actors": 2, "decoupled.queue": 1}
SHORT = {"r2d2.burn_in": 8, "r2d2.length": 8, "r2d2.stride": 8}
LAYOUTS = {
    "a2c": {"algorithm": "a2c"},
    "ppo, synchronous": {"algorithm": "ppo", "exchange": "allreduce", "model.normalize_obs": True, **TWO},
    "a2c, gossip": {"algorithm": "a2c", "exchange": "gossip", **TWO},
    "ppo, gossip": {"algorithm": "ppo", "exchange": "gossip", "model.normalize_obs": True, **TWO},
    "impala": {"algorithm": "vtrace", "acting": "decoupled", "model.normalize_obs": True, **ACTORS},
    "impala, synchronous": {"algorithm": "vtrace", "acting": "decoupled", "exchange": "allreduce", **TWO, **ACTORS},
    "impala, gossip": {"algorithm": "vtrace", "acting": "decoupled", "exchange": "gossip", **TWO, **ACTORS},
    "dqn, actors": {"algorithm": "dqn", "acting": "decoupled", **ACTORS},
    "dqn, two threads": {"algorithm": "dqn", "torch_threads": 2, "q.noisy": True, "q.batch_size": 24},
    "seed": {"algorithm": "vtrace", "acting": "central", "actors": 2, "model.normalize_obs": True},
    "seed, gossip": {"algorithm": "vtrace", "acting": "central", "exchange": "gossip", "actors": 2, **TWO},
    "seed, r2d2": {"algorithm": "r2d2", "acting": "central", "actors": 2, "model.core": "lstm", **SHORT},
}  # fmt: skip


def run(out, callbacks=(), **changes: Any):
    own = {
        "env.num_envs": 4, "algo.unroll_length": 8, "steps": 1500, "log.digest_every": 1, "log.tensorboard": False,
        "q.learn_start": 200, "q.epsilon_steps": 1000, "replay.capacity": 2000, "ppo.minibatch_size": 16,
        "out": str(out), "deterministic": torch.cuda.is_available(), **changes,
    }  # fmt: skip
    return train(make_config(**own), callbacks=callbacks, quiet=True)


def replayed(folder, *asked, say=lambda line: None):
    return list(replay_run(folder, open_run(folder), ReplayRequest(*asked), say))


def assert_equal(results, until=False):
    """All that was recorded, up to the last learner step."""
    assert any(result.digests for result in results)
    for result in results:
        assert (result.difference, result.error) == ("", "")
        rollouts, weights, final = (len(result.life.of(kind)) for kind in ("rollout", "weights", "final"))
        assert until or (result.rollouts, result.digests) == (rollouts, weights + final)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_replay_comes_to_the_same_weights(recorded, layout):
    results = replayed(recorded(layout))
    assert len(results) == LAYOUTS[layout].get("learners", 1)
    assert_equal(results)


def test_a_paced_run_of_central_acting_is_replayed(tmp_path):
    """A rollout then begins with weights of its own time, and not in the call that ends the one before."""
    run(tmp_path / "run", **LAYOUTS["seed"], max_lag=16)
    assert_equal(replayed(tmp_path / "run"))


def test_a_resumed_run_is_replayed_as_two_lives(tmp_path):
    """Each with its own end, which the learning rate goes down to."""
    run(tmp_path / "run", **LAYOUTS["impala"], **{"log.keep": 1, "optim.schedule.kind": "linear"})
    resume(tmp_path / "run", steps=3000, quiet=True)
    results = replayed(tmp_path / "run")
    assert [result.life.header["life"] for result in results] == [0, 1]
    assert_equal(results)
    second = results[1].life.header["checkpoint"]
    with pytest.raises(CoterieError, match=rf"{second}, which life 1 began with, was pruned \(log.keep\)"):
        replayed(tmp_path / "run", second)
    assert_equal(replayed(tmp_path / "run", "start"))
    for asked in (("", 20), ("", None, {"optim.rule": "adam"})):
        (first,) = replayed(tmp_path / "run", *asked)  # and not the second life, which begins later, or otherwise
        assert first.life.header["life"] == 0


def test_hosts_are_replayed_with_the_groups_that_they_had(tmp_path):
    """Where `env.groups` is 0, a host chooses them by its number of cores."""
    folder = tmp_path / "run"
    run(folder, **LAYOUTS["seed"], **{"env.groups": 2})
    config = open_run(folder)
    config = replace(config, env=replace(config.env, groups=1))
    assert_equal(list(replay_run(folder, config, ReplayRequest(), print)))


def test_an_evaluation_leaves_the_noise_of_noisy_layers_as_it_was(tmp_path):
    """The second life begins with what the first one came to, and not with a checkpoint, which was pruned."""
    run(tmp_path / "run", **LAYOUTS["dqn, two threads"], **{"log.keep": 1, "eval.episodes": 1})
    resume(tmp_path / "run", steps=3000, quiet=True)
    results = replayed(tmp_path / "run")
    assert len(results) == 2
    assert_equal(results)


def edited(folder, edit=lambda event: None, **header):
    """Write learner 0's record again, with other events, or entries of its header."""
    (before,) = lives(folder, 0)
    recorder = FlightRecorder(before.path, lambda: before.header | header)
    for event in before.events:
        edit(event)
        recorder.note(*event)
    recorder.close()


@pytest.mark.parametrize("exchange", ["hogwild", "store"])
def test_shared_weights_have_no_replay(tmp_path, exchange, capsys):
    run(tmp_path / "run", algorithm="a2c", exchange=exchange, steps=64, **TWO)
    assert main(["replay", str(tmp_path / "run")]) == 2
    line = f"coterie: exchange: {exchange} cannot be replayed: the order of writes to shared weights is not recorded\n"
    assert capsys.readouterr().err == line


@pytest.mark.parametrize("part", ["exchange", "acting"])
def test_what_replaces_a_part_in_other_processes_has_no_replay(tmp_path, part):
    kinds = {"acting": "decoupled", "exchange": "allreduce", "learners": 2}
    config = changed(Config(), {**kinds, f"plugins.{part}": "mine:Own"})
    with pytest.raises(ConfigError, match=rf"^plugins\.{part}: mine:Own cannot be replayed"):
        ReplayRequest().check(config, tmp_path)


def test_the_command_says_what_is_equal(tmp_path, recorded, capsys):
    folder = shutil.copytree(recorded("a2c"), tmp_path / "run")
    assert main(["replay", str(folder)]) == 0
    said = "learner 0, life 0, up to learner step 49: 49 rollouts and 49 digests of weights are equal, mean return "
    assert said in capsys.readouterr().out
    edited(folder, lambda event: event.append(0) if event[0] == "weights" else None)
    assert main(["replay", str(folder)]) == 1
    assert "learner 0, life 0 differs: learner steps 1 to 1: " in capsys.readouterr().out


def test_a_run_on_a_gpu_is_refused_unless_it_was_deterministic(tmp_path, recorded, capsys):
    folder = shutil.copytree(recorded("a2c"), tmp_path / "run")
    edited(folder, device="cuda")
    assert main(["replay", str(folder)]) == 2
    line = "coterie: device: a GPU adds up in no fixed order: only a run with `--deterministic True` is replayed\n"
    assert capsys.readouterr().err == line


class Asks(Callback):
    def on_start(self, run: Run) -> None:
        run.record("deterministic", torch.are_deterministic_algorithms_enabled())


def test_a_deterministic_run_has_torchs_deterministic_algorithms(tmp_path):
    run(tmp_path / "run", (Asks,), algorithm="a2c", deterministic=True)
    assert '"custom/deterministic": 1' in (tmp_path / "run" / "metrics.jsonl").read_text()
    assert not torch.are_deterministic_algorithms_enabled()
    assert_equal(replayed(tmp_path / "run"))


def test_a_run_without_a_record_is_refused(tmp_path, capsys):
    run(tmp_path / "run", algorithm="a2c", **{"log.flight": False})
    assert not (tmp_path / "run" / "flight").exists()
    assert main(["replay", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err == f"coterie: RUN: {tmp_path / 'run'} has no flight record\n"


def test_a_learner_step_is_exported_and_holds_what_the_update_was_made_of(tmp_path, capsys):
    """The gradient of the exported batch and weights is the exported gradient; the update makes the next weights."""
    folder = tmp_path / "run"
    run(folder, **LAYOUTS["impala"], **{"optim.rule": "rmsprop", "optim.max_grad_norm": 0.0})
    assert main(["replay", str(folder), "--export-step", "5", "--to", "5"]) == 0
    assert f"{folder}/learner_step_5.safetensors: the batch, the gradient" in capsys.readouterr().out
    assert main(["replay", str(folder), "--export-step", "5", "--to", "5", "--out", "/proc/a.safetensors"]) == 2
    line = "coterie: --out: cannot write to /proc/a.safetensors: No such file or directory\n"
    assert capsys.readouterr().err == line
    kept = load_file(folder / "learner_step_5.safetensors")
    seen = list[tuple[int, Any, Any]]()

    def look(moment):
        seen.append((moment.step, moment.weights, moment.gradient))
        for name, x in moment.weights.items():
            assert torch.equal(x, kept[f"weights/{name}"])
            assert torch.equal(moment.gradient[name], kept[f"gradient/{name}"])
        parts = list(moment.batch.parts())
        before = moment.learner.params.grad.clone()
        moment.learner.params.grad.zero_()
        for part in parts:
            moment.learner.algorithm.loss(moment.learner.model, part).total.backward()
        torch.testing.assert_close(moment.learner.params.grad, before)

    asked = ReplayRequest(until=6, at=5, call=look)
    assert_equal(list(replay_run(folder, open_run(folder), asked, print)), until=True)
    assert [step for step, *_ in seen] == [5]
    rewards = [name for name in kept if name.endswith("/reward")]
    assert rewards
    assert kept[rewards[0]].shape == (8, 4)


def test_the_debugger_opens_at_a_learner_step(recorded, monkeypatch, capsys):
    command = ["replay", str(recorded("a2c")), "--break-at", "3"]
    monkeypatch.setattr("sys.stdin", io.StringIO("p moment.step, batch.count, len(weights)\nc\n"))
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "learner step 3: moment, batch, weights, gradient; c goes on" in out
    assert re.search(r"\(3, 32, \d+\)\n", out)
    assert "49 digests of weights are equal" in out  # the look has changed nothing
    monkeypatch.setattr("sys.stdin", io.StringIO("q\n"))
    assert main(command) == 0
    assert capsys.readouterr().out.endswith("\nended in the debugger\n")


def test_a_counterfactual_has_the_same_schedule_and_another_setting(recorded, capsys):
    command = ["replay", str(recorded("impala"))]
    assert main([*command, "--edit", "algo.entropy_coef=0.5"]) == 0
    assert "not compared: it has other settings, mean return " in capsys.readouterr().out
    assert main([*command, "--edit", "optim.chunk=3"]) == 0
    assert "not compared" in capsys.readouterr().out
    assert main([*command, "--edit", "env.num_envs=8"]) == 2
    assert "coterie: --edit: env.num_envs would change the schedule; settings of algo, ppo, " in capsys.readouterr().err
    assert main([*command, "--edit", "algo.gama=1"]) == 2
    assert "gama" in capsys.readouterr().err
