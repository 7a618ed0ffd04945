"""`coterie bench`: what a turn counts, when its rounds end, and what the parts of a step cost."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from coterie import presets
from coterie.build.resources import resolve_config
from coterie.roles.learner_process import LearnerProcess
from coterie.tools.bench import command
from coterie.tools.bench.command import bench, show, spread
from coterie.tools.bench.turns import EnvOnly, StepTimer, Training, Turn
from coterie.types import AgentOutput


def test_a_turn_starts_again_after_the_rollouts_that_were_acted_before_it():
    turn = Turn(100.0, ahead=2)
    time.sleep(0.05)
    for steps in (1000, 1000, 30, 20):
        turn.count(steps)
    assert turn.steps == 50
    assert len(turn.ends) == 3
    assert not turn.over
    assert turn.rate > 50 / 0.05  # without the time of the first two
    time.sleep(0.05)
    assert turn.rate > 50 / 0.05  # nor is the time of an unfinished one counted


def test_rollouts_that_end_together_are_counted_together():
    turn = Turn(0.0, ahead=3, burst=2)
    for steps in (1000, 1000, 1000, 1000, 30, 20, 7):  # four were ahead, and the last one's companion is missing
        turn.count(steps)
    assert turn.steps == 50
    assert len(turn.ends) == 2
    assert turn.over


def test_a_turn_is_not_over_before_a_whole_burst():
    turn = Turn(0.0, burst=2)
    turn.count(30)
    assert not turn.over
    turn.count(20)
    assert turn.over
    assert turn.rate > 0


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
            costs = StepTimer(learner, training.last).turn(0.5)
    finally:
        training.close()
    assert set(devices) == {torch.device(learner.resources.device)}
    assert costs["act"] > 0
    assert costs["train"] > 0


def test_the_ceiling_is_that_of_cores_and_of_gpus(monkeypatch):
    monkeypatch.setattr(command, "available_cores", lambda: [0, 1, 2, 3])
    rates = {"env_only": 4000.0, "acting": 1.0, "training": 1.0, "env_threads": 4.0}
    one = {**rates, "env": 1e-3, "act": 1e-3, "train": 2e-3}
    for learners, on_gpu, ceiling in (
        ([[one], [one]], [], 1000),
        ([[one], [one]], ["act", "train"], 2e3 / 3),  # each cost includes the wait for the other learner
        ([[one]], ["train"], 500),  # actors
        ([[{**one, "env": 2e-2}]], ["act", "train"], 200),
        ([[{**one, "env_only": 200.0}]] * 2, [], 400),  # envs that wait
        ([[{**one, "env_only": 510.0}]] * 2, [], 1000),
        ([[{**one, "env_only": 480.0, "env_threads": 0.5}]] * 2, [], 1000),  # envs that keep their only core busy
    ):
        assert command._sum(learners, on_gpu)["ceiling"].tolist() == [pytest.approx(ceiling)]


def test_the_spread_is_that_of_the_middle_half():
    assert spread([0.1, 0.98, 1.0, 1.0, 1.01, 9.0]) == pytest.approx(0.0225)
    assert spread([1.0] * 4) == np.inf


@pytest.mark.parametrize(("preset", "options"), [("a2c", {}), ("gala-a2c", {"learners": 2}), ("impala", {})])
def test_rounds_end_once_the_ratio_has_settled_or_the_time_is_over(monkeypatch, preset, options):
    """Other processes measure only in a run with several learners: there the limits are those of the module."""
    config = presets.make(preset, env="CartPole-v1", **{"env.num_envs": 4, "steps": 500, **options})
    monkeypatch.setattr(command, "_SPREAD", 0.0 if preset == "a2c" else np.inf)
    begin = time.monotonic()
    found = bench(config, 3.0)
    assert time.monotonic() - begin < 60
    rounds = found["rounds"]
    assert len({len(values) for values in rounds.values()}) == 1
    assert all(min(values) > 0 for name, values in rounds.items() if not name.endswith("_fixed"))
    calls = found["core_us_per_call"]
    assert all(0 <= calls[f"{name}_fixed"] < 2 * calls[name] for name in ("forward", "step"))
    assert found["ceiling"] == pytest.approx(np.median(rounds["ceiling"]))
    costs = sum(found["core_us_per_step"].values()) / 1e6
    assert found["cores"] / costs == pytest.approx(found["ceiling"], rel=0.5)
    text = show(found)
    assert f"median of {len(rounds['training'])} alternating turn" in text
    assert (found["spread"] is None) == (len(rounds["training"]) < 5)
    if preset == "a2c":
        assert "use a larger --seconds" in text


def test_what_a_call_costs_is_told_from_what_its_rows_cost(monkeypatch):
    """A pass that takes 2 ms, and 0.1 ms more for each row."""
    learner = LearnerProcess(resolve_config(presets.a2c(env="CartPole-v1", **{"env.num_envs": 16})))
    training = Training(learner)

    def busy(model, inputs, *rest):
        end = time.process_time() + 2e-3 + 1e-4 * len(inputs.is_first)
        while time.process_time() < end:
            pass
        return AgentOutput(inputs.prev_action, inputs.prev_reward, inputs.prev_reward), None

    try:
        with learner.exchange:
            training.turn(0.5)
            monkeypatch.setattr(learner.algorithm, "act", busy)
            parts = StepTimer(learner, training.last)
            found = parts.calls(1.0)
            assert set(found) == {"forward", "forward_fixed"}  # no learner step was seen
            parts.turn(0.1)
            assert {"step", "step_fixed"} < set(parts.calls(0.1))
    finally:
        training.close()
    assert found["forward"] == pytest.approx(2e-3 + 1e-4 * parts.width, rel=0.1)
    assert found["forward_fixed"] == pytest.approx(2e-3, rel=0.2)


def test_the_cost_of_an_env_step_counts_the_time_of_worker_processes():
    """A step of this env takes a core for 2 ms, whatever the number of its workers."""
    options = {"env.num_envs": 4, "env.backend": "workers", "env.threads": 2}
    learner = LearnerProcess(resolve_config(presets.a2c(env="tests.support.slow_env:Slow", **options)))
    env_only = EnvOnly(learner)
    try:
        _, cost = env_only.turn(1.5)
    finally:
        env_only.envs.close()
        learner.close()
    assert 0.0018 < cost < 0.004
