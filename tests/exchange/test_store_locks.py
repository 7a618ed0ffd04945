"""The central store among processes and threads: nothing is lost, chunks are locked and read whole."""

from __future__ import annotations

import time
from functools import partial

import pytest
import torch

from coterie.exchange.shared_weights import CoreTurns, shared_memory_for
from coterie.ops.optim import Adam
from coterie.parallel.board import Board
from coterie.parallel.locks import Locks
from coterie.parallel.processes import Post
from coterie.parallel.shm import SharedArrays
from coterie.types import CoterieError
from tests.exchange.harness import Sgd, collect, expect, flat, start, together
from tests.exchange.store_harness import BETAS, NOTHING, store
from tests.support.waiting import wait_until

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
        time.sleep(0.3)
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
    board.active[rank] = 1
    wait_until(lambda: board.active.all())  # who starts late has not been left out
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
