"""V-trace against the paper's sum, and the identities that tie it to the returns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.ops.returns import gae
from tests.ops.trajectories import GAMMA, INF, Data, close, make, slow_n_step, slow_vtrace

BARS = [(1.0, 1.0), (1.0, 0.4), (2.5, 1.3), (0.7, 0.7), (INF, 1.0), (INF, INF)]


@settings(max_examples=80)
@given(
    seed=st.integers(0, 10_000),
    t=st.integers(1, 12),
    b=st.integers(1, 4),
    gamma=st.sampled_from([0.0, 0.5, 0.99, 1.0]),
    bars=st.sampled_from(BARS),
    pg_rho_bar=st.sampled_from([0.5, 1.0, 3.0, INF]),
    lam=st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    ends=st.sampled_from([0.0, 0.15, 0.5]),
    q_from=st.sampled_from(["target", "value"]),
)
def test_vtrace_is_the_papers_sum(
    seed: int, t: int, b: int, gamma: float, bars: tuple[float, float], ends: float, **options: Any
) -> None:
    d = make(seed, t, b, ends)
    options |= {"rho_bar": bars[0], "c_bar": bars[1]}
    out = d.vtrace(gamma, **options)
    target, advantage, largest = slow_vtrace(d, gamma, **options)
    assert out.value_target.dtype == out.advantage.dtype == torch.float32
    close(out.value_target, target, 3e-6 * largest)
    close(out.advantage, advantage, 3e-6 * largest)


def test_the_defaults_of_vtrace_are_the_papers() -> None:
    d = make(1)
    explicit = d.vtrace(rho_bar=1.0, c_bar=1.0, pg_rho_bar=1.0, lam=1.0, q_from="target")
    assert all(torch.equal(a, b) for a, b in zip(d.vtrace(), explicit, strict=True))


@pytest.mark.parametrize("bars", [(1.0, 1.0), (3.0, 2.0), (INF, INF)])
def test_on_policy_targets_are_the_n_step_returns(bars: tuple[float, float]) -> None:
    d = make(2, 20, 8)
    d.log_ratio.zero_()
    out = d.vtrace(rho_bar=bars[0], c_bar=bars[1])
    close(torch.where(d.mask, out.value_target, 0.0), slow_n_step(d, 20))
    for lam in (1.0, 0.8, 0.0):
        advantage, target = gae(*d.rows, GAMMA, lam)
        close(d.vtrace(rho_bar=bars[0], c_bar=bars[1], lam=lam).value_target, target)
        if lam == 1:
            close(out.advantage, advantage)
        if lam == 0:
            close(d.vtrace(q_from="value").advantage, advantage)


@pytest.mark.parametrize("q_from", ["target", "value"])
def test_the_gradients_clip_does_not_change_the_targets(q_from: str) -> None:
    d = make(3, 20, 8)
    ratio, outs = d.log_ratio.exp(), {bar: d.vtrace(pg_rho_bar=bar, q_from=q_from) for bar in (0.5, 1.0, 2.0, INF)}
    for bar, out in outs.items():
        assert torch.equal(out.value_target, outs[1.0].value_target)
        close(out.advantage, outs[INF].advantage / ratio * ratio.clamp(max=bar))
    assert not torch.equal(outs[1.0].value_target, d.vtrace(rho_bar=2.0).value_target)
    alone = d.vtrace(rho_bar=2.0, c_bar=0.5, lam=0.3, q_from="value").advantage
    assert torch.equal(alone, d.vtrace(q_from="value").advantage)  # without v_{s+1} the other clips do nothing


def test_a_truncation_bootstraps_from_the_final_observation_and_a_termination_from_nothing() -> None:
    """obs 0, 1, 2(final) | fake step | obs 3(first), 4. By hand, gamma 0.5, rho 0.5, 1, -, 1."""
    ratio = torch.tensor([[0.5], [2.0], [9.0], [2.0]])
    reward = torch.tensor([[1.0], [2.0], [0.0], [4.0]])
    value = torch.tensor([[10.0], [20.0], [30.0], [40.0], [50.0]])
    mask = torch.tensor([[True], [True], [False], [True]])
    d = Data(ratio.log(), reward, value, torch.zeros(4, 1, dtype=torch.bool), mask)
    target, advantage = d.vtrace(0.5)
    close(target, torch.tensor([[10 + 0.5 + 0.25 * -3], [17.0], [30.0], [29.0]]))
    close(advantage, torch.tensor([[0.5 * (1 + 0.5 * 17 - 10)], [-3.0], [0.0], [-11.0]]))
    d.terminated[1] = True
    target, advantage = d.vtrace(0.5)
    close(target, torch.tensor([[10 + 0.5 + 0.25 * -18], [2.0], [30.0], [29.0]]))
    close(advantage, torch.tensor([[0.5 * (1 + 0.5 * 2 - 10)], [-18.0], [0.0], [-11.0]]))


@pytest.mark.parametrize("huge", [30.0, 100.0, 1e30, INF])
@pytest.mark.parametrize("bars", [(1.0, 1.0), (INF, 1.0)])
def test_huge_log_ratios_stay_finite(huge: float, bars: tuple[float, float]) -> None:
    d = make(7, 200, 8)
    d.log_ratio.copy_(torch.where(d.log_ratio > 0, huge, -huge))
    assert all(x.isfinite().all() for x in d.vtrace(rho_bar=bars[0], c_bar=bars[1], pg_rho_bar=INF))
    clipped, plain = d.vtrace(), Data(d.log_ratio.clamp(-20, 20), *d.rows).vtrace()
    assert all(torch.equal(x, y) for x, y in zip(clipped, plain, strict=True))
