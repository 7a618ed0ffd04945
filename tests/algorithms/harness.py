"""Algorithms on made-up rollouts: gradients of all of a rollout, value methods of each kind, and their batches."""

from __future__ import annotations

import copy

import torch

from coterie.algorithms.a2c import A2C
from coterie.algorithms.base import Compute
from coterie.build.factory import make_algorithm, make_model
from coterie.learner import Gradients
from coterie.models.build import Network
from coterie.parallel.params import FlatParams
from coterie.parallel.threads import Team
from tests.conftest import VECTOR, make_config, make_rollout

LSTM = {"model.core": "lstm", "model.core_size": 8}

SMALL = {
    "q.learn_start": 0, "q.batch_size": 24, "q.intensity": 1.0, "replay.capacity": 800, "env.num_envs": 8,
    "algo.unroll_length": 6, "algo.gamma": 0.9, "reward.clip": "none",
}  # fmt: skip
CORE = {
    "algorithm": "r2d2", "model.core": "lstm", "model.core_size": 8, "r2d2.length": 12, "r2d2.burn_in": 6,
    "r2d2.stride": 6, "q.batch_size": 4, "q.huber": 0.0,
}  # fmt: skip
VARIANTS = {
    "plain": {"q.double": False},
    "double": {"q.n_step": 3},
    "dueling": {"q.dueling": 8, "replay.alpha": 0.6},
    "c51": {"q.atoms": 11, "q.v_min": -2.0, "q.v_max": 2.0, "q.double": False},
    "rainbow": {"q.atoms": 11, "q.v_min": -2.0, "q.v_max": 2.0, "q.dueling": 8, "q.n_step": 3, "replay.alpha": 0.5},
    "noisy": {"q.noisy": True, "q.dueling": 8},
    "r2d2": {**CORE, "replay.alpha": 0.9, "q.dueling": 8},
}


def build(means=None, **changes):
    config = make_config(**{"algorithm": "dqn", **SMALL, **changes})
    model = make_model(config, VECTOR)
    algorithm = make_algorithm(config, VECTOR, means or Compute())
    return algorithm, model


def drawn(algorithm, model, rollouts=6, seed=0):
    """The batches of a few rollouts."""
    core = 8 if model.recurrent else 0
    found, last = [], None
    for i in range(rollouts):
        rollout = make_rollout(VECTOR, 6, 8, seed + i, core_size=core)
        if last is not None:
            rollout.obs[0] = last  # it goes on from the one before
        last = rollout.obs[-1]
        found += algorithm.batches(model, rollout)
    return found


def move(model):
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.3)


def moved(model):
    """Other weights, so that the network and its target differ."""
    other = copy.deepcopy(model)
    move(other)
    return other


def gradient(config, rollout, *, spec=VECTOR, kind=A2C, chunk=0, ways=1, prepare=lambda model: None):
    """The flat gradient of all batches of a rollout (weights unchanged), and the metrics of each."""
    torch.manual_seed(0)
    model = Network(spec, config.model)
    prepare(model)
    params, team = FlatParams(model), Team(ways)
    algorithm, gradients = kind(config, spec, Compute(chunk=chunk)), Gradients(model, params, Compute(team=team))
    metrics = []
    for batch in algorithm.batches(model, rollout):
        batch.metrics = gradients.compute(algorithm, batch)
        metrics.append(batch.metrics)
    team.close()
    return params.grad.clone(), metrics
