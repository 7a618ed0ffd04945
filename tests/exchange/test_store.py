"""The central store: one learner is plain Adam, several lose nothing, what is saved and what never comes in."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from coterie.exchange.base import NonFinite
from coterie.exchange.shared_weights import restore, shared_memory_for, split
from coterie.ops.optim import Adam, RMSProp, flat_norm_clip
from tests.exchange.harness import flat, gradients
from tests.exchange.store_harness import BETAS, NOTHING, apply, store

# --- one learner ---


@pytest.mark.parametrize("chunks", [1, 3, 8])
@pytest.mark.parametrize("local_steps", [1, 2, 3, 5])
@pytest.mark.parametrize("eps_hat", [False, True])
def test_one_learner_is_plain_adam(local_steps, chunks, eps_hat):
    """Also between two meetings, before and after a pull; large eps, so that the dialects of Adam are apart."""
    rule = Adam(*BETAS, 1e-3, eps_hat)
    params = flat(100, 33, 5)
    params.data.mul_(0.3)  # below 1, where float32 has digits enough for 1e-6 over 30 steps
    plain, state = params.data.clone(), rule.state(params.data)
    shared = shared_memory_for(params.data, rule, chunks, NOTHING)
    with store(shared, params, rule, chunks, local_steps=local_steps, clip=5.0) as exchange:
        for k, grad in enumerate(gradients(params, 30)):
            expected = grad.clone()
            norm = float(flat_norm_clip(expected, 5.0))
            rule.update(plain, expected, state, 1e-2)
            exchange.pull(params)
            assert apply(exchange, params, grad) == pytest.approx(norm, rel=1e-6)
            torch.testing.assert_close(params.data, plain, rtol=0, atol=1e-6)
            met = (k + 1) % local_steps == 0
            assert bool((exchange.shared.data - params.data).abs().max() < 1e-6) == met
            exchange.pull(params)
            torch.testing.assert_close(params.data, plain, rtol=0, atol=1e-6)
        assert met
        for name, x in exchange.state_dict().items():
            if name == "count":
                assert x.tolist() == [30.0] * chunks
            else:
                torch.testing.assert_close(x, state[name], rtol=1e-5, atol=1e-6)
    shared.close()


@pytest.mark.parametrize("n", [16, 64, 160, 1008])
@pytest.mark.parametrize("chunks", [1, 3, 8])
def test_chunks_cover_every_weight_once_and_begin_on_a_cache_line(n, chunks):
    slices = split(n, chunks)
    assert len(slices) == chunks
    assert [i for at in slices for i in range(n)[at]] == list(range(n))
    assert all(at.start % 16 == 0 for at in slices)


# --- several ---


def test_two_learners_that_take_turns_are_one_serial_rmsprop():
    rule, both = RMSProp(0.9, 1e-3), [flat(100, 33), flat(100, 33)]
    plain, state = both[0].data.clone(), rule.state(both[0].data)
    shared = shared_memory_for(plain, rule, 3, NOTHING)
    exchanges = [store(shared, x, rule, 3, rank=r) for r, x in enumerate(both)]
    for k, grad in enumerate(gradients(both[0], 30)):
        who = [0, 1, 1][k % 3]
        rule.update(plain, grad, state, 1e-2)
        apply(exchanges[who], both[who], grad)
        torch.testing.assert_close(both[who].data, plain, rtol=0, atol=1e-6)  # what it holds is the centre's
        torch.testing.assert_close(exchanges[0].shared.data, plain, rtol=0, atol=1e-6)
        if k % 3:
            assert not torch.equal(both[0].data, plain)  # who has not met the centre does not know
    torch.testing.assert_close(exchanges[0].state_dict()["square"], state["square"], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("chunks", [1, 3])
def test_local_steps_of_two_learners_add_up(chunks):
    """Nothing is lost: the centre is where it began and every step of each learner; moments as in Appendix B."""
    rule, n = Adam(*BETAS, 1e-3), {0: 2, 1: 3}
    both = [flat(100, 33), flat(100, 33)]
    begin = both[0].data.clone()
    shared = shared_memory_for(begin, rule, chunks, NOTHING)
    exchanges = [store(shared, x, rule, chunks, local_steps=n[r], rank=r) for r, x in enumerate(both)]
    told, pending = torch.zeros_like(begin), [torch.zeros_like(begin) for _ in both]
    mean, square, count = torch.zeros_like(begin), torch.zeros_like(begin), 0
    sums = [[torch.zeros_like(begin), torch.zeros_like(begin), 0] for _ in both]  # a_g, a_g2 of the appendix, steps
    rng = np.random.default_rng(0)
    for grad in gradients(both[0], 60):
        who = int(rng.integers(2))
        x, mine = both[who], sums[who]
        exchanges[who].pull(x)
        before = exchanges[who].pending.clone() if mine[2] else torch.zeros_like(begin)
        torch.testing.assert_close(pending[who], before, rtol=0, atol=1e-6)
        torch.testing.assert_close(x.data, begin + told + before, rtol=0, atol=1e-5)
        begins = x.data.clone()
        last = mine[2] + 1 == n[who]
        centre = exchanges[who].shared.data.clone()
        apply(exchanges[who], x, grad)
        if last:  # the meeting: what came to the centre is what was pending and this step
            pending[who] += exchanges[who].shared.data - centre - before
        else:
            pending[who] += x.data - begins
        mine[0] = BETAS[0] * mine[0] + grad
        mine[1] = BETAS[1] * mine[1] + grad * grad
        mine[2] += 1
        if last:
            told += pending[who]
            mean = BETAS[0] ** n[who] * mean + (1 - BETAS[0]) * mine[0]
            square = BETAS[1] ** n[who] * square + (1 - BETAS[1]) * mine[1]
            count += n[who]
            sums[who] = [torch.zeros_like(begin), torch.zeros_like(begin), 0]
            pending[who] = torch.zeros_like(begin)
            state = exchanges[who].state_dict()
            torch.testing.assert_close(state["mean"], mean, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(state["square"], square, rtol=1e-5, atol=1e-6)
            assert state["count"].tolist() == [count] * chunks
            assert torch.equal(x.data, exchanges[who].shared.data)
        torch.testing.assert_close(exchanges[who].shared.data, begin + told, rtol=0, atol=1e-5)
    assert count > 40


def test_a_step_is_adams_on_the_moments_met_last():
    """A local step's size comes from the central moments of the last meeting and this learner's gradients since."""
    rule, both = Adam(*BETAS, 1e-3, True), [flat(40), flat(40)]
    shared = shared_memory_for(both[0].data, rule, 1, NOTHING)
    one, two = (store(shared, x, rule, 1, local_steps=2, rank=r) for r, x in enumerate(both))
    grads = gradients(both[0], 6, seed=3)
    for grad in grads[:2]:
        apply(two, both[1], grad)  # the centre moves on; learner 0 has not met it since
    state = rule.state(both[0].data)
    for grad in grads[2:4]:
        one.pull(both[0])
        expected = both[0].data.clone()
        rule.update(expected, grad, state, 1e-2)
        apply(one, both[0], grad)
        torch.testing.assert_close(both[0].data, expected, rtol=0, atol=1e-6)
    state = {k: (x[0] if k == "count" else x).clone() for k, x in one.state_dict().items()}  # now it has met it
    one.pull(both[0])
    expected = both[0].data.clone()
    rule.update(expected, grads[4], state, 1e-2)
    apply(one, both[0], grads[4])
    torch.testing.assert_close(both[0].data, expected, rtol=0, atol=1e-6)


# --- what never reaches the centre ---


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("local_steps", [1, 3])
def test_a_gradient_that_is_not_finite_never_reaches_the_centre(local_steps, bad):
    rule, params = Adam(*BETAS, 1e-3), flat(50, 20)
    shared = shared_memory_for(params.data, rule, 3, NOTHING)
    plain, state = params.data.clone(), rule.state(params.data)
    with store(shared, params, rule, 3, local_steps=local_steps, skip=True) as exchange:
        for k, grad in enumerate(gradients(params, 6)):
            rule.update(plain, grad, state, 1e-2)
            apply(exchange, params, grad)
            poisoned = grad.clone()
            poisoned[params.slices["w1"].start + k] = bad
            before = {name: x.copy() for name, x in shared.arrays.items()}
            weights = params.data.clone()
            apply(exchange, params, poisoned)
            assert torch.equal(params.data, weights)
            assert all(np.array_equal(x, before[name]) for name, x in shared.arrays.items())
        assert exchange.guard.skipped == 6
        torch.testing.assert_close(exchange.shared.data, plain, rtol=0, atol=1e-6)  # and no local step was counted
        exchange.guard.skip = False
        params.grad[params.slices["w1"].start] = bad
        with pytest.raises(NonFinite, match="the gradient of w1 is not finite"):
            exchange.step(params, 1e-2)
        torch.testing.assert_close(exchange.shared.data, plain, rtol=0, atol=1e-6)
    shared.close()


# --- what is saved ---


@pytest.mark.parametrize("chunks", [1, 3, 5])
@pytest.mark.parametrize("local_steps", [1, 2])
def test_a_saved_state_goes_on_as_if_nothing_had_happened(chunks, local_steps):
    """Into a store with another number of chunks, too."""
    rule, params = Adam(*BETAS, 1e-3), flat(100, 33)
    grads = gradients(params, 12)
    shared = shared_memory_for(params.data, rule, 3, NOTHING)
    with store(shared, params, rule, 3, local_steps=local_steps) as exchange:
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
    with store(shared, again, rule, chunks, local_steps=local_steps) as exchange:
        exchange.load_state_dict(saved)
        for grad in grads[6:]:
            apply(exchange, again, grad)
        torch.testing.assert_close(again.data, params.data, rtol=0, atol=1e-6)
        assert exchange.state_dict()["count"].tolist() == [12.0] * chunks
    shared.close()
