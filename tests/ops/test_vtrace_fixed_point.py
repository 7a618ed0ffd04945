"""V-trace's fixed point, by the library's function on every trajectory of three steps of a small made-up MDP.

Each trajectory weighs as much as its probability under mu: expectations are exact, nothing is sampled.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests.ops.test_vtrace import Data, close

INF = math.inf
STATES, ACTIONS, STEPS, DISCOUNT = 3, 2, 3, 0.75  # a discount that float32 holds exactly: all else is float64


@dataclass
class Mdp:
    mu: Tensor  # [S, A]
    pi: Tensor
    dynamics: Tensor  # [S, A, S]
    reward: Tensor  # [S, A, S]
    over: Tensor  # [S, A] bool: ends the episode
    state: Tensor  # [STEPS + 1, N]: of every trajectory
    action: Tensor  # [STEPS, N]
    probability: Tensor  # [N], given its first state

    def value(self, policy: Tensor) -> Tensor:
        """`[S]`, by linear algebra."""
        move = policy[..., None] * self.dynamics
        kept = (move * ~self.over[..., None]).sum(1)
        return torch.linalg.solve(torch.eye(STATES).double() - DISCOUNT * kept, (move * self.reward).sum((1, 2)))

    def q(self, value: Tensor) -> Tensor:
        """`[S, A]`"""
        after = DISCOUNT * value * ~self.over[..., None]
        return (self.dynamics * (self.reward + after)).sum(-1)

    def steps(self, value: Tensor) -> Data:
        at, to = (self.state[:-1], self.action), self.state[1:]
        terminated = self.over[at]
        mask = torch.ones_like(terminated)
        mask[1:] = ~terminated[:-1]  # a fake step follows an end; where it leads to, another episode starts
        mask[2:] |= ~mask[1:-1]
        log_ratio = (self.pi / self.mu)[at].log()
        return Data(log_ratio, self.reward[(*at, to)], value[self.state], terminated & mask, mask)

    def expect(self, x: Tensor, *index: Tensor) -> Tensor:
        """Expectation under mu of `x` `[N]` given the first state, or that and the first action."""
        out, total = torch.zeros(2, *[(STATES, ACTIONS)[i] for i in range(len(index))]).double()
        out.index_put_(index, self.probability * x, accumulate=True)
        total.index_put_(index, self.probability, accumulate=True)
        return out / total


@functools.cache
def mdp() -> Mdp:
    g = torch.Generator().manual_seed(3)

    def simplex(*shape: int) -> Tensor:
        return torch.rand(shape, generator=g, dtype=torch.float64).log().mul(0.8).softmax(-1)

    mu, pi, dynamics = simplex(STATES, ACTIONS), simplex(STATES, ACTIONS), simplex(STATES, ACTIONS, STATES)
    reward = torch.randn(STATES, ACTIONS, STATES, generator=g, dtype=torch.float64)
    over = torch.zeros(STATES, ACTIONS, dtype=torch.bool)
    over[1, 0] = True
    axes = [range(STATES)] + [range(ACTIONS), range(STATES)] * STEPS
    all_of_them = torch.tensor(list(itertools.product(*axes))).T
    state, action = all_of_them[0::2], all_of_them[1::2]
    step = mu[state[:-1], action] * dynamics[state[:-1], action, state[1:]]
    return Mdp(mu, pi, dynamics, reward, over, state, action, step.prod(0))


def test_the_trajectories_are_all_there_are() -> None:
    m = mdp()
    assert m.state.shape[1] == STATES * (ACTIONS * STATES) ** STEPS
    total = torch.zeros(STATES).double().index_add_(0, m.state[0], m.probability)
    close(total, torch.ones(STATES), 1e-12)
    ratio = m.pi / m.mu
    assert ratio.max() > 2  # so that each bar below clips something
    assert ratio.min() < 0.5


@pytest.mark.parametrize("lam", [1.0, 0.6])
@pytest.mark.parametrize(
    ("rho_bar", "c_bar"),
    [(1.0, 1.0), (1.0, 0.3), (1.0, 0.01), (1.6, 1.6), (1.6, 0.8), (INF, INF), (INF, 1.0), (0.2, 0.2)],
)
def test_values_converge_to_those_of_the_policy_between(rho_bar: float, c_bar: float, lam: float) -> None:
    """Theorem 1: to V of pi_rho(a|x) = min(rho_bar mu, pi) / sum_b min(rho_bar mu, pi), as fast as it says."""
    m = mdp()
    between = torch.minimum(rho_bar * m.mu, m.pi)
    eta = 1 - (1 - DISCOUNT) * between.sum(-1).min().item()  # beta: the least E_mu min(rho_bar, pi/mu)
    between /= between.sum(-1, keepdim=True)
    truth = m.value(between)
    far = [(truth - m.value(p)).abs().max() > 0.02 for p in (m.mu, m.pi)]
    assert far == [rho_bar > 0.2, rho_bar < INF]

    value, change = torch.tensor([5.0, -3.0, 8.0]).double(), INF
    options = {"rho_bar": rho_bar, "c_bar": c_bar, "lam": lam}
    for _ in range(1000):
        new = m.expect(m.steps(value)(DISCOUNT, **options).value_target[0], m.state[0])
        last, change, value = change, (new - value).abs().max().item(), new
        assert change <= eta * last + 1e-12
        if change < 1e-11:
            break
    close(value, truth, 1e-9)

    # There the advantages are those of pi_rho's Q, times the clipped ratio.
    for q_from in ("target", "value"):
        out = m.steps(truth)(DISCOUNT, **options, pg_rho_bar=1.5, q_from=q_from)
        expected = (m.pi / m.mu).clamp(max=1.5) * (m.q(truth) - truth[:, None])
        close(m.expect(out.advantage[0], m.state[0], m.action[0]), expected, 1e-9)
