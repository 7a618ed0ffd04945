"""`coterie bench`: what a turn counts, and that the acting cost is measured on the learner's device."""

from __future__ import annotations

import time

import torch

from coterie import presets
from coterie.build.resources import resolve_config
from coterie.roles.learner_process import LearnerProcess
from coterie.tools.bench import Training, Turn, _costs


def test_a_turn_starts_again_after_the_rollouts_that_were_acted_before_it():
    turn = Turn(100.0, ahead=2)
    time.sleep(0.05)
    for steps in (1000, 1000, 30, 20):
        turn.count(steps)
    assert turn.steps == 50
    assert len(turn.ends) == 3
    assert not turn.over
    assert turn.rate > 50 / 0.05  # without the time of the first two


def test_the_cost_of_acting_is_measured_with_the_envs_own_exploration(monkeypatch):
    """Of value learning on whatever device: a CPU tensor as `explore` fails on a GPU."""
    config = presets.dqn(env="CartPole-v1", **{"env.num_envs": 4, "q.learn_start": 500, "q.batch_size": 16})
    learner = LearnerProcess(resolve_config(config))
    training = Training(learner)
    devices = []
    explore = learner.algorithm.explore
    monkeypatch.setattr(learner.algorithm, "explore", lambda ids: devices.append(ids.device) or explore(ids))
    try:
        with learner.exchange:
            training.turn(1.0)
            devices.clear()
            costs = _costs(learner, training.last)
    finally:
        training.close()
    assert set(devices) == {torch.device(learner.resources.device)}
    assert costs["act"] > 0
    assert costs["train"] > 0
