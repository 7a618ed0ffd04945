"""One policy for several tasks: shares of the actors, the union of the actions, returns of each."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import coterie
from coterie.build.evaluate import Scores
from coterie.cli.main import main
from coterie.config import Atari, Env
from coterie.envs.make import _union, env_adapters, make_spec
from coterie.envs.tasks import are_normalized, child_env, overall
from coterie.errors import ConfigError
from coterie.runs.metrics import read_metrics
from coterie.types import ActionSpec, ObsSpec, Spec
from tests.conftest import make_config

# Games of 5 steps in which action 1 pays; each task refuses an action that it has not.
MODULE = """
import gymnasium
import numpy as np


class Task(gymnasium.Env):
    def __init__(self, n, pay):
        self.observation_space = gymnasium.spaces.Box(-1, 1, (3,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(n)
        self.n, self.pay = n, pay

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(3, np.float32), {}

    def step(self, action):
        assert 0 <= action < self.n, action
        self.t += 1
        return np.full(3, self.t / 5, np.float32), self.pay * float(action == 1), self.t == 5, False, {"pays": self.pay}


def two():
    return Task(2, 1.0)


def five():
    return Task(5, 10.0)
"""


@pytest.fixture
def both(tmp_path, monkeypatch) -> str:
    (tmp_path / "toy_tasks.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "toy_tasks:two,toy_tasks:five"


def test_a_policy_learns_two_tasks_and_reports_the_return_of_each(both, tmp_path, capsys):
    out = tmp_path / "run"
    # In lockstep the weights, and so the returns, do not depend on the machine's speed.
    args = ["--env", both, "--actors", "2", "--env.num-envs", "8", "--steps", "8000", "--decoupled.lockstep", "True"]
    more = ["--eval.every", "4000", "--eval.episodes", "4", "--log.every", "0.2", "--log.tensorboard", "False"]
    assert main(["train", "impala", *args, *more, "--out", str(out)]) == 0
    summary = json.loads((out / "summary.json").read_text())
    assert summary["envs_replaced"] == 0  # a task never receives an action that it does not have
    told = summary["tasks"]
    assert told["return/toy_tasks:two"] > 4
    assert told["return/toy_tasks:five"] > 40
    assert told["score"] == pytest.approx((told["return/toy_tasks:two"] + told["return/toy_tasks:five"]) / 2)
    assert any("return/toy_tasks:five" in line and "score" in line for line in read_metrics(out))
    capsys.readouterr()
    assert main(["eval", str(out), "--episodes", "4", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [(t["env"], t["mean_return"]) for t in result["tasks"]] == [("toy_tasks:two", 5.0), ("toy_tasks:five", 50.0)]
    assert result["mean_return"] == result["score"] == 27.5
    assert result["info"] == {"pays": 5.5}
    assert main(["eval", str(out), "--episodes", "4"]) == 0
    assert f"{both}: mean of the returns: 27.5 (8 episodes, greedy, " in capsys.readouterr().out
    cut = coterie.evaluate_run(out, episodes=4, stop=lambda done, steps: steps > 2)
    assert (cut["unfinished"], len(cut["tasks"])) == (8, 1), "no other task begins"
    assert main(["resume", str(out), "--steps", "8500"]) == 0


@pytest.mark.parametrize(("learners", "actors"), [(1, 2), (2, 4), (2, 8), (4, 8), (3, 6)])
def test_each_learner_has_actors_of_each_task(both, learners, actors):
    config = make_config(**{"env.id": both, "acting": "decoupled", "learners": learners, "actors": actors})
    each = actors // learners
    for rank in range(learners):
        shares = [child_env(config, number, rank)[0].env.id for number in range(each)]
        assert {shares.count(task) for task in both.split(",")} == {each // 2}


def test_atari_tasks_share_the_full_action_set():
    env = Env(id="Pong-v5, Breakout-v5")
    spec = make_spec(env, Atari())
    assert env_adapters(env, Atari()).actions.spec.sizes == spec.action.sizes == (18,)
    assert spec.env_id == "Pong-v5, Breakout-v5"


def test_the_score_is_normalized_and_capped_where_all_have_a_reference():
    assert overall({"Pong-v5": 21.0, "Breakout-v5": 1.7}) == pytest.approx(0.5)
    assert overall({"Pong-v5": 21.0, "CartPole-v1": 100.0}) == 60.5
    each = [Scores("Pong-v5", [21.0, 19.0]), Scores("Breakout-v5", [1.7, 1.7])]
    told = Scores("Pong-v5,Breakout-v5", [21.0, 19.0, 1.7, 1.7], [9, 9, 9, 9], tasks=each).to_json()
    assert told["mean_return"] == pytest.approx(10.85)
    assert told["score"] == pytest.approx(0.5)
    assert (are_normalized(["Pong-v5", "Breakout-v5"]), are_normalized(["Pong-v5", "CartPole-v1"])) == (True, False)


SPEC = Spec("a", {"": ObsSpec((2,), "float32", 0, 1)}, ActionSpec("continuous", low=(-1.0,), high=(1.0,)))


@pytest.mark.parametrize(
    ("other", "what"),
    [
        ({"obs": {"": ObsSpec((2,), "uint8")}}, "observations"),
        ({"agents": 2}, "numbers of agents"),
        ({"action": ActionSpec("continuous", low=(-2.0,), high=(1.0,)), "action_repeat": 4}, "numbers .* and actions"),
    ],
)
def test_what_differs_between_tasks_is_named(other, what):
    with pytest.raises(ConfigError, match=rf"^env\.id: a and b have different {what}$"):
        _union("a,b", [SPEC, replace(SPEC, env_id="b", **other)])


def test_tasks_may_have_other_bounds_of_observations():
    wide = replace(SPEC, env_id="b", obs={"": ObsSpec((2,), "float32", -3, 0.5)})
    assert _union("a,b", [SPEC, wide]).obs[""] == ObsSpec((2,), "float32", -3, 1)


@pytest.mark.parametrize(
    ("env", "args", "says"),
    [
        ("CartPole-v1,Pong-v5", [], "env.id: CartPole-v1 and Pong-v5 have different observations"),
        ("CartPole-v1,CartPole-v0", ["--acting", "inline"], "must be a single task, or set acting to "),
        ("CartPole-v1,CartPole-v0", ["--actors", "3"], "actors: "),
    ],
)
def test_tasks_that_cannot_be_trained_together_are_refused(capsys, env, args, says):
    assert main(["train", "impala", "--env", env, *args]) == 2
    assert says in capsys.readouterr().err
