"""Returns and advantages against the papers' sums, and what every target has to keep: masks, ends, inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from coterie.ops.returns import RunningReturns, explained_variance, gae, running_return
from tests.ops.trajectories import GAMMA, INF, Data, close, make, slow_vtrace

TARGETS: dict[str, Callable[[Data], Iterable[Tensor]]] = {
    "gae": lambda d: gae(*d.rows, GAMMA, 0.9),
    "vtrace": lambda d: d.vtrace(rho_bar=INF, pg_rho_bar=INF),
    "vtrace, q from values": lambda d: d.vtrace(rho_bar=INF, pg_rho_bar=INF, q_from="value"),
}
every = pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
shapes = {"seed": st.integers(0, 10_000), "t": st.integers(1, 12), "b": st.integers(1, 6)}


@settings(max_examples=60)
@given(**shapes, lam=st.sampled_from([0.0, 0.5, 0.95, 1.0]), ends=st.sampled_from([0.0, 0.2, 0.7]))
def test_gae_is_the_papers_sum(seed: int, t: int, b: int, lam: float, ends: float) -> None:
    """A_t = sum_l (gamma lam)^l delta_{t+l}, over the steps of t's episode in the rollout: V-trace with ratio 1."""
    d = make(seed, t, b, ends)
    d.log_ratio.zero_()
    expected = slow_vtrace(d, GAMMA, 1, 1, 1, lam, "target")[0]
    advantage, target = gae(*d.rows, GAMMA, lam)
    close(target, expected)
    close(advantage, expected - d.value[:-1].numpy())


@every
@pytest.mark.parametrize("poison", [1e6, float("nan"), float("inf"), -float("inf")])
def test_a_masked_row_does_not_change_a_valid_one(target: Callable[[Data], Iterable[Tensor]], poison: float) -> None:
    d = make(3, 30, 16)
    bad = Data(
        torch.where(d.mask, d.log_ratio, poison),
        torch.where(d.mask, d.reward, poison),
        d.value,
        torch.where(d.mask, d.terminated, True),
        d.mask,
    )
    for clean, dirty in zip(target(d), target(bad), strict=True):
        assert torch.equal(dirty, clean)
        masked = clean[~d.mask]
        assert torch.equal(masked, d.value[:-1][~d.mask]) or not masked.any()
    assert (~d.mask).sum() > 20


@every
@settings(max_examples=30)
@given(seed=st.integers(0, 10_000))
def test_an_episode_does_not_depend_on_the_next(target: Callable[[Data], Iterable[Tensor]], seed: int) -> None:
    """Changing everything from a masked row's next obs on, or after a termination, changes nothing before it."""
    d = make(seed, 12, 1)
    for cut in (~d.mask | d.terminated)[:, 0].nonzero()[:, 0].tolist():
        after = replace(d, log_ratio=d.log_ratio.clone(), reward=d.reward.clone(), value=d.value.clone())
        after.log_ratio[cut + 1 :] += 1
        after.reward[cut + 1 :] += 100
        after.value[cut + 1 :] -= 100
        for x, y in zip(target(d), target(after), strict=True):
            assert torch.equal(x[: cut + 1], y[: cut + 1])


@every
def test_inputs_are_not_changed_and_no_graph_is_built(target: Callable[[Data], Iterable[Tensor]]) -> None:
    d = make(4)
    inputs = (d.log_ratio, *d.rows)
    copies = [x.clone() for x in inputs]
    d.log_ratio.requires_grad_()
    d.value.requires_grad_()
    assert not any(x.requires_grad for x in target(d))
    assert all(torch.equal(a, b) for a, b in zip(copies, inputs, strict=True))


@every
@pytest.mark.parametrize(
    "wrong",
    [
        lambda d: replace(d, log_ratio=d.log_ratio[:-1], value=d.value[:-1]),
        lambda d: replace(d, terminated=d.terminated[:, :1]),
        lambda d: replace(d, mask=d.mask.float()),
        lambda d: Data(*(x[:, 0] for x in (d.log_ratio, *d.rows))),
    ],
)
def test_returns_of_misaligned_shapes_are_refused(
    target: Callable[[Data], Iterable[Tensor]], wrong: Callable[[Data], Data]
) -> None:
    with pytest.raises(AssertionError):
        target(wrong(make(10)))


def episodes(t: int, b: int) -> tuple[Tensor, Tensor]:
    """Rewards `[t, b]` and `is_first` `[t+1, b]`, never twice in a row."""
    rng = np.random.default_rng(5)
    is_first = rng.random((t + 1, b)) < 0.2
    is_first[1:] &= ~is_first[:-1]
    return torch.from_numpy(rng.normal(size=(t, b)).astype(np.float32)), torch.from_numpy(is_first)


def test_running_return_over_rollouts_is_the_per_episode_sum() -> None:
    reward, is_first = episodes(24, 6)
    expected = np.zeros((24, 6))
    for i in range(6):
        total = 0.0
        for t in range(24):
            if is_first[t, i]:
                total = 0.0
            if not is_first[t + 1, i]:
                total = GAMMA * total + reward[t, i].item()
                expected[t, i] = total
    carry, parts = torch.zeros(6), []
    for at in range(0, 24, 6):  # the same rows as four rollouts; row T of one is row 0 of the next
        out, carry = running_return(reward[at : at + 6], is_first[at : at + 7], carry, GAMMA)
        parts.append(out)
    close(torch.cat(parts), expected)
    close(running_return(reward, is_first, torch.zeros(6), GAMMA)[0], expected)


def test_running_returns_follow_each_env_through_whatever_columns_its_rollouts_are_in() -> None:
    rewards, firsts = episodes(24, 6)
    whole = running_return(rewards, firsts, torch.zeros(6), GAMMA)[0]
    at = {i: list(range(0, 24, 6)) for i in range(6)}  # where the rollouts of each env begin
    # Envs 0, 1 and 2 have two rollouts in the first batch; ids are far from one another, as remote envs' are.
    batches = [[0, 1, 2, 0, 1, 2], [5, 4, 3, 0, 1], [3, 2, 4, 5, 5, 4, 3], [0, 1, 2, 3, 4, 5]]
    ids, one = [7, 23, 1 << 20, 39, 55, (1 << 20) + 1], RunningReturns()
    for batch in batches:
        begins = [at[i].pop(0) for i in batch]
        pairs = list(zip(batch, begins, strict=True))
        reward = torch.stack([rewards[t : t + 6, i] for i, t in pairs], 1)
        is_first = torch.stack([firsts[t : t + 7, i] for i, t in pairs], 1)
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
