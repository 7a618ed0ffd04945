"""C51: the loss over return distributions, and what is said about their range."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from coterie.algorithms.base import Compute
from coterie.learner import Gradients
from coterie.parallel.params import FlatParams
from coterie.types import Inputs
from tests.algorithms.harness import VARIANTS, build, drawn


def test_c51s_loss_has_the_projected_target_and_its_value_is_the_mean():
    algorithm, model = build(**VARIANTS["c51"])
    batch = drawn(algorithm, model)[-1]
    (part,) = batch.parts()
    loss = algorithm.loss(model, part)
    params = model(Inputs(batch.rows.obs, torch.ones(24, dtype=torch.bool), batch.rows.action, torch.zeros(24)))
    probs = params[0].unflatten(-1, (4, 11)).softmax(-1)
    values = (probs * torch.linspace(-2, 2, 11)).sum(-1)
    torch.testing.assert_close(model.expected(params[0]), values)
    torch.testing.assert_close(params[1], values.amax(-1))
    assert (loss.priority >= 0).all()
    entropy_of_target = float(loss.total.detach()) - float(loss.priority.mean())
    assert 0 <= entropy_of_target <= np.log(11)


@pytest.mark.parametrize(("returns", "clipped"), [(0.5, 0.0), (9.0, 1.0), (-9.0, 1.0)])
def test_returns_beyond_the_range_of_c51_are_said_once(returns, clipped):
    algorithm, model = build(**VARIANTS["c51"])
    batch = drawn(algorithm, model)[-1]
    batch.rows.n_step, batch.rows.discount = torch.full((24,), returns), torch.full((24,), 0.1)
    batch.metrics = Gradients(model, FlatParams(model), Compute()).compute(algorithm, batch)
    assert batch.metrics["q_clipped"] == clipped
    said = []
    for _ in range(400):
        algorithm.after_step(model, batch)
        said.append(algorithm.warning())
    lines = [line for line in said if line]
    assert len(lines) == clipped
    assert not any("25% of the targets lie beyond q.v_min and q.v_max (-2 and 2)" not in line for line in lines)
