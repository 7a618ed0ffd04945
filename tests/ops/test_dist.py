"""Distributions against torch.distributions, and samples against the probabilities they should have."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributions as td
from torch import Tensor

from coterie.ops.dist import (
    ILLEGAL,
    Categorical,
    DiagGaussian,
    Distribution,
    Mixed,
    MultiCategorical,
    make_distribution,
)
from coterie.types import ActionSpec
from tests.conftest import needs_gpu

SPECS = {
    "categorical": ActionSpec("categorical", (6,)),
    "multi": ActionSpec("multi", (3, 2, 5)),
    "multi, equal sizes": ActionSpec("multi", (4, 4)),
    "continuous": ActionSpec("continuous", low=(-1.0, -2.0, -1.0), high=(1.0, 2.0, 1.0)),
    "mixed": ActionSpec("mixed", (3, 2), (-1.0, -2.0, -1.0), (1.0, 2.0, 1.0)),
}
every = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def params_of(dist: Distribution, *axes: int, seed: int = 0) -> Tensor:
    normals = 3 * isinstance(dist, DiagGaussian | Mixed)
    return torch.randn(*axes, dist.head_size + normals, generator=rng(seed))


def oracle(dist: Distribution, params: Tensor) -> list[td.Distribution]:
    """One torch distribution for each component."""
    params = params.double()
    if isinstance(dist, Categorical):
        return [td.Categorical(logits=params)]
    if isinstance(dist, MultiCategorical):
        return [td.Categorical(logits=x) for x in params.split(dist.sizes, -1)]
    if isinstance(dist, Mixed):
        logits, normals = params.split([5, 6], -1)
        return oracle(dist.choices, logits) + oracle(dist.normals, normals)
    mean, log_std = params.chunk(2, -1)
    return [td.Normal(m, s.exp()) for m, s in zip(mean.unbind(-1), log_std.unbind(-1), strict=True)]


def components(dist: Distribution, action: Tensor) -> list[Tensor]:
    return [action] if isinstance(dist, Categorical) else list(action.unbind(-1))


@every
def test_sizes_shapes_and_dtypes_follow_the_spec(spec: ActionSpec) -> None:
    dist = make_distribution(spec)
    assert dist.head_size == sum(spec.sizes) + len(spec.low)
    for axes in ((7,), (4, 7), ()):
        params = params_of(dist, *axes)
        action, log_prob = dist.sample_with_log_prob(params, rng(0))
        for a in (action, dist.mode(params)):
            assert a.shape == (*axes, *spec.shape)
            assert a.dtype == getattr(torch, spec.dtype)
        for x in (log_prob, *dist.evaluate(params, action)):
            assert x.shape == axes
            assert x.dtype == torch.float32


@every
def test_log_prob_and_entropy_are_torchs(spec: ActionSpec) -> None:
    dist = make_distribution(spec)
    p = params_of(dist, 5, 40)
    action, sampled = dist.sample_with_log_prob(p, rng(2))
    log_prob = sum(
        o.log_prob(a.double() if isinstance(o, td.Normal) else a)
        for o, a in zip(oracle(dist, p), components(dist, action), strict=True)
    ).float()
    entropy = sum(o.entropy() for o in oracle(dist, p)).float()
    for actual, expected in (
        (dist.log_prob(p, action), log_prob),
        (dist.evaluate(p, action)[0], log_prob),
        (sampled, log_prob),
        (dist.evaluate(p, action)[1], entropy),
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-5)


@every
def test_gradients_of_distributions_are_torchs(spec: ActionSpec) -> None:
    dist = make_distribution(spec)
    p = params_of(dist, 30).requires_grad_()
    action, _ = dist.sample_with_log_prob(p.detach(), rng(3))
    log_prob, entropy = dist.evaluate(p, action)
    (log_prob * 2 + entropy * 3).sum().backward()
    r = p.detach().double().requires_grad_()
    total = torch.zeros(30, dtype=torch.float64)
    for o, a in zip(oracle(dist, r), components(dist, action), strict=True):
        total = total + o.log_prob(a) * 2 + o.entropy() * 3
    total.sum().backward()
    torch.testing.assert_close(p.grad, r.grad.float(), rtol=1e-4, atol=1e-5)  # type: ignore[union-attr]


@pytest.mark.parametrize("spec", [SPECS["categorical"], SPECS["multi"]], ids=["categorical", "multi"])
def test_samples_are_as_frequent_as_their_probabilities(spec: ActionSpec) -> None:
    """Chi-square of each component, and of all pairs of components for independence, within 5 deviations."""
    dist, n = make_distribution(spec), 200_000
    params = params_of(dist, seed=5) * 1.5
    rows = params.expand(n, -1)
    action, _ = dist.sample_with_log_prob(rows, rng(6))
    parts = components(dist, action)
    probs = [o.probs for o in oracle(dist, params)]  # type: ignore[attr-defined]

    def check(index: Tensor, p: Tensor) -> None:
        counts = torch.bincount(index, minlength=len(p)).double()
        assert len(counts) == len(p)
        chi2, freedom = ((counts - n * p) ** 2 / (n * p)).sum().item(), len(p) - 1
        assert chi2 < freedom + 5 * math.sqrt(2 * freedom)

    for a, p in zip(parts, probs, strict=True):
        check(a, p)
    for i in range(len(parts)):
        for j in range(i):
            check(parts[i] * len(probs[j]) + parts[j], torch.outer(probs[i], probs[j]).flatten())


def test_the_least_random_number_samples_no_illegal_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch draws its lower bound once in some ten million numbers."""
    monkeypatch.setattr(torch.Tensor, "uniform_", lambda x, low=0.0, high=1.0, generator=None: x.fill_(low))
    dist = make_distribution(ActionSpec("categorical", (3,)))
    assert dist.sample_with_log_prob(torch.tensor([[ILLEGAL, ILLEGAL, 0.0]]))[0].tolist() == [2]


@pytest.mark.parametrize("spec", [s for s in SPECS.values() if s.sizes], ids=[k for k, s in SPECS.items() if s.sizes])
def test_illegal_choices_are_as_if_they_were_not_there(spec: ActionSpec) -> None:
    """Against torch's distributions over the legal choices alone; nothing flows back into an illegal logit."""
    dist, n = make_distribution(spec), sum(spec.sizes)
    legal = torch.ones(n, dtype=torch.bool)
    legal[[0, n - 1]] = False  # of the first component its first choice, of the last one its last
    raw = params_of(dist, 500).requires_grad_()
    p = torch.cat((torch.where(legal, raw[:, :n], ILLEGAL), raw[:, n:]), -1)
    action, _ = dist.sample_with_log_prob(p.detach(), rng(3))
    first, last = components(dist, action)[0], components(dist, action)[len(spec.sizes) - 1]
    assert (first > 0).all()
    assert (last < spec.sizes[-1] - 1).all()
    assert (components(dist, dist.mode(p))[0] > 0).all()
    log_prob, entropy = dist.evaluate(p, action)
    wide = torch.where(legal, raw.detach()[:, :n], -torch.inf)
    total, h = torch.zeros(500), torch.zeros(500)
    for i, (logits, a) in enumerate(zip(wide.split(spec.sizes, -1), components(dist, action), strict=False)):
        keep = logits[0] > -torch.inf
        alone = td.Categorical(logits=logits[:, keep])
        total += alone.log_prob(a.long() - int(i == 0))
        h += alone.entropy()
    for o, a in list(zip(oracle(dist, p.detach()), components(dist, action), strict=True))[len(spec.sizes) :]:
        total, h = total + o.log_prob(a.double()).float(), h + o.entropy().float()
    torch.testing.assert_close(log_prob.detach(), total, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(entropy.detach(), h, rtol=1e-4, atol=1e-5)
    (log_prob + entropy).sum().backward()
    assert raw.grad is not None
    assert raw.grad.isfinite().all()
    assert (raw.grad[:, :n][:, ~legal] == 0).all()


def test_gaussian_samples_have_the_moments_of_their_distribution() -> None:
    dist, n = DiagGaussian(3), 200_000
    params = torch.tensor([1.0, -2.0, 0.0, 0.5, -1.0, 0.0])
    x = dist.sample_with_log_prob(params.expand(n, -1), rng(7))[0].double()
    std = params[3:].double().exp()
    assert ((x.mean(0) - params[:3]).abs() < 5 * std / math.sqrt(n)).all()
    assert ((x.std(0) / std - 1).abs() < 5 / math.sqrt(2 * n)).all()
    correlation = torch.corrcoef(x.T) - torch.eye(3)
    assert correlation.abs().max() < 5 / math.sqrt(n)


@every
def test_a_seed_fixes_the_samples_and_the_global_generator_is_not_touched(spec: ActionSpec) -> None:
    dist = make_distribution(spec)
    params = params_of(dist, 64)
    before = torch.get_rng_state()
    first, _ = dist.sample_with_log_prob(params, rng(8))
    again, _ = dist.sample_with_log_prob(params, rng(8))
    other, _ = dist.sample_with_log_prob(params, rng(9))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), before)


@every
def test_the_sampled_log_prob_is_training_s_to_the_bit(spec: ActionSpec) -> None:
    """PPO's first ratios are then exactly 1."""
    dist = make_distribution(spec)
    params = params_of(dist, 500)
    if spec.kind == "continuous":
        params[:, 3:] = -9  # so narrow that the rounding of the action is visible in the noise
    action, log_prob = dist.sample_with_log_prob(params, rng(10))
    assert torch.equal(log_prob, dist.log_prob(params, action))
    assert torch.equal(log_prob, dist.evaluate(params, action)[0])


@every
def test_no_action_is_likelier_than_the_mode(spec: ActionSpec) -> None:
    dist = make_distribution(spec)
    params = params_of(dist, 300)
    best = dist.log_prob(params, dist.mode(params))
    for seed in range(20):
        assert (dist.sample_with_log_prob(params, rng(seed))[1] <= best).all()


@every
def test_bfloat16_parameters_are_worked_on_in_float32(spec: ActionSpec) -> None:
    dist = make_distribution(spec)
    coarse = params_of(dist, 50).bfloat16()
    action, log_prob = dist.sample_with_log_prob(coarse, rng(11))
    fine_action, fine_log_prob = dist.sample_with_log_prob(coarse.float(), rng(11))
    assert torch.equal(action, fine_action)
    assert torch.equal(log_prob, fine_log_prob)


@pytest.mark.parametrize("spec", [SPECS["categorical"], SPECS["multi"]], ids=["categorical", "multi"])
def test_extreme_logits_give_finite_losses_and_gradients(spec: ActionSpec) -> None:
    dist = make_distribution(spec)
    params = (params_of(dist, 100) * 1e4).requires_grad_()
    action, _ = dist.sample_with_log_prob(params, rng(12))
    assert torch.equal(action, dist.mode(params))
    log_prob, entropy = dist.evaluate(params, action)
    assert log_prob.abs().max() < 1e-6
    assert entropy.abs().max() < 1e-6
    (log_prob + entropy).sum().backward()
    assert torch.isfinite(params.grad).all()  # type: ignore[arg-type]


@needs_gpu
def test_samples_of_a_gpu_have_their_log_prob() -> None:
    params = torch.randn(500, 6, device="cuda")
    action, log_prob = Categorical(6).sample_with_log_prob(params, torch.Generator("cuda").manual_seed(0))
    torch.testing.assert_close(log_prob.cpu(), Categorical(6).log_prob(params.cpu(), action.cpu()))
