"""The central store: one learner is plain Adam, several lose nothing, chunks are locked, turns are kept."""

from __future__ import annotations

import math
import random
import time
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from coterie.exchange.central import Central, Locks, central_memory, fill, split
from coterie.exchange.solo import Guard, NonFinite
from coterie.exchange.store import Store, Turns
from coterie.models.heads import Moments, Normalizer
from coterie.ops.optim import Adam, RMSProp, flat_norm_clip
from coterie.parallel.board import Board, BoardSteps
from coterie.parallel.params import FlatParams
from coterie.parallel.processes import Post
from coterie.parallel.shm import SharedArrays
from coterie.types import CoterieError
from tests.exchange.harness import Sgd, expect, flat, gradients, hear, start, together, until

BETAS = (0.8, 0.95)
NOTHING = torch.zeros(0, dtype=torch.float64)


def store(
    shared: SharedArrays, params: FlatParams, rule: object, chunks: int, *, local_steps: int = 1, rank: int = 0,
    board: Board | None = None, turns: bool = False, clip: float = 0.0, skip: bool = False, timeout: float = 20.0,
    norms: tuple[Normalizer, ...] = (),
) -> Store:  # fmt: skip
    board = board or Board(4)
    central = Central(shared, Moments(norms), chunks, timeout)
    return Store(
        params, rule, Guard(clip, skip), central, BoardSteps(board, rank), local_steps, BETAS,
        Turns(board, rank, timeout) if turns else None,
    )  # fmt: skip


def apply(exchange: Store, params: FlatParams, grad: Tensor, lr: float = 1e-2) -> float:
    params.grad.copy_(grad)
    norm = exchange.step(params, lr)
    assert not params.grad.any()
    return norm


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
    shared = central_memory(params.data, rule, chunks, NOTHING)
    with store(shared, params, rule, chunks, local_steps=local_steps, clip=5.0) as exchange:
        for k, grad in enumerate(gradients(params, 30)):
            expected = grad.clone()
            norm = float(flat_norm_clip(expected, 5.0))
            rule.update(plain, expected, state, 1e-2)
            exchange.pull(params)
            assert apply(exchange, params, grad) == pytest.approx(norm, rel=1e-6)
            torch.testing.assert_close(params.data, plain, rtol=0, atol=1e-6)
            met = (k + 1) % local_steps == 0
            assert bool((exchange.central.data - params.data).abs().max() < 1e-6) == met
            exchange.pull(params)
            torch.testing.assert_close(params.data, plain, rtol=0, atol=1e-6)
        assert met
        for name, x in exchange.state_dict().items():
            if name == "count":
                assert x.tolist() == [30.0] * chunks
            else:
                torch.testing.assert_close(x, state[name], rtol=1e-5, atol=1e-6)
    shared.close()


def test_the_dialects_differ_here():
    """Or the test above could not tell one from the other."""
    params = flat(100, 33, 5)
    results = []
    for eps_hat in (False, True):
        rule, x = Adam(*BETAS, 1e-3, eps_hat), params.data.clone()
        state = rule.state(x)
        for grad in gradients(params, 30):
            flat_norm_clip(grad, 5.0)
            rule.update(x, grad, state, 1e-2)
        results.append(x)
    assert (results[0] - results[1]).abs().max() > 1e-4


@pytest.mark.parametrize("chunks", [1, 3, 8])
@pytest.mark.parametrize("inside", [False, True])
def test_one_learner_is_plain_rmsprop(chunks, inside):
    rule = RMSProp(0.9, 1e-3, inside, initial=1.0 if inside else 0.0)
    params = flat(100, 33, 5)
    plain, state = params.data.clone(), rule.state(params.data)
    shared = central_memory(params.data, rule, chunks, NOTHING)
    with store(shared, params, rule, chunks) as exchange:
        for grad in gradients(params, 30):
            rule.update(plain, grad, state, 1e-2)
            apply(exchange, params, grad)
            torch.testing.assert_close(params.data, plain, rtol=0, atol=1e-6)
            torch.testing.assert_close(exchange.central.data, plain, rtol=0, atol=1e-6)
        torch.testing.assert_close(exchange.state_dict()["square"], state["square"], rtol=1e-6, atol=1e-7)
    shared.close()


@pytest.mark.parametrize("n", [16, 64, 160, 1008])
@pytest.mark.parametrize("chunks", [1, 3, 8])
def test_chunks_cover_every_weight_once_and_begin_on_a_cache_line(n, chunks):
    slices = split(n, chunks)
    assert len(slices) == chunks
    assert [i for at in slices for i in range(n)[at]] == list(range(n))
    assert all(at.start % 16 == 0 for at in slices)


def test_more_chunks_than_cache_lines():
    """Empty chunks do no harm."""
    rule, params = Adam(*BETAS, 1e-5), flat(20)
    plain, state = params.data.clone(), rule.state(params.data)
    shared = central_memory(params.data, rule, 8, NOTHING)
    with store(shared, params, rule, 8, local_steps=2) as exchange:
        for grad in gradients(params, 10):
            rule.update(plain, grad, state, 1e-2)
            apply(exchange, params, grad)
        torch.testing.assert_close(exchange.central.data, plain, rtol=0, atol=1e-6)
    shared.close()


# --- several ---


def test_pull_gives_the_central_weights_and_what_is_pending_here():
    rule = Adam(*BETAS, 1e-5)
    a, b = flat(50), flat(50)
    shared = central_memory(a.data, rule, 3, NOTHING)
    one, two = (store(shared, x, rule, 3, local_steps=n) for x, n in ((a, 3), (b, 2)))
    begin = a.data.clone()
    for grad in gradients(a, 2, seed=1):
        apply(one, a, grad)
    mine = a.data - begin  # two steps, not told yet
    assert mine.abs().max() > 1e-3
    assert torch.equal(one.central.data, begin)
    for grad in gradients(b, 2, seed=2):
        apply(two, b, grad)
    theirs = one.central.data - begin
    assert theirs.abs().max() > 1e-3
    torch.testing.assert_close(a.data, begin + mine, rtol=0, atol=1e-6)  # nothing yet: it has not asked
    one.pull(a)
    torch.testing.assert_close(a.data, begin + theirs + mine, rtol=0, atol=1e-6)
    two.pull(b)
    torch.testing.assert_close(b.data, begin + theirs, rtol=0, atol=1e-6)


def test_two_learners_that_take_turns_are_one_serial_rmsprop():
    rule, both = RMSProp(0.9, 1e-3), [flat(100, 33), flat(100, 33)]
    plain, state = both[0].data.clone(), rule.state(both[0].data)
    shared = central_memory(plain, rule, 3, NOTHING)
    exchanges = [store(shared, x, rule, 3, rank=r) for r, x in enumerate(both)]
    for k, grad in enumerate(gradients(both[0], 30)):
        who = [0, 1, 1][k % 3]
        rule.update(plain, grad, state, 1e-2)
        apply(exchanges[who], both[who], grad)
        torch.testing.assert_close(both[who].data, plain, rtol=0, atol=1e-6)  # what it holds is the centre's
        torch.testing.assert_close(exchanges[0].central.data, plain, rtol=0, atol=1e-6)
        if k % 3:
            assert not torch.equal(both[0].data, plain)  # who has not met the centre does not know
    torch.testing.assert_close(exchanges[0].state_dict()["square"], state["square"], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("chunks", [1, 3])
def test_local_steps_of_two_learners_add_up(chunks):
    """Nothing is lost: the centre is where it began and every step that anybody made; moments as in Appendix B."""
    rule, n = Adam(*BETAS, 1e-3), {0: 2, 1: 3}
    both = [flat(100, 33), flat(100, 33)]
    begin = both[0].data.clone()
    shared = central_memory(begin, rule, chunks, NOTHING)
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
        begins = x.data.clone()
        last = mine[2] + 1 == n[who]
        centre = exchanges[who].central.data.clone()
        apply(exchanges[who], x, grad)
        if last:  # the meeting: what came to the centre is what was pending and this step
            pending[who] += exchanges[who].central.data - centre - before
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
            assert torch.equal(x.data, exchanges[who].central.data)
        torch.testing.assert_close(exchanges[who].central.data, begin + told, rtol=0, atol=1e-5)
    assert count > 40


def test_a_step_is_adams_on_the_moments_met_last():
    """A local step's size comes from the central moments of the last meeting and this learner's gradients since."""
    rule, both = Adam(*BETAS, 1e-3, True), [flat(40), flat(40)]
    shared = central_memory(both[0].data, rule, 1, NOTHING)
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


def add_ones(post: Post, shared: SharedArrays, chunks: int, steps: int) -> None:
    params = flat(1000)
    exchange = store(shared, params, Sgd(), chunks, timeout=60.0)
    with exchange:
        for _ in range(steps):
            exchange.pull(params)
            params.grad.fill_(1.0)
            exchange.step(params, 1.0)


def test_processes_that_write_at_once_lose_nothing():
    """Three processes subtract one, 300 times each, from every weight: read, changed and written under the lock."""
    params, steps, chunks = flat(1000), 300, 4
    params.data.zero_()
    shared = central_memory(params.data, Sgd(), chunks, NOTHING)
    said = hear([start(add_ones, shared, chunks, steps) for _ in range(3)])
    assert [s[-1] for s in said] == [("end", "ended with exit code 0")] * 3, said
    assert (torch.from_numpy(shared.arrays["data"]) == -3.0 * steps).all()
    shared.close()


# --- locks ---


def hold(post: Post, shared: SharedArrays, k: int) -> None:
    locks = Locks(shared.fd, 5.0)
    assert locks.take(k)
    post("taken", k)
    time.sleep(600)


def test_a_lock_is_one_processs_and_free_when_it_is_killed():
    shared = central_memory(torch.zeros(64), Sgd(), 3, NOTHING)
    locks = Locks(shared.fd, 0.02)
    child = start(hold, shared, 1)
    try:
        assert expect(child, {"taken"}) == ("taken", 1)
        assert not locks.take(1, wait=False)
        with pytest.raises(CoterieError, match=r"^a lock on the shared weights was not free for 0\.02 s: .* hangs$"):
            locks.take(1)
        with pytest.raises(CoterieError, match="was not free"), locks.held(1):
            raise AssertionError("it was not held")
        for k in (0, 2, 3):  # the others are free
            assert locks.take(k, wait=False)
            locks.free(k)
    finally:
        child.kill()
    assert Locks(shared.fd, 10.0).take(1)
    shared.close()


def test_free_chunks_come_first_and_the_killed_holders_chunk_last():
    params = flat(1000)
    shared = central_memory(params.data, Sgd(), 3, NOTHING)
    begin = params.data.clone()
    child = start(hold, shared, 0)
    try:
        assert expect(child, {"taken"}) == ("taken", 0)
        with store(shared, params, Sgd(), 3, timeout=60.0) as exchange:
            first, rest = exchange.central.slices[0], slice(exchange.central.slices[1].start, None)
            params.grad.fill_(1.0)

            def watch() -> None:
                until(lambda: bool((exchange.central.data[rest] == begin[rest] - 1).all()))
                assert torch.equal(exchange.central.data[first], begin[first])
                child.kill()

            together([partial(exchange.step, params, 1.0), watch])
            assert torch.equal(exchange.central.data, begin - 1)
            assert torch.equal(params.data, begin - 1)
    finally:
        child.kill()
    shared.close()


def test_a_learner_that_raises_under_a_lock_frees_it():
    class Breaks(Sgd):
        def update(self, param: Tensor, grad: Tensor, state: dict[str, Tensor], lr: float) -> None:
            raise RuntimeError("no")

    params = flat(40)
    shared = central_memory(params.data, Sgd(), 1, NOTHING)
    exchange = store(shared, params, Breaks(), 1)
    with pytest.raises(RuntimeError, match="no"):
        exchange.step(params, 1.0)
    child = start(hold, shared, 0)  # another process gets it: this one has let go
    try:
        assert expect(child, {"taken"}) == ("taken", 0)
    finally:
        child.kill()
    exchange.__exit__(None, None, None)
    shared.close()


# --- turns ---


class Noted(Sgd):
    """Writes down who applied it."""

    def __init__(self, rank: int, log: list[int]) -> None:
        self.rank, self.log = rank, log

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Tensor], lr: float) -> None:
        self.log.append(self.rank)
        super().update(param, grad, state, lr)


def test_fixed_turns_keep_their_order_whoever_comes_first():
    """Who leaves is passed over; normalizers take a turn of their own."""
    board, log, n, steps = Board(3), [], 3, [6, 3, 6]
    board.here[:] = 1
    norms = [Normalizer((2,)) for _ in range(n)]
    all_params = [flat(20) for _ in range(n)]
    shared = central_memory(all_params[0].data, Sgd(), 1, Moments([norms[0]]).read())
    exchanges = [
        store(shared, p, Noted(r, log), 1, rank=r, board=board, turns=True, norms=(norms[r],))
        for r, p in enumerate(all_params)
    ]
    jitter = random.Random(0)

    def run(r: int) -> None:
        with exchanges[r] as exchange:
            for k in range(steps[r]):
                time.sleep(jitter.random() * 2e-3)
                exchange.pull(all_params[r])
                apply(exchange, all_params[r], torch.full_like(all_params[r].data, float(r + 1)), 1.0)
                norms[r].update(torch.full((1, 2), float(k)))
                exchange.after_rollout(all_params[r])

    together([partial(run, r) for r in reversed(range(n))])
    assert log == [0, 1, 2] * 3 + [0, 2] * 3
    assert board.turns.tolist() == [12, 6, 12]
    assert board.here.tolist() == [0, 0, 0]
    assert exchanges[2].central.moments.read()[0] == sum(steps)
    shared.close()


def test_with_fixed_turns_a_run_comes_out_the_same_twice():
    """Weights between two turns are this learner's own: what others do meanwhile is not seen before the next turn."""

    def once(seed: int) -> tuple[Tensor, list[list[float]]]:
        board = Board(2)
        board.here[:] = 1
        both, seen = [flat(30), flat(30)], [[], []]
        rule = RMSProp(0.9, 1e-3)
        shared = central_memory(both[0].data, rule, 3, NOTHING)
        exchanges = [
            store(shared, p, RMSProp(0.9, 1e-3), 3, rank=r, board=board, turns=True) for r, p in enumerate(both)
        ]
        jitter = random.Random(seed)

        def run(r: int) -> None:
            for _ in range(8):
                time.sleep(jitter.random() * 2e-3)
                exchanges[r].pull(both[r])
                seen[r].append(float(both[r].data.sum()))
                time.sleep(jitter.random() * 2e-3)
                exchanges[r].pull(both[r])
                apply(exchanges[r], both[r], both[r].data * (r + 1))  # depends on what it saw

        together([partial(run, r) for r in range(2)])
        return exchanges[0].central.data.clone(), seen

    (first, seen), (second, again) = once(1), once(2)
    assert torch.equal(first, second)
    assert seen == again


def test_who_gets_no_turn_says_so():
    board = Board(2)
    board.here[:] = 1
    params = flat(20)
    shared = central_memory(params.data, Sgd(), 1, NOTHING)
    exchange = store(shared, params, Sgd(), 1, rank=1, board=board, turns=True, timeout=0.02)
    begin = exchange.central.data.clone()
    params.grad.fill_(1.0)
    with pytest.raises(CoterieError, match=r"^store: no turn for 0\.02 s: another learner hangs$"):
        exchange.step(params, 1.0)
    assert torch.equal(exchange.central.data, begin)
    shared.close()


# --- what never reaches the centre ---


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("local_steps", [1, 3])
def test_a_gradient_that_is_not_finite_never_reaches_the_centre(local_steps, bad):
    rule, params = Adam(*BETAS, 1e-3), flat(50, 20)
    shared = central_memory(params.data, rule, 3, NOTHING)
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
        torch.testing.assert_close(exchange.central.data, plain, rtol=0, atol=1e-6)  # and no local step was counted
        exchange.guard.skip = False
        params.grad[params.slices["w1"].start] = bad
        with pytest.raises(NonFinite, match="the gradient of w1 is not finite"):
            exchange.step(params, 1e-2)
        torch.testing.assert_close(exchange.central.data, plain, rtol=0, atol=1e-6)
    shared.close()


# --- what is saved ---


@pytest.mark.parametrize("chunks", [1, 3, 5])
@pytest.mark.parametrize("local_steps", [1, 2])
def test_a_saved_state_goes_on_as_if_nothing_had_happened(chunks, local_steps):
    """Into a store with another number of chunks, too."""
    rule, params = Adam(*BETAS, 1e-3), flat(100, 33)
    grads = gradients(params, 12)
    shared = central_memory(params.data, rule, 3, NOTHING)
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
    shared = central_memory(again.data, rule, chunks, NOTHING)
    fill(shared, saved, NOTHING)
    with store(shared, again, rule, chunks, local_steps=local_steps) as exchange:
        exchange.load_state_dict(saved)
        for grad in grads[6:]:
            apply(exchange, again, grad)
        torch.testing.assert_close(again.data, params.data, rtol=0, atol=1e-6)
        assert exchange.state_dict()["count"].tolist() == [12.0] * chunks
    shared.close()
