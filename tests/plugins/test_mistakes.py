"""Mistakes in a user's parts that would train nothing, or something else, are one line at the first step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import coterie
from coterie.algorithms.dqn import DQN
from coterie.algorithms.ppo import PPO
from coterie.build.resources import plain_torch, resolve_config
from coterie.errors import ConfigError, CoterieError
from coterie.exchange.base import ExchangeKind
from coterie.exchange.solo import Solo
from coterie.exchange.table import EXCHANGES
from coterie.roles.learner_process import LearnerProcess
from coterie.runs.metrics import read_metrics
from tests.conftest import make_config

QUIET = {"log.tensorboard": False, "device": "cpu"}


class Cleared(PPO):
    def after_step(self, model: Any, batch: Any) -> None:
        [x for x in model.parameters() if x.requires_grad][-1].grad = None  # as zero_grad has it


class Cast(PPO):
    def after_step(self, model: Any, batch: Any) -> None:
        model.double().float()


class Summed(PPO):
    def act(self, *args: Any) -> Any:
        out, core_state = super().act(*args)
        return out._replace(log_prob=out.log_prob.sum()), core_state


class Wide(PPO):
    def act(self, *args: Any) -> Any:
        out, core_state = super().act(*args)
        return out._replace(value=out.value[:, None]), core_state


class Unranked(DQN):
    def loss(self, *args: Any) -> Any:
        return replace(super().loss(*args), priority=None)


class Keeps(Solo):
    """Does not clear the gradient."""

    def step(self, params: Any, lr: float) -> float:
        params.data -= lr * params.grad
        return 1.0


class Rebinds(Solo):
    def step(self, params: Any, lr: float) -> float:
        params.data = params.data - lr * params.grad
        params.grad.zero_()
        return 1.0


class Mute(Solo):
    def step(self, params: Any, lr: float) -> Any:
        super().step(params, lr)


class Told(coterie.Callback):
    def on_rollout(self, run: Any) -> bool:
        return True


VIEWS = r"weights or gradients are other tensors \(zero_grad, double, data =\); set in place"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"algorithm": Cleared}, VIEWS),
        ({"algorithm": Cast}, VIEWS),
        ({"exchange": Rebinds}, VIEWS),
        ({"algorithm": Summed}, r"act must give a tensor \[4\] as log_prob, not a tensor \[\]"),
        ({"algorithm": Wide}, r"act must give a tensor \[4\] as value, not a tensor \[4, 1\]"),
        ({"preset": "rainbow", "algorithm": Unranked, "q.learn_start": 400}, "loss must return a priority for each"),
        ({"exchange": Keeps}, "exchange: step must set params.grad to zero"),
        ({"exchange": Mute}, "exchange: step must return the norm of the gradient, not None"),
        ({"callbacks": [Told]}, "Told.on_rollout: it returned True; what ends a run is should_stop"),
    ],
)
def test_a_mistake_that_would_pass_unseen_is_one_line(options: dict[str, Any], says: str, tmp_path: Any) -> None:
    sizes = {"env.num_envs": 4, "learners": 1, "steps": 2000, **QUIET}
    with pytest.raises(CoterieError, match=says):
        coterie.train(env="CartPole-v1", out=tmp_path / "run", quiet=True, **{"preset": "ppo", **sizes, **options})


def test_an_exchange_for_one_learner_refuses_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXCHANGES.kinds, "lone", ExchangeKind(Solo, one_learner=True))
    with pytest.raises(ConfigError, match=r"^learners: 2 must be 1 with exchange lone$"):
        LearnerProcess(resolve_config(make_config(exchange="lone", learners=2)))


class Named(PPO):
    """Its metric has the name of one of the run's own."""

    def loss(self, *args: Any) -> Any:
        found = super().loss(*args)
        found.metrics["env_steps"] = torch.tensor(-1.0)
        return found


def test_a_users_metric_does_not_take_the_place_of_the_runs_own(tmp_path: Any) -> None:
    out, sizes = tmp_path / "run", {"env.num_envs": 4, "learners": 1, "steps": 2000, **QUIET}
    coterie.train(preset="ppo", algorithm=Named, env="CartPole-v1", out=out, quiet=True, **sizes)
    assert read_metrics(out)[-1]["env_steps"] >= 2000


def test_processes_draw_numbers_of_their_own_and_a_program_keeps_its_state() -> None:
    config = resolve_config(make_config(**{"env.num_envs": 2}))
    before, drawn = torch.random.get_rng_state(), []
    state = np.random.get_state()[1].copy()
    for life in (0, 0, 1):
        with plain_torch():
            LearnerProcess(config, life).close()
            drawn.append((float(torch.rand(())), np.random.rand()))
    assert drawn[0] == drawn[1] != drawn[2]
    assert torch.equal(torch.random.get_rng_state(), before)
    assert (np.random.get_state()[1] == state).all()
