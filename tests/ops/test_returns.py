"""Returns and advantages against the papers' sums, written slowly, and the identities that tie them together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from coterie.ops.returns import RunningReturns, explained_variance, gae, n_step_return, running_return

GAMMA = 0.9


@dataclass
class Data:
    reward: Tensor
    value: Tensor
    terminated: Tensor
    is_first: Tensor

    @property
    def mask(self) -> Tensor:
        return ~self.is_first[1:]


def make(seed: int, t: int = 7, b: int = 5, ends: float = 0.2) -> Data:
    """Rows as the Recorder writes them: an episode's end is followed by a fake step with reward 0 and no flags."""
    rng = np.random.default_rng(seed)
    is_first, terminated = np.zeros((t + 1, b), bool), np.zeros((t, b), bool)
    reward = rng.normal(size=(t, b)).astype(np.float32)
    is_first[0] = rng.random(b) < ends
    for i in range(b):
        over = False  # obs[row] is an episode's last
        for row in range(t):
            replaced = not over and rng.random() < ends / 4
            is_first[row + 1, i] = over or replaced
            if is_first[row + 1, i]:
                reward[row, i], over = 0, False
            elif rng.random() < ends:  # terminated, or else truncated: only the first is a flag that ops see
                over, terminated[row, i] = True, rng.random() < 0.5
    value = rng.normal(size=(t + 1, b)).astype(np.float32)
    return Data(*map(torch.from_numpy, (reward, value, terminated, is_first)))


def slow_gae(d: Data, lam: float) -> np.ndarray:
    """A_t = sum_l (gamma lam)^l delta_{t+l}, over the steps of t's episode in the rollout."""
    reward, value, mask = d.reward.double().numpy(), d.value.double().numpy(), d.mask.numpy()
    out = np.zeros(reward.shape)
    for i in range(reward.shape[1]):
        for t in range(len(reward)):
            for k in range(t, len(reward)):
                if not mask[k, i]:
                    break
                over = bool(d.terminated[k, i])
                delta = reward[k, i] + GAMMA * (not over) * value[k + 1, i] - value[k, i]
                out[t, i] += (GAMMA * lam) ** (k - t) * delta
                if over:
                    break
    return out


def slow_n_step(d: Data, n: int) -> np.ndarray:
    """G_t = sum_i gamma^i r_{t+i} + gamma^m V_{t+m}, m <= n the steps until the episode's or the rollout's last obs."""
    reward, value, mask = d.reward.double().numpy(), d.value.double().numpy(), d.mask.numpy()
    out = np.zeros(reward.shape)
    for i in range(reward.shape[1]):
        for t in range(len(reward)):
            m, over = 0, False
            while m < n and t + m < len(reward) and mask[t + m, i] and not over:
                out[t, i] += GAMMA**m * reward[t + m, i]
                over = bool(d.terminated[t + m, i])
                m += 1
            if m and not over:
                out[t, i] += GAMMA**m * value[t + m, i]
    return out


def close(actual: Tensor, expected: np.ndarray | Tensor, atol: float = 1e-5) -> None:
    np.testing.assert_allclose(actual.numpy(), np.asarray(expected), rtol=1e-5, atol=atol)


shapes = {"seed": st.integers(0, 10_000), "t": st.integers(1, 12), "b": st.integers(1, 6)}


@settings(deadline=None, max_examples=60)
@given(**shapes, lam=st.sampled_from([0.0, 0.5, 0.95, 1.0]), ends=st.sampled_from([0.0, 0.2, 0.7]))
def test_gae_is_the_papers_sum(seed: int, t: int, b: int, lam: float, ends: float) -> None:
    d = make(seed, t, b, ends)
    advantage, target = gae(d.reward, d.value, d.terminated, d.mask, GAMMA, lam)
    close(advantage, slow_gae(d, lam))
    close(target, slow_gae(d, lam) + d.value[:-1].numpy())


@settings(deadline=None, max_examples=60)
@given(**shapes, n=st.integers(1, 14))
def test_n_step_return_is_the_papers_sum(seed: int, t: int, b: int, n: int) -> None:
    d = make(seed, t, b)
    close(n_step_return(d.reward, d.value, d.terminated, d.mask, GAMMA, n), slow_n_step(d, n))


def test_lambda_one_is_the_n_step_return_minus_the_value() -> None:
    d = make(1, 20, 8)
    advantage, target = gae(d.reward, d.value, d.terminated, d.mask, GAMMA, 1.0)
    for n in (20, 21, 1000):
        full = n_step_return(d.reward, d.value, d.terminated, d.mask, GAMMA, n)
        close(advantage, torch.where(d.mask, full - d.value[:-1], 0.0))
        close(torch.where(d.mask, target, 0.0), full)


def test_lambda_zero_is_the_td_error_and_one_step_its_target() -> None:
    d = make(2, 20, 8)
    target = d.reward + GAMMA * (~d.terminated).float() * d.value[1:]
    advantage, _ = gae(d.reward, d.value, d.terminated, d.mask, GAMMA, 0.0)
    close(advantage, torch.where(d.mask, target - d.value[:-1], 0.0))
    one = n_step_return(d.reward, d.value, d.terminated, d.mask, GAMMA, 1)
    close(one, torch.where(d.mask, target, 0.0))


def test_a_truncation_bootstraps_from_the_final_observation_and_a_termination_from_nothing() -> None:
    """obs 0, 1, 2(final) | fake step | obs 3(first), 4. By hand, gamma 0.5, lambda 1."""
    reward = torch.tensor([[1.0], [2.0], [0.0], [4.0]])
    value = torch.tensor([[10.0], [20.0], [30.0], [40.0], [50.0]])
    mask = torch.tensor([[True], [True], [False], [True]])
    terminated = torch.zeros(4, 1, dtype=torch.bool)
    _, target = gae(reward, value, terminated, mask, 0.5, 1.0)
    assert target[mask].tolist() == [1 + 0.5 * 2 + 0.25 * 30, 2 + 0.5 * 30, 4 + 0.5 * 50]
    terminated[1] = True
    advantage, target = gae(reward, value, terminated, mask, 0.5, 1.0)
    assert target[mask].tolist() == [1 + 0.5 * 2, 2, 4 + 0.5 * 50]
    assert advantage[2].item() == 0


@pytest.mark.parametrize("poison", [1e6, float("nan"), float("inf")])
def test_nothing_on_a_masked_row_reaches_a_valid_one(poison: float) -> None:
    """Its reward and its flag never; what is seen after it only the episode that it begins."""
    d = make(3, 30, 16)
    bad_reward = torch.where(d.mask, d.reward, poison)
    bad_flag = torch.where(d.mask, d.terminated, True)
    carry = torch.randn(16, generator=torch.Generator().manual_seed(0))
    for f in (
        lambda r, e: gae(r, d.value, e, d.mask, GAMMA, 0.9)[0],
        lambda r, e: n_step_return(r, d.value, e, d.mask, GAMMA, 4),
        lambda r, e: running_return(r, d.is_first, carry, GAMMA)[0],
    ):
        clean = f(d.reward, d.terminated)
        assert torch.equal(f(bad_reward, bad_flag), clean)
        assert (clean[~d.mask] == 0).all()
    assert (~d.mask).sum() > 20


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10_000))
def test_an_episode_knows_nothing_of_the_next(seed: int) -> None:
    """Changing every value and reward from a masked row's next obs on changes no output up to that row."""
    d = make(seed, 12, 1, 0.3)
    cuts = (~d.mask[:, 0]).nonzero().flatten().tolist()
    for cut in cuts:
        reward, value = d.reward.clone(), d.value.clone()
        reward[cut:] += 100
        value[cut + 1 :] -= 100
        before, _ = gae(d.reward, d.value, d.terminated, d.mask, GAMMA, 0.9)
        after, _ = gae(reward, value, d.terminated, d.mask, GAMMA, 0.9)
        assert torch.equal(before[: cut + 1], after[: cut + 1])
        n_before = n_step_return(d.reward, d.value, d.terminated, d.mask, GAMMA, 5)
        n_after = n_step_return(reward, value, d.terminated, d.mask, GAMMA, 5)
        assert torch.equal(n_before[: cut + 1], n_after[: cut + 1])


def test_inputs_are_left_alone_and_no_graph_is_built() -> None:
    d = make(4)
    value = d.value.clone().requires_grad_()
    copies = [x.clone() for x in (d.reward, d.value, d.terminated, d.is_first)]
    advantage, target = gae(d.reward, value, d.terminated, d.mask, GAMMA, 0.9)
    fixed = n_step_return(d.reward, value, d.terminated, d.mask, GAMMA, 3)
    carry = torch.ones(5)
    out, new = running_return(d.reward, d.is_first, carry, GAMMA)
    assert not any(x.requires_grad for x in (advantage, target, fixed, out))
    assert all(torch.equal(a, b) for a, b in zip(copies, (d.reward, value, d.terminated, d.is_first), strict=True))
    assert torch.equal(carry, torch.ones(5))
    assert new.untyped_storage().data_ptr() != out.untyped_storage().data_ptr()


def test_running_return_over_rollouts_is_the_per_episode_sum() -> None:
    d = make(5, 24, 6)
    expected = np.zeros((24, 6))
    for i in range(6):
        total = 0.0
        for t in range(24):
            if d.is_first[t, i]:
                total = 0.0
            if d.mask[t, i]:
                total = GAMMA * total + d.reward[t, i].item()
                expected[t, i] = total
    carry, parts = torch.zeros(6), []
    for at in range(0, 24, 6):  # the same rows as four rollouts; row T of one is row 0 of the next
        out, carry = running_return(d.reward[at : at + 6], d.is_first[at : at + 7], carry, GAMMA)
        parts.append(out)
    close(torch.cat(parts), expected)
    close(running_return(d.reward, d.is_first, torch.zeros(6), GAMMA)[0], expected)


def test_running_return_drops_the_carry_where_an_episode_begins() -> None:
    is_first = torch.tensor([[True, False], [False, False]])
    out, carry = running_return(torch.ones(1, 2), is_first, torch.tensor([8.0, 8.0]), 0.5)
    assert out.tolist() == [[1.0, 5.0]]
    assert carry.tolist() == [1.0, 5.0]


def test_running_returns_follow_each_env_through_whatever_columns_its_rollouts_are_in() -> None:
    d = make(5, 24, 6)
    whole = running_return(d.reward, d.is_first, torch.zeros(6), GAMMA)[0]
    at = {i: list(range(0, 24, 6)) for i in range(6)}  # where the rollouts of each env begin
    # Envs 0, 1 and 2 have two rollouts in the first batch; ids are far from one another, as remote envs' are.
    batches = [[0, 1, 2, 0, 1, 2], [5, 4, 3, 0, 1], [3, 2, 4, 5, 5, 4, 3], [0, 1, 2, 3, 4, 5]]
    ids, one = [7, 23, 1 << 20, 39, 55, (1 << 20) + 1], RunningReturns()
    for batch in batches:
        begins = [at[i].pop(0) for i in batch]
        pairs = list(zip(batch, begins, strict=True))
        reward = torch.stack([d.reward[t : t + 6, i] for i, t in pairs], 1)
        is_first = torch.stack([d.is_first[t : t + 7, i] for i, t in pairs], 1)
        out = one.update(reward, is_first, torch.tensor([ids[i] for i in batch]), GAMMA)
        close(out, torch.stack([whole[t : t + 6, i] for i, t in pairs], 1))
        saved, one = one.state_dict(), RunningReturns()
        one.load_state_dict(saved)
    assert not any(at.values())


def test_explained_variance_is_numpys_on_valid_rows() -> None:
    d = make(6, 40, 4)
    value, target, mask = d.value[:-1], d.value[:-1] * 2 + d.reward, d.mask
    v, g = value[mask].double().numpy(), target[mask].double().numpy()
    poisoned = torch.where(mask, target, torch.nan)
    assert explained_variance(value, poisoned, mask).item() == pytest.approx(1 - (g - v).var() / g.var(), abs=1e-5)
    assert explained_variance(target, target, mask).item() == pytest.approx(1)
    assert explained_variance(torch.zeros_like(target), target, mask).item() == pytest.approx(0, abs=1e-6)
    assert explained_variance(value, torch.ones_like(value), mask).item() == 0
    assert explained_variance(value, target, torch.zeros_like(mask)).item() == 0


def test_misaligned_shapes_are_refused() -> None:
    d = make(7)
    with pytest.raises(AssertionError):
        gae(d.reward, d.value[:-1], d.terminated, d.mask, GAMMA, 1.0)
    with pytest.raises(AssertionError):
        n_step_return(d.reward, d.value, d.terminated, d.mask.float(), GAMMA, 2)
    with pytest.raises(AssertionError):
        running_return(d.reward, d.is_first[1:], torch.zeros(5), GAMMA)
