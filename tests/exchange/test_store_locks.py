"""The central store among processes and threads: nothing is lost, chunks are locked, turns are kept."""

from __future__ import annotations

import random
import time
from functools import partial

import pytest
import torch
from torch import Tensor

from coterie.exchange.shared_weights import Shift, central_memory
from coterie.models.heads import Moments, Normalizer
from coterie.ops.optim import RMSProp
from coterie.parallel.board import Board
from coterie.parallel.locks import Locks
from coterie.parallel.processes import Child, Post
from coterie.parallel.shm import SharedArrays
from coterie.types import CoterieError
from tests.exchange.harness import Sgd, expect, flat, hear, start, together, until
from tests.exchange.store_harness import NOTHING, apply, store

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
    board.active[:] = 1
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
    assert board.active.tolist() == [0, 0, 0]
    assert exchanges[2].central.moments.read()[0] == sum(steps)
    shared.close()


def test_with_fixed_turns_a_run_comes_out_the_same_twice():
    """Weights between two turns are this learner's own: what others do meanwhile is not seen before the next turn."""

    def once(seed: int) -> tuple[Tensor, list[list[float]]]:
        board = Board(2)
        board.active[:] = 1
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
    board.active[:] = 1
    params = flat(20)
    shared = central_memory(params.data, Sgd(), 1, NOTHING)
    exchange = store(shared, params, Sgd(), 1, rank=1, board=board, turns=True, timeout=0.02)
    begin = exchange.central.data.clone()
    params.grad.fill_(1.0)
    with pytest.raises(CoterieError, match=r"^store: no turn for 0\.02 s: another learner hangs$"):
        exchange.step(params, 1.0)
    assert torch.equal(exchange.central.data, begin)
    shared.close()


# --- learners that share a core ---


def take_shifts(post: Post, shared: SharedArrays, board: Board, rank: int, rollouts: int) -> None:
    """`data[0]`: how many are inside; `data[1]`: the most that ever were; `data[2:]`: who was inside, one by one."""
    data, shift = shared.arrays["data"], Shift(Locks(shared.fd, 5.0), 7, board, rank)
    board.active[rank] = 1
    until(lambda: board.active.all())  # who starts late has not been left out
    for _ in range(rollouts):
        shift.begin()
        shift.begin()  # polled in the middle of a rollout: it goes on
        data[0] += 1
        data[1] = max(data[1], data[0])
        data[2 + int(data[2:].astype(bool).sum())] = 1 + rank
        time.sleep(1e-3)
        data[0] -= 1
        shift.end()
        shift.end()


def test_learners_on_one_core_work_one_at_a_time_and_none_is_left_out():
    learners, rollouts = 4, 40
    shared = central_memory(torch.zeros(2 + learners * rollouts), Sgd(), 1, NOTHING)
    board = Board(learners)
    said = hear([start(take_shifts, shared, board, rank, rollouts) for rank in range(learners)])
    assert [s[-1] for s in said] == [("end", "ended with exit code 0")] * learners, said
    data = shared.arrays["data"]
    assert (data[0], data[1]) == (0, 1)
    inside = data[2:].astype(int).tolist()
    assert sorted(inside) == [1 + rank for rank in range(learners) for _ in range(rollouts)]
    busy = [i for i, who in enumerate(inside) if who == inside[-1]]
    assert busy[0] < len(inside) * 3 // 4  # the last one to end did not wait for all the others to be done
    shared.close()


def begin_shift(post: Post, shared: SharedArrays, board: Board) -> None:
    Shift(Locks(shared.fd, 5.0), 7, board, 0).begin()
    post("inside", None)
    time.sleep(600)


def test_a_shift_ends_with_its_learner_and_who_waits_says_so():
    shared, board = central_memory(torch.zeros(64), Sgd(), 1, NOTHING), Board(2)
    child = start(begin_shift, shared, board)
    assert expect(child, {"inside"})[0] == "inside"
    board.heartbeat[:] = 0
    shift = Shift(Locks(shared.fd, 5.0), 7, board, 1)
    done: list[bool] = []
    together([partial(_wait_for_shift, shift, done), partial(_look_and_kill, board, child)])
    assert done == [True]
    shared.close()


def _wait_for_shift(shift: Shift, done: list[bool]) -> None:
    shift.begin()
    done.append(True)


def _look_and_kill(board: Board, child: Child) -> None:
    until(lambda: board.stale([0, 1], 1.0) == [0])  # the holder is named, not who waits for it
    child.kill()
