"""The secondary learner: the primary's replay, initial weights and pace; batches, weights and optimizer of its own."""

from __future__ import annotations

import json
import math
import weakref
from pathlib import Path

import pytest
import torch

from coterie.build.policy import evaluate_run, load
from coterie.build.resources import resolve_config
from coterie.errors import ConfigError, CoterieError
from coterie.launch.session import resume, train
from coterie.roles.learner_process import LearnerProcess
from tests.conftest import make_config
from tests.support.begun import check_begins_with
from tests.support.runs import save_checkpoint
from tests.support.waiting import PATIENCE

SMALL = {
    "algorithm": "dqn", "q.learn_start": 80, "q.batch_size": 16, "q.intensity": 4.0, "replay.capacity": 4000,
    "q.secondary_batch": 64, "env.num_envs": 4, "algo.unroll_length": 8, "env.threads": 1,
    "log.every": 0.0, "log.checkpoint_every": 1e6, "log.tensorboard": False,
}  # fmt: skip
CORE = {
    "algorithm": "r2d2", "model.core": "lstm", "model.core_size": 8, "r2d2.length": 8, "r2d2.burn_in": 8,
    "r2d2.stride": 8, "q.learn_start": 128, "q.batch_size": 2, "q.secondary_batch": 4,
}  # fmt: skip
RANKED = {"replay.alpha": 0.6}


def until(steps):
    rows = [0]

    def over(rollout):
        rows[0] += rollout.reward.numel()
        return rows[0] >= steps

    return over


@pytest.mark.parametrize("changes", [RANKED, CORE])
def test_the_secondary_starts_as_the_primary_and_trains_on_as_many_samples(changes):
    learner = LearnerProcess(
        resolve_config(make_config(**{**SMALL, **changes, "steps": 800, "model.normalize_obs": True}))
    )
    second = learner.secondary
    assert torch.equal(second.params.data, learner.params.data)
    begin = second.params.data.clone()
    learner.run(until(800))
    own, config = learner.progress, learner.config.q
    assert second.learner_steps * config.secondary_batch == own.learner_steps * config.batch_size > 0
    assert not torch.equal(second.params.data, begin)
    assert not torch.equal(second.params.data, learner.params.data)
    assert second.algorithm.replay is learner.algorithm.replay
    assert second.algorithm.target_model is not learner.algorithm.target_model
    seen = dict(learner.model.named_buffers())  # it normalizes as the primary does
    assert all(torch.equal(x, seen[name]) for name, x in second.model.named_buffers())
    replay, threads = weakref.ref(learner.algorithm.replay), learner.algorithm.prefetcher._threads
    learner.close()
    assert replay() is None, "a finished run has released it"
    for thread in threads:
        thread.join(PATIENCE)
    assert {thread.is_alive() for thread in threads} == {False}


def test_the_secondary_starts_with_the_weights_and_normalizers_of_init_from(tmp_path: Path):
    begin = {**SMALL, "steps": 400, "model.normalize_obs": True}
    learner = LearnerProcess(resolve_config(make_config(**begin)))
    learner.run(until(400))
    model = dict(learner.model.state_dict())
    save_checkpoint(tmp_path / "checkpoints", 400, {"learner_0/model": model}, {})
    learner.close()
    learner = LearnerProcess(resolve_config(make_config(**begin, init_from=str(tmp_path))))
    check_begins_with(learner.secondary.model.state_dict(), model)
    learner.close()


@pytest.mark.parametrize("changes", [RANKED, {"q.noisy": True}])
def test_the_primary_learns_the_same_with_and_without_a_secondary(changes):
    weights = []
    for batch in (0, 64):
        learner = LearnerProcess(
            resolve_config(make_config(**{**SMALL, **changes, "steps": 400, "q.secondary_batch": batch}))
        )
        learner.run(until(400))
        weights.append(learner.params.data.clone())
        learner.close()
    assert torch.equal(*weights)


def test_the_secondary_learning_rate_follows_the_primarys_schedule():
    schedule = {"optim.schedule.kind": "linear", "q.secondary_lr": 3e-3, "optim.lr": 1e-3}
    learner = LearnerProcess(
        resolve_config(make_config(**{**SMALL, **schedule, "q.secondary_batch": 16, "steps": 400}))
    )
    seen = {"own": [], "theirs": []}
    for name, exchange in (("theirs", learner.exchange), ("own", learner.secondary.exchange)):
        exchange.step = lambda params, lr, name=name: seen[name].append(lr) or float(params.grad.zero_()[0])
    learner.run(until(400))
    assert len(set(seen["theirs"])) > 3
    assert seen["own"] == pytest.approx([3 * lr for lr in seen["theirs"]])
    learner.close()


def test_a_secondary_gradient_that_is_not_finite_is_reported_as_such():
    learner = LearnerProcess(resolve_config(make_config(**{**SMALL, "steps": 400})))
    learner.secondary.params.data.fill_(math.nan)
    with pytest.raises(CoterieError, match=r"not finite at the secondary learner's step \d+"):
        learner.run(until(400))
    learner.close()


def test_a_checkpoint_holds_the_secondary_learner():
    config = make_config(**{**SMALL, **RANKED, "replay.save": True, "steps": 800})
    learner, again = LearnerProcess(resolve_config(config)), LearnerProcess(resolve_config(config))
    learner.run(until(400))
    again.load(learner.tensors())
    ours, theirs = learner.secondary.tensors(), again.secondary.tensors()
    assert ours.keys() == theirs.keys()
    for group, found in theirs.items():
        assert found.keys() == ours[group].keys()
        assert all(torch.equal(x, ours[group][name]) for name, x in found.items()), group
    assert again.secondary.learner_steps == learner.secondary.learner_steps > 0
    assert not any(name.startswith("replay/") for name in ours["secondary_algorithm"])
    learner.close()
    again.close()


def test_a_resumed_run_keeps_its_secondary_learner_which_can_be_evaluated(tmp_path: Path):
    config = make_config(**{**SMALL, "steps": 640, "out": str(tmp_path / "run"), "eval.every": 320,
                            "eval.episodes": 2})  # fmt: skip
    train(config, quiet=True)
    folder = tmp_path / "run"
    weights = load(folder, "secondary").model.state_dict()
    assert any(not torch.equal(x, load(folder).model.state_dict()[k]) for k, x in weights.items())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert any(math.isfinite(line.get("eval/secondary_return", math.nan)) for line in lines)
    assert any("secondary/q_loss" in line for line in lines)
    resume(folder, steps=1280, quiet=True)
    assert evaluate_run(folder, episodes=2, learner="secondary")["episodes"] == 2
    with pytest.raises(ConfigError, match=r"'7' is not one of .*0, mean, secondary"):
        load(folder, "7")
    steps = [line["secondary/learner_steps"] for line in lines if "secondary/learner_steps" in line]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    more = [line["secondary/learner_steps"] for line in lines if "secondary/learner_steps" in line]
    assert more[: len(steps)] == steps
    assert more == sorted(more)  # it does not start again


@pytest.mark.parametrize(
    "changes", [{"algorithm": "a2c"}, {"exchange": "allreduce", "learners": 2}, {"q.secondary_batch": -1}]
)
def test_a_secondary_learner_is_refused_where_it_has_no_replay_to_sample(tmp_path: Path, changes):
    with pytest.raises(ConfigError, match=r"q\.secondary_batch"):
        train(make_config(**{**SMALL, **changes, "out": str(tmp_path / "run")}), quiet=True)
    assert not (tmp_path / "run").exists()
