"""Every exchange of one machine: bad gradients change nothing, a saved state goes on, normalizers see all rows."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from coterie.config import Optim
from coterie.exchange.base import NonFinite
from coterie.exchange.hogwild import Hogwild
from coterie.exchange.shared_weights import SharedWeights, restore, shared_memory_for
from coterie.exchange.solo import Solo
from coterie.exchange.store import Store
from coterie.models.heads import Moments, Normalizer
from coterie.ops.optim import Adam, RMSProp, make_rule
from coterie.parallel.params import FlatParams
from tests.exchange.harness import BETAS, NOTHING, Sgd, apply, flat, gradients, make_setup, member

KINDS = [
    (Solo, {}),
    (Hogwild, {}),
    (Hogwild, {"hogwild__statistics": "own"}),
    (Store, {"store__chunks": 3}),
    (Store, {"store__chunks": 3, "store__local_steps": 3}),
]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(("kind", "how"), KINDS)
def test_a_gradient_that_is_not_finite_is_skipped_or_raises_and_changes_nothing(kind, how, bad):
    rule, params = Adam(*BETAS, 1e-3), flat(50, 20)
    plain, state = params.data.clone(), rule.state(params.data)
    shared = shared_memory_for(params.data, rule, 3 if kind is Store else 1, NOTHING)
    with member(kind, shared, params, rule, skip=True, **how) as exchange:

        def now() -> list[Tensor]:
            arrays = [torch.from_numpy(x.copy()) for x in shared.arrays.values()]
            return [params.data.clone(), *(x.clone() for x in exchange.state_dict().values()), *arrays]

        for k, grad in enumerate(gradients(params, 6)):
            rule.update(plain, grad, state, 1e-2)
            apply(exchange, params, grad)
            before, poisoned = now(), grad.clone()
            poisoned[params.slices["w1"].start + k] = bad
            apply(exchange, params, poisoned)
            assert all(torch.equal(x, y) for x, y in zip(now(), before, strict=True))
        assert exchange.guard.skipped == 6
        exchange.guard.skip = False
        params.grad.copy_(poisoned)
        with pytest.raises(NonFinite, match="the gradient of w1 is not finite"):
            exchange.step(params, 1e-2)
        assert all(torch.equal(x, y) for x, y in zip(now(), before, strict=True))
        torch.testing.assert_close(params.data, plain, rtol=0, atol=1e-6)  # no skipped step was counted
    shared.close()


def test_a_learner_that_skips_every_batch_ends_the_run():
    params = flat(50, 20)
    solo = Solo(make_setup(params, skip=True))
    good = torch.ones_like(params.grad)
    bad = good * math.nan
    for grad in [bad] * 600 + [good] + [bad] * 1000:
        apply(solo, params, grad)
    with pytest.raises(NonFinite, match="the gradient of w0 is not finite, nor were 1000 before it"):
        apply(solo, params, bad)
    assert solo.guard.skipped == 1600


@pytest.mark.parametrize(
    ("kind", "how", "chunks"), [(*KINDS[1], 1), (*KINDS[2], 1), (*KINDS[3], 1), (*KINDS[3], 5), (*KINDS[4], 3)]
)
def test_a_saved_state_goes_on_as_if_nothing_had_happened(kind, how, chunks):
    """Also in a store with another number of chunks."""
    rule, params = Adam(*BETAS, 1e-3), flat(100, 33)
    grads = gradients(params, 12)
    shared = shared_memory_for(params.data, rule, how.get("store__chunks", 1), NOTHING)
    with member(kind, shared, params, rule, **how) as exchange:
        for grad in grads[:6]:
            apply(exchange, params, grad)
        saved = {k: x.clone() for k, x in exchange.state_dict().items()}
        weights = params.data.clone()
        for grad in grads[6:]:
            apply(exchange, params, grad)
    shared.close()
    again = flat(100, 33, seed=5)
    again.data.copy_(weights)
    shared = shared_memory_for(again.data, rule, chunks, NOTHING)
    restore(shared, saved, NOTHING)
    with member(kind, shared, again, rule, **{**how, "store__chunks": chunks}) as exchange:
        exchange.load_state_dict(saved)
        for grad in grads[6:]:
            apply(exchange, again, grad)
        torch.testing.assert_close(again.data, params.data, rtol=0, atol=1e-6)
        assert np.unique(exchange.state_dict()["count"]).tolist() == [12.0]
    shared.close()


def test_a_step_of_a_lone_learner_is_torchs_clipping_and_rmsprop(small_model):
    params = FlatParams(small_model)
    reference = [p.detach().clone().requires_grad_() for p in small_model.parameters()]
    optimizer = torch.optim.RMSprop(reference, lr=1e-2, alpha=0.99, eps=1e-5)
    exchange = Solo(make_setup(params, make_rule(Optim(rule="rmsprop", alpha=0.99, eps=1e-5)), clip=0.5))
    rng = torch.Generator().manual_seed(0)
    for _ in range(5):
        for p, r in zip(small_model.parameters(), reference, strict=True):
            r.grad = torch.randn(r.shape, generator=rng)
            p.grad.copy_(r.grad)
        norm = torch.nn.utils.clip_grad_norm_(reference, 0.5)
        optimizer.step()
        assert exchange.step(params, 1e-2) == pytest.approx(float(norm), rel=1e-5)
        for p, r in zip(small_model.parameters(), reference, strict=True):
            torch.testing.assert_close(p, r, atol=1e-6, rtol=1e-5)


# --- several learners ---


@pytest.mark.parametrize(("kind", "how"), KINDS[1:4])
@pytest.mark.parametrize("make", [lambda: RMSProp(0.9, 1e-3), lambda: Adam(*BETAS, 1e-3)])
def test_learners_that_take_turns_are_one_rule_with_statistics_of_all_or_each_their_own(kind, how, make):
    own, both = "hogwild__statistics" in how, [flat(40, 9), flat(40, 9)]
    plain = both[0].data.clone()
    shared = shared_memory_for(plain, make(), how.get("store__chunks", 1), NOTHING)
    exchanges = [member(kind, shared, p, make(), rank=r, **how) for r, p in enumerate(both)]
    rule = make()
    states = [rule.state(plain), rule.state(plain)] if own else [rule.state(plain)] * 2
    for k, grad in enumerate(gradients(both[0], 30)):
        who = [0, 1, 1][k % 3]
        rule.update(plain, grad * (who + 1), states[who], 1e-2)
        apply(exchanges[who], both[who], grad * (who + 1))
        torch.testing.assert_close(exchanges[0].shared.data, plain, rtol=0, atol=1e-6)
        assert torch.equal(both[who].data, exchanges[0].shared.data)
    for exchange, state in zip(exchanges, states, strict=True):
        for name, x in exchange.state_dict().items():  # a store counts the steps of each chunk
            torch.testing.assert_close(x, state[name].expand_as(x), rtol=1e-5, atol=1e-7)
    square = [exchange.state_dict()["square"] for exchange in exchanges]
    assert torch.equal(*square) != own
    assert bool(shared.arrays["state/square"].any()) != own


def test_each_step_of_hogwild_applies_the_latest_gradient_of_its_own_worker_and_no_other():
    """The trap of shared `.grad`: two models whose backward passes add to gradients that were not cleared.

    All numbers have few bits, so every sum is exact: the center is what it was minus every gradient, each once.
    """
    nets = [nn.Linear(8, 1, bias=False) for _ in range(2)]
    both = [FlatParams(net) for net in nets]
    both[1].data.copy_(both[0].data.zero_())
    shared = shared_memory_for(both[0].data, Sgd(), 1, NOTHING)
    exchanges = [member(Hogwild, shared, p, Sgd(), rank=r) for r, p in enumerate(both)]
    rng, total, held = np.random.default_rng(0), torch.zeros(8), [torch.zeros(8), torch.zeros(8)]
    for k in range(100):
        who = int(rng.integers(2))
        x = torch.as_tensor(rng.integers(-8, 9, 8), dtype=torch.float32)
        exchanges[who].pull(both[who])
        assert torch.equal(nets[who].weight[0], -total)
        nets[who](x).sum().backward()  # its gradient is x
        assert torch.equal(both[who].grad[:8], x), k
        assert not both[1 - who].grad.any()
        exchanges[who].step(both[who], 1.0)
        total += x
        held[who] = -total
        assert torch.equal(both[1 - who].data[:8], held[1 - who])  # a snapshot stays what it was until the next
        assert torch.equal(exchanges[0].shared.data[:8], -total)
        assert nets[who].weight.grad.data_ptr() == both[who].grad.data_ptr()  # still a view, and a cleared one
        assert not both[who].grad.any()
    assert total.any()


# --- statistics of normalizers as sums ---

SHAPES = [(3,), (), (2, 4)]


def normalizer_set() -> list[Normalizer]:
    return [Normalizer(shape) for shape in SHAPES]


def rows(count: int, seed: int) -> list[torch.Tensor]:
    """Rows for each normalizer, far from zero and of several scales."""
    rng = torch.Generator().manual_seed(seed)
    scales = [10.0, 1e-3, 500.0]
    return [torch.randn(count, *shape, generator=rng) * s + 3 * s for shape, s in zip(SHAPES, scales, strict=True)]


def feed(norms: list[Normalizer], count: int, seed: int) -> None:
    for norm, x in zip(norms, rows(count, seed), strict=True):
        norm.update(x)


def assert_same(a: list[Normalizer], b: list[Normalizer]) -> None:
    for x, y in zip(a, b, strict=True):
        for name in ("count", "mean", "m2"):
            torch.testing.assert_close(getattr(x, name), getattr(y, name), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(x.deviation, y.deviation, rtol=1e-6, atol=0)


def test_moments_are_the_sums_of_the_rows():
    norms = normalizer_set()
    feed(norms, 30, 1)
    sums, at = Moments(norms).read(), 0
    for x in rows(30, 1):
        x = x.double().reshape(30, -1)
        expected = torch.cat([torch.tensor([30.0], dtype=torch.float64), x.sum(0), (x * x).sum(0)])
        torch.testing.assert_close(sums[at : at + len(expected)], expected, rtol=1e-9, atol=1e-12)
        at += len(expected)
    assert at == len(sums)


def test_two_sums_are_one_that_saw_all_rows():
    a, b, both, out = (normalizer_set() for _ in range(4))
    feed(a, 40, 1)
    feed(b, 7, 2)
    feed(both, 40, 1)
    feed(both, 7, 2)
    Moments(out).write(Moments(a).read() + Moments(b).read())
    assert_same(out, both)


def test_learners_share_the_rows_of_their_normalizers_through_the_center():
    """Whatever the order, each ends with the rows of all, counted once."""
    sets = [normalizer_set() for _ in range(3)]
    shared = shared_memory_for(torch.zeros(16), RMSProp(0.9, 1e-5), 1, Moments(sets[0]).read())
    views = [SharedWeights(shared, Moments(s), 1, 5.0) for s in sets]
    everything = normalizer_set()
    for seed, who in enumerate([0, 1, 1, 2, 0, 2, 2, 1, 0]):
        feed(sets[who], 4 + seed, seed)
        feed(everything, 4 + seed, seed)
        views[who].share_moments()
        assert_same(sets[who], everything)  # at once the rows of all
    for view in views:
        view.share_moments()  # nothing new: nothing is counted twice
    for s in sets:
        assert_same(s, everything)
    for view in views:
        view.close()
    shared.close()
