"""Update rules against torch.optim and against the TensorFlow formulas in numpy; schedules at their corners."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from coterie.config import Optim, Schedule
from coterie.ops.optim import Divided, RMSProp, flat_norm_clip, make_rule, scaled_lr, schedule_value
from coterie.parallel.threads import Team
from tests.conftest import needs_gpu

RULES = ("rmsprop", "rmsprop_tf", "adam", "adam_eps_hat")
STEPS, N = 50, 103
every = pytest.mark.parametrize("name", RULES)


def start() -> Tensor:
    return torch.randn(N, generator=torch.Generator().manual_seed(0))


def gradients() -> list[Tensor]:
    """Of all sizes, down to where eps rules, with a padding element whose gradient is always 0."""
    g = torch.Generator().manual_seed(1)
    scale = 10.0 ** torch.linspace(-7, 1, N)
    scale[0] = 0
    return [torch.randn(N, generator=g) * scale for _ in range(STEPS)]


def run(config: Optim) -> Tensor:
    rule, param = make_rule(config), start()
    state = rule.state(param)
    for grad in gradients():
        rule.update(param, grad, state, 1e-2)
    return param


@pytest.mark.parametrize("eps", [1e-8, 1e-5, 1e-2])
@pytest.mark.parametrize(("name", "fused"), [("rmsprop", False), ("adam", True), ("adam", False)])
def test_pytorch_dialects_of_update_rules_are_torch_optim(
    name: str, fused: bool, eps: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not fused:  # a torch without the private kernel
        monkeypatch.setattr("coterie.ops.optim.fused_adam", None)
    param = start().requires_grad_()
    if name == "adam":
        theirs: torch.optim.Optimizer = torch.optim.Adam([param], lr=1e-2, betas=(0.8, 0.99), eps=eps)
    else:
        theirs = torch.optim.RMSprop([param], lr=1e-2, alpha=0.95, eps=eps)
    for grad in gradients():
        param.grad = grad.clone()
        theirs.step()
    ours = run(Optim(rule=name, eps=eps, alpha=0.95, beta1=0.8, beta2=0.99))  # type: ignore[arg-type]
    torch.testing.assert_close(ours, param.detach(), rtol=1e-6, atol=1e-6)


def numpy_rmsprop(g: np.ndarray, s: dict[str, np.ndarray], t: int, eps: float) -> np.ndarray:
    s["ms"] = 0.95 * s["ms"] + 0.05 * g * g
    return g / np.sqrt(s["ms"] + eps)


def numpy_eps_hat(g: np.ndarray, s: dict[str, np.ndarray], t: int, eps: float) -> np.ndarray:
    s["m"] = 0.8 * s["m"] + 0.2 * g
    s["v"] = 0.99 * s["v"] + 0.01 * g * g
    return math.sqrt(1 - 0.99**t) / (1 - 0.8**t) * s["m"] / (np.sqrt(s["v"]) + eps)


@pytest.mark.parametrize("eps", [1e-8, 1e-5, 0.1])
@pytest.mark.parametrize(
    ("name", "formula"), [("rmsprop_tf", numpy_rmsprop), ("adam_eps_hat", numpy_eps_hat)], ids=["rmsprop", "adam"]
)
def test_tensorflow_dialects_of_update_rules_are_their_formulas(
    name: str, formula: Callable[..., np.ndarray], eps: float
) -> None:
    param = start().double().numpy()
    state = {"ms": np.ones(N), "m": np.zeros(N), "v": np.zeros(N)}
    for t, grad in enumerate(gradients(), 1):
        param = param - 1e-2 * formula(grad.double().numpy(), state, t, eps)
    config = Optim(rule=name, eps=eps, alpha=0.95, beta1=0.8, beta2=0.99)  # type: ignore[arg-type]
    np.testing.assert_allclose(run(config), param, rtol=1e-6, atol=2e-6)


@every
def test_slices_with_their_own_state_are_the_whole(name: str) -> None:
    """Unaligned chunks, updated in another order at every step, as the central store does."""
    rule = make_rule(Optim(rule=name, eps=1e-4))  # type: ignore[arg-type]
    param = start()
    chunks = [slice(0, 37), slice(37, 38), slice(38, N)]
    states = [rule.state(param[at]) for at in chunks]
    order = np.random.default_rng(0)
    for grad in gradients():
        for i in order.permutation(3):
            rule.update(param[chunks[i]], grad[chunks[i]], states[i], 1e-2)
    torch.testing.assert_close(param, run(Optim(rule=name, eps=1e-4)), rtol=1e-6, atol=1e-7)  # type: ignore[arg-type]


@every
def test_an_update_that_a_team_shares_is_the_whole_one_and_saves_the_same_state(name: str) -> None:
    config, team = Optim(rule=name), Team(3)  # type: ignore[arg-type]
    rules = make_rule(config), Divided(make_rule(config), team)
    params = start(), start()
    states = [rule.state(param) for rule, param in zip(rules, params, strict=True)]
    for grad in gradients():
        for rule, param, state in zip(rules, params, states, strict=True):
            rule.update(param, grad, state, 1e-2)
    team.close()
    assert torch.equal(*params)
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(x, states[1][key]) for key, x in states[0].items())


@every
def test_a_saved_state_of_an_update_rule_goes_on_exactly(name: str) -> None:
    """The dict is all there is: another rule object with a copy of it continues to the bit."""
    config = Optim(rule=name)  # type: ignore[arg-type]
    rule, param = make_rule(config), start()
    state = rule.state(param)
    for i, grad in enumerate(gradients()):
        if i == 20:
            rule, state = make_rule(config), {k: v.clone() for k, v in state.items()}
        rule.update(param, grad, state, 1e-2)
    assert torch.equal(param, run(config))


@every
def test_updates_are_in_place_and_leave_gradient_and_padding_alone(name: str) -> None:
    rule, param = make_rule(Optim(rule=name)), start()  # type: ignore[arg-type]
    param[0] = 0  # padding: its gradient is 0
    param.requires_grad_()
    grad, state = gradients()[0], rule.state(param)
    kept, at = grad.clone(), {k: v.data_ptr() for k, v in state.items()}
    where = param.data_ptr()
    rule.update(param, grad, state, 1e-2)
    assert torch.equal(grad, kept)
    assert param.data_ptr() == where
    assert {k: v.data_ptr() for k, v in state.items()} == at
    assert param[0].item() == 0
    assert not param[1:].eq(start()[1:]).all()


def test_one_rule_serves_tensors_of_any_size_in_turn() -> None:
    """Its scratch memory grows and is shared; nothing of one tensor shows in another."""
    rule = RMSProp(0.9, 1e-5)
    for n in (5, 1000, 3):
        param, grad = torch.zeros(n), torch.full((n,), 2.0)
        rule.update(param, grad, rule.state(param), 0.1)
        torch.testing.assert_close(param, torch.full((n,), -0.1 / math.sqrt(0.1)), rtol=1e-4, atol=0)


@pytest.mark.parametrize("n", [1, 1000, 1_700_000])
def test_clip_scales_to_the_norm_and_only_when_it_is_larger(n: int) -> None:
    grad = torch.randn(n, generator=torch.Generator().manual_seed(2))
    true = np.linalg.norm(grad.double().numpy())
    clipped = grad.clone()
    assert flat_norm_clip(clipped, true / 3) == pytest.approx(true, rel=1e-5)
    np.testing.assert_allclose(clipped, grad / 3, rtol=1e-5, atol=1e-7)
    for bound in (true * 1.01, 0.0):
        kept = grad.clone()
        assert flat_norm_clip(kept, bound) == pytest.approx(true, rel=1e-5)
        assert torch.equal(kept, grad)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 3e38])
def test_a_norm_that_is_not_finite_is_reported_and_nothing_is_scaled(bad: float) -> None:
    """The last one is finite itself, but its square is not."""
    grad = torch.ones(100)
    grad[[7, 8]] = bad
    kept = grad.clone()
    assert not math.isfinite(flat_norm_clip(grad, 0.5))
    assert torch.equal(grad.nan_to_num(), kept.nan_to_num())


def test_schedules_have_their_values_at_the_corners() -> None:
    constant, linear = Schedule(), Schedule("linear", end=0.1)
    assert [schedule_value(constant, s, 100) for s in (0, 50, 1000)] == [1, 1, 1]
    assert [schedule_value(linear, s, 100) for s in (0, 50, 100, 101, 10_000)] == pytest.approx(
        [1, 0.55, 0.1, 0.1, 0.1]
    )
    assert schedule_value(Schedule("linear"), 100, 100) == 0
    steps = Schedule("steps", at=(10, 20), factors=(0.5, 0.1))
    assert [schedule_value(steps, s, 100) for s in (0, 9, 10, 19, 20, 500)] == [1, 1, 0.5, 0.5, 0.1, 0.1]


def test_warm_up_grows_from_almost_nothing_and_multiplies() -> None:
    warm = Schedule(warmup=100)
    assert [schedule_value(warm, s, 1000) for s in (0, 1, 50, 100, 101, 900)] == [0.01, 0.01, 0.5, 1, 1, 1]
    both = Schedule("linear", warmup=100)
    assert schedule_value(both, 50, 1000) == pytest.approx(0.5 * 0.95)
    assert schedule_value(both, 500, 1000) == pytest.approx(0.5)


def test_learning_rate_scales_with_the_root_of_all_simulators() -> None:
    config = Optim(lr=7e-4, sqrt_scaling_from=16)
    assert scaled_lr(config, 16) == 7e-4
    assert scaled_lr(config, 64) == pytest.approx(1.4e-3)  # GALA: 4 learners of 16
    assert scaled_lr(config, 512) == pytest.approx(3.96e-3, rel=1e-3)  # Accelerated Methods' formula at 512
    assert scaled_lr(Optim(lr=7e-4), 512) == 7e-4


@needs_gpu
@every
def test_update_rules_on_a_gpu_are_the_cpu_s(name: str) -> None:
    g = torch.Generator().manual_seed(0)
    here, config = torch.randn(1000, generator=g), Optim(rule=name)  # type: ignore[arg-type]
    there, rules = here.to("cuda", copy=True), (make_rule(config), make_rule(config))
    states = rules[0].state(here), rules[1].state(there)
    for _ in range(30):
        grad = torch.randn(1000, generator=g)
        rules[0].update(here, grad, states[0], 1e-2)
        rules[1].update(there, grad.to("cuda"), states[1], 1e-2)
    torch.testing.assert_close(there.cpu(), here, rtol=1e-5, atol=1e-5)


@needs_gpu
@pytest.mark.parametrize("bad", [1.0, math.nan, math.inf])
@pytest.mark.parametrize("bound", [0.0, 0.5, 1e9])
def test_clipping_on_a_gpu_is_the_cpu_s(bad: float, bound: float) -> None:
    here = torch.ones(1000)
    here[7] = bad
    there = here.to("cuda", copy=True)
    norms = flat_norm_clip(here, bound), flat_norm_clip(there, bound)
    assert norms[1] == pytest.approx(norms[0], rel=1e-5, nan_ok=True)
    torch.testing.assert_close(there.cpu(), here, equal_nan=True)
