"""Sums in shared memory: exact, the same bits for all, in any rhythm, and over at once where a learner is gone."""

import os
import random
import signal
import threading
import time

import pytest
import torch

from coterie.errors import CoterieError
from coterie.exchange.shared_sum import SharedSum, leave, memory_for_sums
from coterie.parallel.processes import PeerLost
from coterie.types import Post
from tests.exchange.harness import collect, start, together

LONG = 10_007  # numbers; learners add up parts of it


def inputs(rank: int, count: int) -> list[torch.Tensor]:
    """Tensors of several types and lengths, the same shapes for every rank."""
    rng, shapes = torch.Generator().manual_seed(rank), random.Random(0)
    made = []
    for _ in range(count):
        n = shapes.choice([1, 16, 5000, LONG])
        x = torch.randn(n, generator=rng)
        kinds = [x, x.double(), (1000 * x).long(), x[:1].reshape(()), x.reshape(1, n)]
        made.append(shapes.choice(kinds))
    return made


def add_all(post: Post, rank: int, memory, count: int) -> None:
    torch.set_num_threads(1)
    sums, pauses = SharedSum(memory, rank), random.Random(rank)
    for x in (found := inputs(rank, count)):
        if pauses.random() < 0.1:
            time.sleep(0.005 * pauses.random())
        sums.add_up(x)
    post("sums", [x.numpy() for x in found])


@pytest.mark.parametrize("learners", [2, 3, 5])
def test_all_learners_get_the_sum_in_the_order_of_ranks(learners):
    count = 60
    memory = memory_for_sums(learners, [torch.zeros(LONG, dtype=torch.float64)])
    said = collect([start(add_all, rank, memory, count) for rank in range(learners)])
    expected = inputs(0, count)
    for rank in range(1, learners):
        for total, x in zip(expected, inputs(rank, count), strict=True):
            total += x
    for messages in said:
        assert [kind for kind, _ in messages] == ["sums", "end"], messages
        for k, (found, total) in enumerate(zip(messages[0][1], expected, strict=True)):
            assert torch.equal(torch.from_numpy(found), total), k


@pytest.mark.parametrize("length", [16, LONG])
def test_a_fast_learner_does_not_overwrite_what_a_slow_one_reads(monkeypatch, length):
    """A learner dawdles where it has met the others, and is about to read."""
    memory, count, meet = memory_for_sums(3, [torch.zeros(length)]), 60, SharedSum._meet
    totals: dict[int, list[float]] = {rank: [] for rank in range(3)}

    def dawdle(self: SharedSum, counts) -> None:
        meet(self, counts)
        if self.rank == self._number % 3:
            time.sleep(0.003)

    monkeypatch.setattr(SharedSum, "_meet", dawdle)

    def work(rank: int) -> None:
        sums = SharedSum(memory, rank)
        for k in range(count):
            x = torch.full((length,), float(3 * k + rank))
            sums.add_up(x)
            assert bool((x == x[0]).all())
            totals[rank].append(float(x[0]))

    together([lambda rank=rank: work(rank) for rank in range(3)])
    assert totals == {rank: [9.0 * k + 3 for k in range(count)] for rank in range(3)}


def test_a_sum_that_is_too_large_for_the_memory_is_refused():
    with pytest.raises(CoterieError, match=r"^allreduce: a sum of 800 bytes, more than the 64 of the weights$"):
        SharedSum(memory_for_sums(2, [torch.zeros(4)]), 0).add_up(torch.zeros(200))


@pytest.mark.parametrize("length", [1016, LONG])
def test_tensors_of_different_sizes_are_not_added_up(length):
    """One learner has a batch in this rollout; the other has none, and sends its counts alone."""
    memory = memory_for_sums(3, [torch.zeros(length)])

    def work(rank: int) -> None:
        sums, x = SharedSum(memory, rank), torch.ones(length)
        sums.add_up(x)
        with pytest.raises(CoterieError, match=r"^allreduce: the learners do not make the same number of steps"):
            sums.add_up(x if rank else x[-16:])

    together([lambda rank=rank: work(rank) for rank in range(3)])


def die_at(post: Post, memory, rank: int, point: str) -> None:
    """A second sum, in which this learner is killed: before it has counted its tensor, or after."""
    sums = SharedSum(memory, rank)
    sums.add_up(torch.ones(LONG))
    meet = SharedSum._meet

    def end(self: SharedSum, counts) -> None:
        first = counts is self._given
        if point == ("given" if first else "added"):
            counts[self.rank] = self._number
        if point != "added" or not first:
            os.kill(os.getpid(), signal.SIGKILL)
        meet(self, counts)

    SharedSum._meet = end
    sums.add_up(torch.ones(LONG))


def add_two(post: Post, memory, rank: int) -> None:
    sums, x = SharedSum(memory, rank), torch.ones(LONG)
    sums.add_up(x)
    try:
        sums.add_up(x.fill_(1.0))
        post("sum", float(x[0]))
    except PeerLost:
        post("lost", None)


@pytest.mark.parametrize(("point", "learners", "then"), [
    ("before", 2, "lost"), ("given", 2, "sum"), ("before", 3, "lost"), ("given", 3, "lost"), ("added", 3, "sum"),
])  # fmt: skip
def test_where_a_learner_is_killed_in_a_sum_all_others_have_the_sum_or_none(point, learners, then):
    memory = memory_for_sums(learners, [torch.zeros(LONG)])
    killed = start(die_at, memory, learners - 1, point)
    others = [start(add_two, memory, rank) for rank in range(learners - 1)]
    assert collect([killed])[0][-1][1].startswith("was killed by SIGKILL")
    leave(memory, learners - 1)
    said = collect(others)
    assert [messages[0] for messages in said] == [(then, float(learners) if then == "sum" else None)] * len(others)


@pytest.mark.parametrize("when", ["before", "while it is waited for"])
def test_the_others_do_not_wait_for_a_learner_that_is_gone(when):
    memory = memory_for_sums(2, [torch.zeros(4)])
    if when == "before":
        leave(memory, 1)
    else:
        threading.Timer(0.2, leave, (memory, 1)).start()
    with pytest.raises(PeerLost):
        SharedSum(memory, 0).add_up(torch.zeros(4))


def test_what_a_learner_gave_before_it_left_still_counts():
    memory, ones, x = memory_for_sums(2, [torch.zeros(4)]), torch.ones(4), torch.ones(4)
    other = threading.Thread(target=SharedSum(memory, 1).add_up, args=(ones,))
    other.start()
    while not memory.arrays["given"][1]:
        time.sleep(0.001)
    leave(memory, 1)
    SharedSum(memory, 0).add_up(x)
    other.join()
    assert x.tolist() == ones.tolist() == [2.0] * 4
