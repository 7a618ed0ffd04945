"""The central store: one learner is plain Adam, several lose nothing, chunks are locked and read whole."""

from __future__ import annotations

import time
from functools import partial

import numpy as np
import pytest
import torch

from coterie.errors import CoterieError
from coterie.exchange.shared_weights import CoreTurns, shared_memory_for
from coterie.ops.optim import Adam, flat_norm_clip
from coterie.parallel.board import Board
from coterie.parallel.locks import Locks
from coterie.parallel.params import pieces
from coterie.parallel.shm import SharedArrays
from coterie.types import Post
from tests.exchange.harness import BETAS, NOTHING, Sgd, apply, collect, expect, flat, gradients, start, store, together
from tests.support.waiting import wait_until

# --- one learner ---


@pytest.mark.parametrize("chunks", [1, 3, 8])
@pytest.mark.parametrize("local_steps", [1, 2, 3, 5])
@pytest.mark.parametrize("eps_hat", [False, True])
def test_a_store_with_one_learner_is_plain_adam(local_steps, chunks, eps_hat):
    """Also between two meetings, before and after a pull; large eps, so that the dialects of Adam are apart."""
    rule = Adam(*BETAS, 1e-3, eps_hat)
    params = flat(100, 33, 5)
    params.data.mul_(0.3)  # below 1, where float32 has digits enough for 1e-6 over 30 steps
    plain, state = params.data.clone(), rule.state(params.data)
    shared = shared_memory_for(params.data, rule, chunks, NOTHING)
    with store(shared, params, rule, chunks, local_steps=local_steps, clip=5.0) as exchange:
        for k, grad in enumerate(gradients(params, 30)):
            expected = grad.clone()
            norm = flat_norm_clip(expected, 5.0)
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
    slices = pieces(n, chunks)
    assert len(slices) == chunks
    assert [i for at in slices for i in range(n)[at]] == list(range(n))
    assert all(at.start % 16 == 0 for at in slices)


# --- several ---


@pytest.mark.parametrize("chunks", [1, 3])
def test_local_steps_of_two_learners_add_up(chunks):
    """Nothing is lost: the center is where it began and every step of each learner; moments as in Appendix B."""
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
        center = exchanges[who].shared.data.clone()
        apply(exchanges[who], x, grad)
        if last:  # the meeting: what came to the center is what was pending and this step
            pending[who] += exchanges[who].shared.data - center - before
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
        apply(two, both[1], grad)  # the center moves on; learner 0 has not met it since
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


def test_no_rounding_makes_a_mean_square_negative():
    """Its root would be NaN. The others have let the center's decay to nothing since this learner took it."""
    rule, params = Adam(*BETAS, 1e-3), flat(1000)
    shared = shared_memory_for(params.data, rule, 1, NOTHING)
    one, square = store(shared, params, rule, 1, local_steps=3), shared.arrays["state/square"]
    begin, none = gradients(params, 3), torch.zeros_like(params.data)
    for grad in (*begin, none, none):
        apply(one, params, grad)
    square[:] = 0
    for grad in [none] * 4:
        apply(one, params, grad)
        assert (square >= 0).all()
    assert params.data.isfinite().all()


# --- processes that write at once ---


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
    shared = shared_memory_for(params.data, Sgd(), chunks, NOTHING)
    said = collect([start(add_ones, shared, chunks, steps) for _ in range(3)])
    assert [s[-1] for s in said] == [("end", "ended with exit code 0")] * 3, said
    assert (torch.from_numpy(shared.arrays["data"]) == -3.0 * steps).all()
    shared.close()


# --- locks ---


def hold(post: Post, shared: SharedArrays, k: int) -> None:
    locks = Locks(shared.fd, 5.0)
    assert locks.take(k)
    post("taken", k)
    time.sleep(600)


def test_a_lock_excludes_other_processes_and_is_free_when_its_holder_is_killed():
    shared = shared_memory_for(torch.zeros(64), Sgd(), 3, NOTHING)
    locks = Locks(shared.fd, 0.02)
    child = start(hold, shared, 1)
    try:
        assert expect(child, {"taken"}) == ("taken", 1)
        assert not locks.take(1, wait=False)
        with pytest.raises(CoterieError, match=r"^a lock on shared memory was not free for 0\.02 s: .* hangs$"):
            locks.take(1)
        with pytest.raises(CoterieError, match="was not free"), locks.held(1):
            raise AssertionError("it was not held")
        for k in (0, 2, 3):  # the others are free
            assert locks.take(k, wait=False)
            locks.free(k)
    finally:
        child.kill()
    assert Locks(shared.fd, 10.0).take(1)
    with pytest.raises(OSError, match="Bad file descriptor"):  # no lock that another process has
        Locks(9999, 10.0).take(1, wait=False)
    shared.close()


def test_free_chunks_come_first_and_the_killed_holders_chunk_last():
    params = flat(1000)
    shared = shared_memory_for(params.data, Sgd(), 3, NOTHING)
    begin = params.data.clone()
    child = start(hold, shared, 0)
    try:
        assert expect(child, {"taken"}) == ("taken", 0)
        with store(shared, params, Sgd(), 3, timeout=60.0) as exchange:
            first, rest = exchange.shared.slices[0], slice(exchange.shared.slices[1].start, None)
            params.grad.fill_(1.0)

            def watch() -> None:
                wait_until(lambda: bool((exchange.shared.data[rest] == begin[rest] - 1).all()))
                assert torch.equal(exchange.shared.data[first], begin[first])
                child.kill()

            together([partial(exchange.step, params, 1.0), watch])
            assert torch.equal(exchange.shared.data, begin - 1)
            assert torch.equal(params.data, begin - 1)
    finally:
        child.kill()
    shared.close()


# --- whole chunks ---


def write_slowly(post: Post, shared: SharedArrays, name: str) -> None:
    """Fill an array of chunk 0 with ones under its lock, and stop half-way."""
    array = shared.arrays[name]
    with Locks(shared.fd, 5.0).held(0):
        array[:16] = 1.0
        post("half", None)
        time.sleep(1.0)
        array[16:] = 1.0


@pytest.mark.parametrize("reads", ["weights", "local steps", "checkpoint"])
def test_nothing_is_read_in_the_middle_of_an_update(reads):
    params, rule = flat(32), Adam(*BETAS, 1e-5)
    params.data.zero_()
    shared = shared_memory_for(params.data, rule, 1, NOTHING)
    child = start(write_slowly, shared, "data" if reads == "weights" else "state/mean")
    expect(child, {"half"})
    with store(shared, params, rule, 1, local_steps=2) as exchange:
        if reads == "weights":
            exchange.pull(params)
            found = params.data
        elif reads == "local steps":
            found = exchange.local[0]["mean"]
        else:
            found = exchange.state_dict()["mean"]
        assert found.tolist() == [1.0] * 32
    child.kill()
    shared.close()


# --- learners that share a core ---


def take_turns(post: Post, shared: SharedArrays, board: Board, rank: int, rollouts: int) -> None:
    """`data[0]`: how many are inside; `data[1]`: the most that ever were; `data[2:]`: who was inside, one by one."""
    data, turn = shared.arrays["data"], CoreTurns(Locks(shared.fd, 5.0), 7, board, rank)
    board.meet(rank, 60.0)  # who starts late has not been left out
    for _ in range(rollouts):
        turn.begin()
        turn.begin()  # polled in the middle of a rollout: it goes on
        data[0] += 1
        data[1] = max(data[1], data[0])
        data[2 + int(data[2:].astype(bool).sum())] = 1 + rank
        time.sleep(1e-3)
        data[0] -= 1
        turn.end()
        turn.end()


def test_learners_on_one_core_work_one_at_a_time_and_none_is_left_out():
    learners, rollouts = 4, 40
    shared = shared_memory_for(torch.zeros(2 + learners * rollouts), Sgd(), 1, NOTHING)
    board = Board(learners)
    said = collect([start(take_turns, shared, board, rank, rollouts) for rank in range(learners)])
    assert [s[-1] for s in said] == [("end", "ended with exit code 0")] * learners, said
    data = shared.arrays["data"]
    assert (data[0], data[1]) == (0, 1)
    inside = data[2:].astype(int).tolist()
    assert sorted(inside) == [1 + rank for rank in range(learners) for _ in range(rollouts)]
    busy = [i for i, who in enumerate(inside) if who == inside[-1]]
    assert busy[0] < len(inside) * 3 // 4  # the last one to end did not wait for all the others to be done
    shared.close()
