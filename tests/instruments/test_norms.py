"""Layer norms and the cosine of half a batch's gradient, with any algorithm."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from coterie.algorithms.base import Loss
from coterie.build.resources import resolve_config
from coterie.instruments.norms import Norms
from coterie.learner import Gradients
from coterie.parallel.params import FlatParams
from coterie.parallel.threads import Team
from coterie.roles.learner_process import LearnerProcess
from tests.conftest import after, make_config


class Noise:
    """A batch whose samples' gradients are independent noise, or all the same."""

    def __init__(self, noise, same, chunk=1):
        self.noise, self.same, self.chunk = noise, same, chunk

    def parts(self, ways=1):
        yield from self.noise.tensor_split(max(ways, len(self.noise) // self.chunk))

    def loss(self, model, part):
        wanted = part.sum(0) if not self.same else torch.ones_like(part[0]) * len(part)
        return Loss((model.weight[0] * wanted).sum(), {})


@pytest.mark.parametrize("ways", [1, 2, 3])
@pytest.mark.parametrize("same", [True, False])
def test_of_white_noise_the_cosine_is_the_root_of_a_half_and_of_one_direction_it_is_one(same, ways):
    torch.manual_seed(0)
    model = nn.Linear(20_000, 1, bias=False)
    params, team = FlatParams(model), Team(ways)
    gradients = Gradients(model, params, team, nullcontext)
    norms, batch = Norms(gradients, 10), Noise(torch.randn(24, 20_000), same)
    gradients.compute(batch, batch)
    norms.gradient(0, batch, batch)
    whole = batch.noise.sum(0) if not same else torch.full((20_000,), 24.0)
    torch.testing.assert_close(params.grad, whole, atol=1e-4, rtol=1e-5)  # halved or not, it is the batch's
    params.data.add_(1.0)
    norms.step()
    found = norms.gauges()
    assert found["cosine/half"] == pytest.approx(1 if same else math.sqrt(0.5), abs=0.02)
    assert found["norm/gradient/weight"] == pytest.approx(float(whole.norm()), rel=1e-5)
    assert found["norm/step/weight"] == pytest.approx(math.sqrt(20_000), rel=1e-4)
    for env_steps, due in ((9, False), (10, True)):
        norms.gradient(env_steps, batch, batch)
        assert bool(norms.gauges()) == due
    team.close()


@pytest.mark.parametrize("algorithm", ["a2c", "ppo", "vtrace", "dqn"])
def test_any_algorithm_tells_them_and_learns_the_same(algorithm):
    small = {"q.learn_start": 80, "q.batch_size": 16, "q.intensity": 2.0, "replay.capacity": 4000}
    small |= {"algo.unroll_length": 8, "ppo.minibatch_size": 16}
    found = []
    for every in (0, 40):
        learner = LearnerProcess(resolve_config(make_config(algorithm=algorithm, **small, **{"log.norms": every})))
        learner.run(after(6))
        gauges = learner.gauges()
        learner.close()
        found.append((learner.params.data.clone(), gauges))
    torch.testing.assert_close(found[0][0], found[1][0], atol=1e-5, rtol=1e-4)
    told = found[1][1]
    assert not any(name.startswith("norm/") for name in found[0][1])
    kinds = {name.split("/")[1] for name in told if name.startswith("norm/")}
    assert kinds == {"gradient", "weights", "step"}
    assert 0 < told["cosine/half"] <= 1.0001
