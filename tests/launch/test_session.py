"""Runs of a lone learner: the folder, resume after kill -9, signals, NaNs, evaluation, damage, a full disk."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import psutil
import pytest
import torch

import coterie
from coterie import presets
from coterie.acting import inline
from coterie.algorithms import a2c
from coterie.build.resources import resolve_config
from coterie.cli.main import main
from coterie.errors import ConfigError, CoterieError
from coterie.replay import storage
from coterie.roles import learner_process
from coterie.roles.learner_process import LearnerProcess
from coterie.runs import checkpoint
from coterie.runs.config_io import load_config
from coterie.runs.metrics import read_metrics
from tests.conftest import make_config
from tests.support.runs import ENDLESS, arguments, check_rows, last_checkpoint, read_summary, small_ppo


def test_a_run_leaves_its_summary_metrics_scores_and_best_checkpoint(tmp_path):
    out = tmp_path / "run"
    config = small_ppo(out, **{"eval.every": 1000, "eval.episodes": 3, "log.tensorboard": True})
    summary = coterie.train(config, quiet=True)
    assert read_summary(out) == json.loads(json.dumps(summary))
    assert summary["status"] == "finished"
    assert summary["env_steps"] >= 3000
    check_rows(out)
    always = "reason env_steps env_frames learner_steps seconds env_steps_per_s episodes mean_return rows digest"
    assert set(always.split()) <= summary.keys()
    assert not {"policy_lag_by_row", "skipped_batches"} & summary.keys()  # nothing lags, and nothing is ever skipped
    assert 0 not in summary["stages"].values()
    assert len(str(summary["env_steps_per_s"])) <= 8  # five digits
    assert summary["env_steps"] == summary["env_frames"]
    assert summary["samples_trained"] >= 3.9 * summary["env_steps"]  # four epochs
    lines = read_metrics(out)
    assert all({"env_steps", "seconds"} <= set(line) for line in lines)
    assert [line["env_steps"] for line in lines] == sorted(line["env_steps"] for line in lines)
    evals = [line for line in lines if "eval/return" in line]
    assert len(evals) == 2
    best = max(evals, key=lambda line: (line["eval/return"], line["env_steps"]))
    assert checkpoint.best(out / "checkpoints")[0].name == f"step_{best['env_steps']:012d}"
    assert list(out.glob("events.out.tfevents.*"))
    assert "finished" in (out / "log.txt").read_text()
    policy = coterie.load(out)
    assert policy.step == best["env_steps"]
    assert policy(torch.zeros(5, 4).numpy()).shape == (5,)


@pytest.mark.parametrize("where", ["learner_process.Team", "learner_process.Gradients", "inline.Recorder"])
def test_a_learner_that_cannot_be_made_leaves_nothing_behind(monkeypatch, where):
    """In a notebook the process lives on: with torch's threads as they were, and without env workers."""

    def fail(*_):
        raise ConfigError("made up")

    threads, children = torch.get_num_threads(), len(psutil.Process().children(recursive=True))
    torch.set_num_threads(threads + 1)
    module, _, part = where.partition(".")
    monkeypatch.setattr({"inline": inline, "learner_process": learner_process}[module], part, fail)
    try:
        with pytest.raises(ConfigError, match="made up"):
            LearnerProcess(resolve_config(make_config(**{"env.backend": "workers"})))
        assert torch.get_num_threads() == threads + 1
        assert len(psutil.Process().children(recursive=True)) == children
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(("exchange", "alone"), [("gossip", True), ("store", True), ("solo", False)])
def test_a_run_whose_exchange_is_alone_says_so(tmp_path, capfd, exchange, alone):
    coterie.train(small_ppo(tmp_path / "run", exchange=exchange, learners=1, steps=100), quiet=False)
    line = f"exchange {exchange} has one learner, so it changes nothing: --learners N for more"
    assert (line in capfd.readouterr().out) == alone
    assert (line in (tmp_path / "run" / "log.txt").read_text()) == alone


def test_settings_without_effect_are_named_where_they_are_given_from_python(tmp_path, capfd):
    small = {"steps": 20, "env.num_envs": 2, "algo.unroll_length": 8, "ppo": {"batch_size": 0, "minibatch_size": 16}}
    coterie.train(env="CartPole-v1", out=str(tmp_path / "run"), **small, **{"r2d2.length": 7, "model.core_size": 8})
    said = [line for line in capfd.readouterr().out.splitlines() if "has no effect" in line]
    assert said == [
        "r2d2.length has no effect in this run: it needs r2d2",
        "model.core_size has no effect in this run: it needs model.core",
    ]


def test_the_same_seed_gives_the_same_weights_with_evaluations_too(tmp_path):
    digests, short = [], {"steps": 600, "algo.unroll_length": 8}  # five rollouts
    for i, changes in enumerate(({}, {}, {"eval.every": 200, "eval.episodes": 2}, {"seed": 1})):
        digests.append(coterie.train(small_ppo(tmp_path / str(i), **short, **changes), quiet=True)["digest"])
    assert digests[0] == digests[1] == digests[2]
    assert digests[3] != digests[0]


def test_the_same_seed_gives_the_same_weights_on_images_with_threads(tmp_path):
    small = {"steps": 300, "env.num_envs": 4, "env.decorrelate": 10, "algo.unroll_length": 8, "ppo.batch_size": 0}
    small |= {"ppo.minibatch_size": 16, "log.tensorboard": False, "env.groups": 2, "torch_threads": 2}
    runs = [presets.ppo(env="Pong-v5", out=str(tmp_path / str(i)), **small) for i in range(2)]
    assert len({coterie.train(run, quiet=True)["digest"] for run in runs}) == 1


def options(out: Path, **changes: object) -> list[str]:
    return arguments("ppo", out, {**ENDLESS, "env.delay": 0, **changes})


def test_a_killed_run_is_resumed_with_all_its_state(command):
    run = command(options)
    out = run.out
    run.until(lambda: list(out.glob("checkpoints/step_*")), "a checkpoint")
    run.until(lambda: len(run.lines()) > 15, "it goes on")
    run.close()
    assert not (out / "summary.json").exists()
    tensors, state = last_checkpoint(out)
    lines = read_metrics(out)
    rolled_back = max(line["env_steps"] for line in lines) - state["env_steps"]
    learner = LearnerProcess(resolve_config(load_config(out / "config.json")), life_number=1)
    learner.load(checkpoint.learner(tensors, 0))
    try:
        for name, tensor in tensors["learner_0/model"].items():
            assert torch.equal(learner.model.state_dict()[name], tensor)
        for name, tensor in tensors["learner_0/exchange"].items():
            assert torch.equal(learner.exchange.state_dict()[name], tensor)
        assert torch.equal(learner.rngs[0].get_state(), tensors["learner_0/rng"]["policy_0"])
        assert torch.equal(learner.algorithm.rng.get_state(), tensors["learner_0/algorithm"]["minibatch_rng"])
        of_a_gpu = {"policy_0": torch.zeros(16, dtype=torch.uint8)}  # the run goes on without one
        learner.load({**checkpoint.learner(tensors, 0), "rng": of_a_gpu})
        assert torch.equal(learner.rngs[0].get_state(), tensors["learner_0/rng"]["policy_0"])
    finally:
        learner.close()
    total = state["env_steps"] + 5000
    config = load_config(out / "config.json")
    summary = coterie.resume(out, steps=total, quiet=True)
    assert summary["env_steps"] >= total
    assert summary["learner_steps"] > state["learners"][0]["learner_steps"]
    assert summary["episodes"] >= state["episodes"]["count"]
    assert summary["seconds"] > state["seconds"]
    assert summary["rows"]["rolled_back"] == max(0, rolled_back)
    assert summary["rows"]["produced"] == summary["env_steps"] + max(0, rolled_back)
    steps = [line["env_steps"] for line in read_metrics(out)]
    assert steps == sorted(steps)
    after = next(line for line in read_metrics(out) if line["env_steps"] > state["env_steps"])
    assert after["lr"] == pytest.approx(config.optim.lr * (1 - after["env_steps"] / total), rel=1e-6)


def test_a_run_with_a_damaged_checkpoint_is_resumed_from_an_earlier_one_where_that_is_asked_for(tmp_path, capfd):
    out = tmp_path / "run"
    coterie.train(small_ppo(out, **{"log.checkpoint_every": 0.0}), quiet=True)
    *_, earlier, last = sorted((out / "checkpoints").glob("step_*"))
    (last / "learner_0" / "model.safetensors").write_bytes(b"")
    command = ["resume", str(out), "--steps", "3000"]
    assert main(command) == 1
    assert f"{earlier.name} is intact: `coterie resume {out} --or-earlier` goes on from there" in capfd.readouterr().err
    assert main([*command, "--or-earlier"]) == 0
    line = f"damaged-{last.name} is damaged: learner_0/model.safetensors has 0 bytes"
    assert line in capfd.readouterr().out
    assert line in (out / "log.txt").read_text()
    steps = [line["env_steps"] for line in read_metrics(out)]
    assert steps == sorted(steps)
    assert steps[-1] >= 3000
    assert read_summary(out)["rows"]["rolled_back"] > 0


def test_a_nan_stops_the_run_names_the_loss_and_keeps_the_last_checkpoint(tmp_path, monkeypatch):
    out, real = tmp_path / "run", a2c.gae
    factors = iter([1.0, math.nan])
    monkeypatch.setattr(a2c, "gae", lambda *args: (real(*args)[0] * next(factors), real(*args)[1]))
    config = small_ppo(out, **{"algo.normalize_advantage": False, "log.checkpoint_every": 0.0})
    with pytest.raises(CoterieError, match=r"^policy_loss is not finite at learner step \d+"):
        coterie.train(config, quiet=True)
    summary = read_summary(out)
    assert summary["status"] == "failed"
    assert "policy_loss nan" in summary["reason"]
    tensors, _ = last_checkpoint(out)
    assert all(torch.isfinite(x).all() for x in tensors["learner_0/model"].values())


def test_replaced_envs_are_counted_and_their_reasons_logged(tmp_path):
    out = tmp_path / "run"
    flaky = {
        "env.num_envs": 4,
        "env.threads": 2,
        "env.kwargs": '{"how": "nan_reward", "at": 30}',
        "algo.unroll_length": 16,
    }
    flaky |= {"log.tensorboard": False, "log.every": 0.0}
    config = presets.a2c(env="tests.support.flaky:FlakyEnv", steps=400, out=str(out), **flaky)
    summary = coterie.train(config, quiet=True)
    log = [line for line in (out / "log.txt").read_text().splitlines() if "replaced env" in line]
    assert summary["status"] == "finished"
    assert summary["envs_replaced"] == len(log) > 0
    assert all("reward is not finite" in line for line in log)
    assert any("explained_variance" in line for line in read_metrics(out))


@pytest.mark.parametrize(("preset", "learners"), [("a2c", 1), ("a2c", 2), ("impala", 1), ("seed-vtrace", 1)])
def test_a_run_that_fails_for_replaced_envs_counts_and_logs_them(tmp_path, preset, learners):
    out, env = tmp_path / "run", "tests.support.flaky:FlakyEnv"
    how = {"env.kwargs": '{"how": "nan_reward", "at": 3}', "env.num_envs": 2, "env.replace_budget": 3}
    how |= {"learners": learners, "exchange": "auto", "log.tensorboard": False}
    with pytest.raises(CoterieError, match=r"4 envs had to be replaced"):
        coterie.train(presets.make(preset, env, steps=4000, out=str(out), **how), quiet=True)
    assert read_summary(out)["envs_replaced"] >= 4
    assert (out / "log.txt").read_text().count("replaced env ") >= 4


def test_a_run_says_what_it_goes_on_from_and_what_is_lost(tmp_path, capsys):
    out = tmp_path / "run"
    coterie.train(small_ppo(out, steps=100), quiet=True)
    made = read_summary(out)["env_steps"]
    with (out / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"env_steps": made + 1234}) + "\n")
    coterie.resume(out, steps=made + 100)
    line = rf"continuing from the checkpoint of [\w :]+: {made:,} env steps; 1,234 later ones are lost"
    assert re.search(line, capsys.readouterr().out)


def test_a_run_that_ends_before_its_replay_is_filled_says_so(tmp_path, capsys):
    two = {"learners": 2, "exchange": "allreduce", "env.num_envs": 4}  # in lockstep: 1,500 env steps each
    coterie.train(presets.dqn(env="CartPole-v1", steps=3000, out=str(tmp_path / "run"), **two))
    assert "training begins after 4,000 env steps, and the run has 3,000" in capsys.readouterr().out
    assert read_summary(tmp_path / "run")["learner_steps"] == 0


def test_rollouts_that_do_not_fit_into_memory_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "machine_memory", lambda: 10_000)
    with pytest.raises(ConfigError, match=r"algo\.unroll_length: rollouts of 2,064 observations need 0\.0 GiB"):
        coterie.train(small_ppo(tmp_path / "run"), quiet=True)
