"""Runs of value learning as a user has them: what a resume keeps, and what is refused before anything is written."""

from __future__ import annotations

import pytest

import coterie
from coterie import presets
from coterie.build.resources import resolve_config
from coterie.roles.learner_process import LearnerProcess
from coterie.runs import checkpoint
from coterie.runs.config_io import load_config
from coterie.types import ConfigError


def test_a_resumed_run_explores_as_little_as_before(tmp_path):
    """From its first step on, and with its replay weighted as far on."""
    changes = {"steps": 3000, "q.epsilon_steps": 2000, "q.learn_start": 500, "replay.capacity": 4000}
    more = {"replay.alpha": 0.6, "log.tensorboard": False, "replay.save": True}
    coterie.train(presets.dqn(env="CartPole-v1", out=str(tmp_path / "run"), **changes, **more), quiet=True)
    tensors, state = checkpoint.load(checkpoint.latest(tmp_path / "run" / "checkpoints"))
    learner = LearnerProcess(resolve_config(load_config(tmp_path / "run" / "config.json")), life=1)
    try:
        learner.load(checkpoint.learner(tensors, 0))
        learner.start(state["learners"][0], state["env_steps"])
        assert learner.algorithm.clock.env_steps == state["env_steps"]
        rollout = next(iter(learner.acting.rollouts(lambda: None)))
        greedy = rollout.behavior_log_prob.exp() > 0.5  # 0.02 of all actions are random, half of them the best
        assert greedy.float().mean() > 0.9
    finally:
        learner.close()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"replay.capacity": 10**12},
            r"^replay\.capacity: 1,000,000,000,000 env steps need [\d,.]+ GiB, and there are",
        ),
        ({"replay.capacity": 50}, r"^replay\.capacity: must be larger"),
        ({"replay.disk": "/nowhere"}, r"^replay\.disk: cannot write to /nowhere"),
        (
            {"replay.disk": ".", "replay.capacity": 10**12},
            r"^replay\.capacity: .* GiB, and there are [\d.]+ free in \.$",
        ),
    ],
)
@pytest.mark.parametrize("preset", ["dqn", "seed-r2d2"])
def test_a_replay_that_cannot_be_kept_is_refused_before_anything_is_written(tmp_path, preset, changes, says):
    config = presets.make(preset, "CartPole-v1", **changes, out=str(tmp_path / "run"))
    with pytest.raises(ConfigError, match=says):
        coterie.train(config, quiet=True)
    assert list(tmp_path.iterdir()) == []
