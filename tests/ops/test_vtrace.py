"""V-trace against the paper's sum, written slowly, and the identities that tie it to the returns."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from coterie.ops.returns import gae, n_step_return
from coterie.ops.vtrace import VTrace, vtrace

GAMMA = 0.9
INF = math.inf


@dataclass
class Data:
    log_ratio: Tensor
    reward: Tensor
    value: Tensor
    terminated: Tensor
    mask: Tensor

    def __call__(self, gamma: float = GAMMA, **options: Any) -> VTrace:
        return vtrace(self.log_ratio, self.reward, self.value, self.terminated, self.mask, gamma, **options)


def make(seed: int, t: int = 9, b: int = 5, ends: float = 0.15) -> Data:
    """Flags and masks that are independent of each other: more than what a rollout can hold."""
    rng = np.random.default_rng(seed)
    floats = [rng.normal(size=(rows, b)).astype(np.float32) for rows in (t, t, t + 1)]
    flags = [rng.random((t, b)) < ends, rng.random((t, b)) > ends]
    return Data(*map(torch.from_numpy, floats + flags))


def slow(
    d: Data, gamma: float, rho_bar: float, c_bar: float, pg_rho_bar: float, lam: float, q_from: str
) -> tuple[np.ndarray, np.ndarray, float]:
    """Both outputs as sums over each row's future, and the largest term of any sum, which rounding goes by."""
    value, reward = d.value.double().numpy(), d.reward.double().numpy()
    ratio, mask = np.exp(d.log_ratio.double().numpy()), d.mask.numpy()
    steps, envs = reward.shape
    target, advantage, largest = value.copy(), np.zeros((steps, envs)), 1.0
    for i in range(envs):
        for s in reversed(range(steps)):
            weight = 1.0
            for t in range(s, steps):
                if not mask[t, i]:
                    break
                discount = 0.0 if d.terminated[t, i] else gamma
                delta = min(rho_bar, ratio[t, i]) * (reward[t, i] + discount * value[t + 1, i] - value[t, i])
                target[s, i] += weight * delta
                largest = max(largest, abs(weight * delta))
                weight *= discount * lam * min(c_bar, ratio[t, i])
            if mask[s, i]:
                after = target[s + 1, i] if q_from == "target" else value[s + 1, i]
                q = reward[s, i] + (0.0 if d.terminated[s, i] else gamma) * after
                advantage[s, i] = min(pg_rho_bar, ratio[s, i]) * (q - value[s, i])
                largest = max(largest, abs(advantage[s, i]), min(pg_rho_bar, ratio[s, i]) * largest)
    return target[:-1], advantage, largest


def close(actual: Tensor, expected: np.ndarray | Tensor, atol: float = 1e-5) -> None:
    np.testing.assert_allclose(actual.numpy(), np.asarray(expected), rtol=1e-5, atol=atol)


BARS = [(1.0, 1.0), (1.0, 0.4), (2.5, 1.3), (0.7, 0.7), (INF, 1.0), (INF, INF)]


@settings(deadline=None, max_examples=80)
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
def test_the_papers_sum(
    seed: int,
    t: int,
    b: int,
    gamma: float,
    bars: tuple[float, float],
    pg_rho_bar: float,
    lam: float,
    ends: float,
    q_from: str,
) -> None:
    d, options = make(seed, t, b, ends), (*bars, pg_rho_bar, lam, q_from)
    names = ("rho_bar", "c_bar", "pg_rho_bar", "lam", "q_from")
    out = d(gamma, **dict(zip(names, options, strict=True)))
    target, advantage, largest = slow(d, gamma, *options)
    assert out.value_target.dtype == out.advantage.dtype == torch.float32
    close(out.value_target, target, 3e-6 * largest)
    close(out.advantage, advantage, 3e-6 * largest)


def test_the_defaults_are_the_papers() -> None:
    d = make(1)
    explicit = d(rho_bar=1.0, c_bar=1.0, pg_rho_bar=1.0, lam=1.0, q_from="target")
    assert all(torch.equal(a, b) for a, b in zip(d(), explicit, strict=True))


@pytest.mark.parametrize("bars", [(1.0, 1.0), (3.0, 2.0), (INF, INF)])
def test_on_policy_targets_are_the_n_step_returns(bars: tuple[float, float]) -> None:
    d = make(2, 20, 8)
    d.log_ratio.zero_()
    rest = (d.reward, d.value, d.terminated, d.mask, GAMMA)
    out = d(rho_bar=bars[0], c_bar=bars[1])
    close(torch.where(d.mask, out.value_target, 0.0), n_step_return(*rest, 20))
    for lam in (1.0, 0.8, 0.0):
        advantage, target = gae(*rest, lam)
        close(d(rho_bar=bars[0], c_bar=bars[1], lam=lam).value_target, target)
        if lam == 1:
            close(out.advantage, advantage)
        if lam == 0:
            close(d(q_from="value").advantage, advantage)


def weights(rho_bar: float, c_bar: float) -> Tensor:
    """d v_s / d r_t, `[s, t]`, of five steps: column t has a reward of 1 at step t and all else 0."""
    log_ratio = torch.tensor([3.0, 0.5, 1.5, 2.0, 4.0]).log()[:, None].expand(5, 5)
    no, yes = torch.zeros(5, 5, dtype=torch.bool), torch.ones(5, 5, dtype=torch.bool)
    d = Data(log_ratio, torch.eye(5), torch.zeros(6, 5), no, yes)
    return d(0.5, rho_bar=rho_bar, c_bar=c_bar).value_target


def test_rho_weighs_the_deltas_and_c_the_way_to_them() -> None:
    some = weights(2.5, 1.25)
    assert some.tril(-1).eq(0).all()
    close(some.diag(), torch.tensor([2.5, 0.5, 1.5, 2.0, 2.5]))
    trace = some / some.diag()  # of v_s, column t: product of gamma c from s to before t
    close(trace[0], torch.tensor([1.0, 0.625, 0.625 * 0.25, 0.625**2 * 0.25, 0.625**3 * 0.25]))
    for c_bar in (0.3, 1.0, 2.5):
        other = weights(2.5, c_bar)
        close(other.diag(), some.diag())
        assert (other[0, 1:] - some[0, 1:]).abs().min() > 0.01
    for rho_bar in (1.25, 2.0, INF):
        other = weights(rho_bar, 1.25)
        close(other / other.diag(), trace)
        assert abs(other[4, 4] - some[4, 4]) > 0.1


@pytest.mark.parametrize("q_from", ["target", "value"])
def test_the_clip_of_the_gradient_is_its_own(q_from: str) -> None:
    d = make(3, 20, 8)
    ratio, outs = d.log_ratio.exp(), {bar: d(pg_rho_bar=bar, q_from=q_from) for bar in (0.5, 1.0, 2.0, INF)}
    for bar, out in outs.items():
        assert torch.equal(out.value_target, outs[1.0].value_target)
        close(out.advantage, outs[INF].advantage / ratio * ratio.clamp(max=bar))
    assert not torch.equal(outs[1.0].value_target, d(rho_bar=2.0).value_target)
    assert torch.equal(d(q_from="value").value_target, d(q_from="target").value_target)
    alone = d(rho_bar=2.0, c_bar=0.5, lam=0.3, q_from="value").advantage  # without v_{s+1} the others' clips do nothing
    assert torch.equal(alone, d(q_from="value").advantage)


def test_a_truncation_bootstraps_from_the_final_observation_and_a_termination_from_nothing() -> None:
    """obs 0, 1, 2(final) | fake step | obs 3(first), 4. By hand, gamma 0.5, rho 0.5, 1, -, 1."""
    ratio = torch.tensor([[0.5], [2.0], [9.0], [2.0]])
    reward = torch.tensor([[1.0], [2.0], [0.0], [4.0]])
    value = torch.tensor([[10.0], [20.0], [30.0], [40.0], [50.0]])
    mask = torch.tensor([[True], [True], [False], [True]])
    d = Data(ratio.log(), reward, value, torch.zeros(4, 1, dtype=torch.bool), mask)
    target, advantage = d(0.5)
    close(target, torch.tensor([[10 + 0.5 + 0.25 * -3], [17.0], [30.0], [29.0]]))
    close(advantage, torch.tensor([[0.5 * (1 + 0.5 * 17 - 10)], [-3.0], [0.0], [-11.0]]))
    d.terminated[1] = True
    target, advantage = d(0.5)
    close(target, torch.tensor([[10 + 0.5 + 0.25 * -18], [2.0], [30.0], [29.0]]))
    close(advantage, torch.tensor([[0.5 * (1 + 0.5 * 2 - 10)], [-18.0], [0.0], [-11.0]]))


@pytest.mark.parametrize("poison", [1e6, math.nan, INF, -INF])
@pytest.mark.parametrize("q_from", ["target", "value"])
def test_nothing_on_a_masked_row_reaches_a_valid_one(poison: float, q_from: str) -> None:
    d = make(4, 30, 16)
    bad = Data(
        torch.where(d.mask, d.log_ratio, poison),
        torch.where(d.mask, d.reward, poison),
        d.value,
        torch.where(d.mask, d.terminated, True),
        d.mask,
    )
    bars = {"rho_bar": INF, "pg_rho_bar": INF, "q_from": q_from}
    clean, dirty = d(**bars), bad(**bars)
    assert all(torch.equal(x, y) for x, y in zip(clean, dirty, strict=True))
    assert torch.equal(clean.value_target[~d.mask], d.value[:-1][~d.mask])
    assert (clean.advantage[~d.mask] == 0).all()
    assert (~d.mask).sum() > 20


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10_000), q_from=st.sampled_from(["target", "value"]))
def test_an_episode_knows_nothing_of_the_next(seed: int, q_from: str) -> None:
    """Changing everything from a masked row's next obs on, or after a termination, changes nothing before it."""
    d = make(seed, 12, 1)
    for cut in range(12):
        if d.mask[cut] and not d.terminated[cut]:
            continue
        log_ratio, reward, value = d.log_ratio.clone(), d.reward.clone(), d.value.clone()
        log_ratio[cut + 1 :] += 1
        reward[cut + 1 :] += 100
        value[cut + 1 :] -= 100
        after = Data(log_ratio, reward, value, d.terminated, d.mask)(q_from=q_from)
        for x, y in zip(d(q_from=q_from), after, strict=True):
            assert torch.equal(x[: cut + 1], y[: cut + 1])


def test_one_step_is_the_td_error_whatever_q_is_from() -> None:
    d = make(5, 1, 1, 0.0)
    delta = d.reward + GAMMA * d.value[1:] - d.value[:1]
    ratio = d.log_ratio.exp()
    for q_from in ("target", "value"):
        target, advantage = d(rho_bar=INF, pg_rho_bar=0.2, q_from=q_from)
        close(target, d.value[:1] + ratio * delta)
        close(advantage, ratio.clamp(max=0.2) * delta)


def test_an_env_alone_gives_what_it_gives_among_others() -> None:
    d = make(6)
    whole = d()
    for i in range(5):
        column = slice(i, i + 1)
        one = Data(*(x[:, column] for x in (d.log_ratio, d.reward, d.value, d.terminated, d.mask)))()
        for x, y in zip(one, whole, strict=True):
            close(x, y[:, column], 1e-6)


@pytest.mark.parametrize("huge", [30.0, 100.0, 1e30, INF])
@pytest.mark.parametrize("bars", [(1.0, 1.0), (INF, 1.0)])
def test_huge_log_ratios_stay_finite(huge: float, bars: tuple[float, float]) -> None:
    d = make(7, 200, 8)
    d.log_ratio.copy_(torch.where(d.log_ratio > 0, huge, -huge))
    assert all(x.isfinite().all() for x in d(rho_bar=bars[0], c_bar=bars[1], pg_rho_bar=INF))
    clipped, plain = d(), Data(d.log_ratio.clamp(-20, 20), d.reward, d.value, d.terminated, d.mask)()
    assert all(torch.equal(x, y) for x, y in zip(clipped, plain, strict=True))


def test_inputs_are_left_alone_and_no_graph_is_built() -> None:
    d = make(8)
    inputs = (d.log_ratio, d.reward, d.value, d.terminated, d.mask)
    copies = [x.clone() for x in inputs]
    d.log_ratio.requires_grad_()
    d.value.requires_grad_()
    assert not any(x.requires_grad for x in d())
    assert all(torch.equal(a, b) for a, b in zip(copies, inputs, strict=True))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"rho_bar": 0.5}, "rho_bar 0.5 is below c_bar 1.0"),
        ({"c_bar": INF}, "rho_bar 1.0 is below c_bar inf"),
        ({"rho_bar": 0.0}, "above 0"),
        ({"c_bar": 0.0}, "above 0"),
        ({"pg_rho_bar": 0.0}, "above 0"),
        ({"rho_bar": math.nan}, "above 0"),
        ({"q_from": "vtrace"}, "not 'vtrace'"),
    ],
)
def test_refusals(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as e:
        make(9)(**options)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda d: Data(d.log_ratio[:-1], d.reward, d.value, d.terminated, d.mask),
        lambda d: Data(d.log_ratio, d.reward, d.value[:-1], d.terminated, d.mask),
        lambda d: Data(d.log_ratio, d.reward, d.value, d.terminated[:, :1], d.mask),
        lambda d: Data(d.log_ratio, d.reward, d.value, d.terminated, d.mask.float()),
        lambda d: Data(*(x[:, 0] for x in (d.log_ratio, d.reward, d.value, d.terminated, d.mask))),
    ],
)
def test_misaligned_shapes_are_refused(wrong: Callable[[Data], Data]) -> None:
    with pytest.raises(AssertionError):
        wrong(make(10))()
