"""Gossip: what mixing does to the weights, who waits for whom, who is told what, and the bound of Proposition 1."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from coterie.exchange.gossip import RECENT, Gossip, gossip_memory
from coterie.exchange.solo import Guard, NonFinite
from coterie.exchange.topology import contraction, matrices
from coterie.models.heads import Moments, Normalizer
from coterie.ops.optim import RMSProp
from coterie.parallel.board import Board, BoardSteps
from coterie.parallel.shm import SharedArrays
from coterie.types import Array, CoterieError
from tests.exchange.harness import Sgd, flat, gradients, together, until


@dataclass
class Crowd:
    """Learners that gossip in one process, all over the same memory."""

    learners: list[Gossip]
    shared: SharedArrays
    board: Board
    size: int  # weights of each, without padding

    def weights(self) -> Array:
        """`[n, size]`, float64."""
        return np.stack([x.params.data[: self.size].double().numpy() for x in self.learners])

    def round(self) -> None:
        """Everybody tells, then everybody hears: one mix in lockstep."""
        for x in self.learners:
            assert x._tell(x.params)
        for x in self.learners:
            assert x._hear(x.params)


def one(
    shared: SharedArrays, board: Board, sequence: Sequence[Array], rank: int, start: Array, *, tau: int = 0,
    mix_every: int = 1, timeout: float = 30.0, rule: object = None, skip: bool = False, rejoin: bool = False,
    norms: Sequence[Normalizer] = (),
) -> Gossip:  # fmt: skip
    params = flat(len(start))
    params.data[: len(start)] = torch.as_tensor(start, dtype=torch.float32)
    return Gossip(
        params, rule or Sgd(), Guard(0.0, skip), Moments(norms), shared, board, BoardSteps(board, rank), rank, sequence,
        tau=tau, mix_every=mix_every, timeout=timeout, rejoin=rejoin,
    )  # fmt: skip


def crowd(start: Array, sequence: Sequence[Array], norms: Sequence[Sequence[Normalizer]] = (), **how) -> Crowd:
    n, size = start.shape
    board = Board(n)
    board.here[:] = 1
    shared = gossip_memory(n, len(flat(size).data), Moments(norms[0]).size if norms else 0)
    learners = [
        one(shared, board, sequence, rank, start[rank], norms=norms[rank] if norms else (), **how) for rank in range(n)
    ]
    return Crowd(learners, shared, board, size)


def step(x: Gossip, grad: Tensor | None = None, lr: float = 1.0) -> None:
    if grad is not None:
        x.params.grad.copy_(grad)
    x.step(x.params, lr)


def distance(x: Array) -> float:
    """How far the learners are from their mean."""
    return float(np.linalg.norm(x - x.mean(0)))


# --- what a mix does ---


@pytest.mark.parametrize("n", [3, 4, 5, 8])
def test_the_slowest_differences_on_a_ring_shrink_by_the_cosine_at_every_step(n):
    """Through `step`, in lockstep, one thread for each: nothing but the mix moves the weights."""
    at, phase = np.arange(n)[:, None], np.random.default_rng(0).uniform(0, 6, 7)
    c, count = crowd(np.cos(2 * np.pi * at / n + phase) + 3, matrices("ring", n)), 12
    history: list[list[Array]] = [[] for _ in range(n)]

    def run(i: int) -> None:
        for _ in range(count):
            step(c.learners[i])
            history[i].append(c.learners[i].params.data[:7].double().numpy())

    first = distance(c.weights())
    together([partial(run, i) for i in range(n)])
    for k in range(count):
        x = np.stack([h[k] for h in history])
        assert distance(x) == pytest.approx(first * math.cos(math.pi / n) ** (k + 1), rel=1e-3)
        np.testing.assert_allclose(x.mean(0), 3 + 0 * phase, atol=1e-5)  # doubly stochastic: the mean stays


def test_any_differences_on_a_ring_shrink_at_least_so_fast():
    rng = np.random.default_rng(1)
    for n in (2, 3, 4, 8):
        c = crowd(rng.standard_normal((n, 20)), matrices("ring", n))
        before = distance(c.weights())
        for _ in range(10):
            c.round()
            after = distance(c.weights())
            assert after <= before * math.cos(math.pi / n) * (1 + 1e-5) + 1e-5
            before = after


@pytest.mark.parametrize("n", [2, 3, 5])
def test_a_complete_graph_is_a_plain_average_in_one_mix(n):
    start = np.random.default_rng(2).standard_normal((n, 9))
    c = crowd(start, matrices("complete", n))
    together([partial(step, x) for x in c.learners])
    np.testing.assert_allclose(c.weights(), np.tile(start.mean(0), (n, 1)), atol=1e-6)


@pytest.mark.parametrize("topology", ["ring", "exponential", "static-exponential", "bipartite"])
def test_in_lockstep_the_weights_are_the_product_of_the_sequence(topology):
    """Learner i begins with the i-th unit vector: the weights are the product of the matrices, step by step."""
    n, count = 6, 7
    sequence = matrices(topology, n)
    c = crowd(np.eye(n), sequence)
    history: list[list[Array]] = [[] for _ in range(n)]

    def run(i: int) -> None:
        for _ in range(count):
            step(c.learners[i])
            history[i].append(c.learners[i].params.data[:n].double().numpy())

    together([partial(run, i) for i in range(n)])
    product = np.eye(n)
    for k in range(count):
        product = sequence[k % len(sequence)] @ product
        np.testing.assert_allclose(np.stack([h[k] for h in history]), product, atol=1e-6)


@pytest.mark.parametrize("leaver", [None, 2])
@pytest.mark.parametrize("topology", ["ring", "exponential", "complete"])
def test_whatever_the_order_products_are_row_stochastic(topology, leaver):
    """Nobody in step with anybody, some much slower, one that leaves: everyone's weights stay a convex combination."""
    n, rng = 5, np.random.default_rng(3)
    c = crowd(np.eye(n), matrices(topology, n), tau=-1)
    chances = np.array([0.4, 0.3, 0.15, 0.1, 0.05])
    gone = set()
    for k in range(400):
        i = int(rng.choice(n, p=chances))
        if k == 150 and leaver is not None:
            c.learners[leaver].__exit__(None, None, None)
            gone.add(leaver)
        if i not in gone:
            step(c.learners[i])
            x = c.weights()
            assert (x >= 0).all()
            np.testing.assert_allclose(x.sum(1), 1, atol=1e-5)
    assert sum(x.skipped_messages for x in c.learners) > 0  # it was not in lockstep
    alive = [i for i in range(n) if i not in gone]
    assert (c.shared.arrays["mixed"][alive] > 5).all()
    assert distance(c.weights()[alive]) < 0.1  # 2 at first


def test_a_sequence_that_is_not_doubly_stochastic_converges_to_its_left_eigenvector(tmp_path):
    p = np.array([[0.7, 0.3, 0, 0], [0, 0.5, 0.5, 0], [0.1, 0, 0.6, 0.3], [0.5, 0, 0.2, 0.3]])
    values, vectors = np.linalg.eig(p.T)
    pi = np.real(vectors[:, np.argmax(np.real(values))])
    pi /= pi.sum()
    assert np.ptp(pi) > 0.1  # not the plain mean
    path = tmp_path / "p.json"
    path.write_text(json.dumps(p.tolist()))
    start = np.random.default_rng(4).standard_normal((4, 6))
    c = crowd(start, matrices(str(path), 4))
    for _ in range(60):
        c.round()
    np.testing.assert_allclose(c.weights(), np.outer(np.ones(4), pi @ start), atol=1e-5)


def test_a_row_weighs_itself_and_each_peer_as_it_says(tmp_path):
    p = [[0.5, 0.2, 0.3], [0.9, 0.1, 0], [0, 0.6, 0.4]]
    path = tmp_path / "p.json"
    path.write_text(json.dumps(p))
    start = np.random.default_rng(5).standard_normal((3, 4))
    c = crowd(start, matrices(str(path), 3))
    c.round()
    np.testing.assert_allclose(c.weights(), np.array(p) @ start, atol=1e-6)


def test_the_update_comes_before_the_message():
    """Line 3 before line 5 of Algorithm 1: what is told, and what is averaged, has this step's gradient in it."""
    start = np.random.default_rng(6).standard_normal((2, 16))
    c = crowd(start, matrices("ring", 2))
    grads = [gradients(x.params, 1, seed=x.rank)[0] for x in c.learners]
    together([partial(step, x, g, 0.1) for x, g in zip(c.learners, grads, strict=True)])
    moved = start - 0.1 * np.stack([g[:16].numpy() for g in grads])
    np.testing.assert_allclose(c.weights(), np.tile(moved.mean(0), (2, 1)), atol=1e-6)
    np.testing.assert_allclose(c.shared.arrays["message"][:, :16], moved, atol=1e-6)


@pytest.mark.parametrize("mix_every", [0, 1, 3])
def test_mixes_at_every_so_many_steps_or_once_a_rollout(mix_every):
    c = crowd(np.eye(2), matrices("complete", 2), mix_every=mix_every)

    def run(x: Gossip) -> None:
        for _ in range(3):  # rollouts of four steps
            for _ in range(4):
                step(x)
            x.after_rollout(x.params)

    together([partial(run, x) for x in c.learners])
    assert c.shared.arrays["mixed"].tolist() == [{0: 3, 1: 12, 3: 4}[mix_every]] * 2
    assert [x.made for x in c.learners] == [12, 12]


def test_moments_are_mixed_with_the_same_weights():
    p = matrices("ring", 3)[0]
    norms = [[Normalizer((2,)), Normalizer(())] for _ in range(3)]
    rng = torch.Generator().manual_seed(0)
    for i, pair in enumerate(norms):
        for norm in pair:
            norm.update(torch.randn(10 + 5 * i, *norm.mean.shape, generator=rng) * (i + 1) + i)
    before = np.stack([Moments(pair).read().numpy() for pair in norms])
    c = crowd(np.eye(3), [p], norms)
    together([partial(step, x) for x in c.learners])
    after = np.stack([Moments(pair).read().numpy() for pair in norms])
    np.testing.assert_allclose(after, p @ before, rtol=1e-9)
    assert [float(pair[0].count) for pair in norms] == [15.0, 12.5, 17.5]
    for _ in range(60):
        c.round()
    expected = before.mean(0)
    np.testing.assert_allclose(float(norms[0][0].count), expected[0], rtol=1e-6)
    np.testing.assert_allclose(norms[1][0].mean.numpy(), expected[1:3] / expected[0], rtol=1e-6)


# --- who waits for whom ---


@pytest.mark.parametrize("topology", ["ring", "exponential", "complete"])
def test_without_a_bound_nobody_ever_waits(topology):
    """Time-out 0: the first wait would raise. The peers never read and never speak; the learner is plain SGD."""
    start = np.random.default_rng(7).standard_normal((4, 20))
    c = crowd(start, matrices(topology, 4), tau=-1, timeout=0.0)
    lone, expected = c.learners[1], c.learners[1].params.data.clone()
    for g in gradients(lone.params, 50):
        step(lone, g, 0.01)
        expected.sub_(g, alpha=0.01)
        assert torch.equal(lone.params.data, expected)
    assert lone.skipped_messages == 49  # the first was told; nobody has read it
    assert c.shared.arrays["told"].tolist() == [0, 1, 0, 0]
    assert c.shared.arrays["mixed"].tolist() == [0, 0, 0, 0]


def test_a_message_is_read_once_and_is_the_last_one_written():
    """A slow peer hears the message that was written when it was free, and the next only after reading that."""
    c = crowd(np.zeros((2, 1)), matrices("ring", 2), tau=-1)
    fast, slow = c.learners
    slow.message[1].zero_()
    for k in range(1, 6):
        fast.params.data[0] = float(k)
        step(fast)
    assert float(c.shared.arrays["message"][0, 0]) == 1.0  # told at its first step, unread since
    slow.params.data[0] = 0.0
    step(slow)
    assert slow.params.data[0] == 0.5  # (0 + 1) / 2
    fast.params.data[0] = 9.0
    step(fast)  # now there is room again
    assert float(c.shared.arrays["message"][0, 0]) == 9.0
    assert c.shared.arrays["told"][0] == 2


def test_tau_two_goes_on_twice_and_blocks_at_the_third_due_mix():
    c = crowd(np.eye(2), matrices("ring", 2), tau=2, timeout=0.05)
    step(c.learners[0])
    step(c.learners[0])
    with pytest.raises(CoterieError, match=r"^gossip: no message from an in-peer for 0\.05 s: it hangs$"):
        step(c.learners[0])
    assert c.learners[0].made == 3


@pytest.mark.parametrize("tau", [1, 2, 5])
def test_a_learner_that_waits_goes_on_when_its_peer_tells(tau):
    c = crowd(np.eye(2), matrices("ring", 2), tau=tau)
    fast, slow = c.learners
    done: list[int] = []

    def run() -> None:
        for k in range(tau + 1 + tau):
            step(fast)
            done.append(k)

    def tell_late() -> None:
        until(lambda: fast.made == tau + 1)
        time.sleep(0.03)
        assert len(done) == tau  # it is in the mix that it may not miss
        step(slow)
        until(lambda: len(done) == 2 * tau + 1)  # and may miss as many again

    together([run, tell_late])
    np.testing.assert_allclose(slow.params.data[:2], [0.5, 0.5])
    np.testing.assert_allclose(fast.params.data[:2], [0.5, 0.5])
    assert c.shared.arrays["mixed"].tolist() == [1, 1]


def test_lockstep_waits_at_once():
    c = crowd(np.eye(3), matrices("ring", 3), tau=0, timeout=0.05)
    with pytest.raises(CoterieError, match="no message from an in-peer"):
        step(c.learners[0])
    with pytest.raises(CoterieError, match="an out-peer has not read"):
        step(c.learners[0])


@pytest.mark.parametrize("tau", [0, 3])
def test_who_waits_stops_waiting_when_the_run_stops(tau):
    c = crowd(np.eye(2), matrices("ring", 2), tau=tau)

    def run() -> None:
        for _ in range(tau + 1):
            step(c.learners[0])

    def stop() -> None:
        until(lambda: c.learners[0].made == tau + 1)
        c.board.stop()

    together([run, stop])


# --- who leaves ---


@pytest.mark.parametrize("tau", [0, -1, 3])
def test_a_learner_that_left_is_out_of_the_average(tau, tmp_path):
    """Its share goes to the others in proportion, and nobody waits for it (the time-out would say so)."""
    path = tmp_path / "p.json"
    path.write_text(json.dumps([[0.5, 0.25, 0.25], [0.4, 0.2, 0.4], [0.3, 0.3, 0.4]]))
    start = np.random.default_rng(8).standard_normal((3, 5))
    c = crowd(start, matrices(str(path), 3), tau=tau, timeout=5.0)
    c.board.here[2] = 0  # died before it said anything
    two = c.learners[:2]
    together([partial(step, x) for x in two])
    if tau:  # in whatever order they came
        together([partial(step, x) for x in two])
        together([partial(step, x) for x in two])
        x = c.weights()[:2]
        hull = np.sort(start[:2], 0)
        assert ((x >= hull[0] - 1e-6) & (x <= hull[1] + 1e-6)).all()
        assert not np.allclose(x, start[:2])
    else:
        p = np.array([[2 / 3, 1 / 3], [2 / 3, 1 / 3]])
        np.testing.assert_allclose(c.weights()[:2], p @ start[:2], atol=1e-6)
    assert np.array_equal(c.weights()[2], start[2].astype(np.float32))


def test_what_a_learner_said_before_it_left_is_heard_and_then_no_more():
    c = crowd(np.eye(3), matrices("complete", 3))
    x, y, left = c.learners
    for each in c.learners:
        assert each._tell(each.params)
    left.__exit__(None, None, None)
    assert c.board.here.tolist() == [1, 1, 0]
    for each in (x, y):
        assert each._hear(each.params)
    np.testing.assert_allclose(c.weights()[:2], np.full((2, 3), 1 / 3), atol=1e-6)
    x.params.data[:3] = torch.tensor([1.0, 0, 0])
    together([partial(step, x), partial(step, y)])
    np.testing.assert_allclose(c.weights()[:2], np.tile([2 / 3, 1 / 6, 1 / 6], (2, 1)), atol=1e-6)


def test_who_speaks_and_leaves_while_it_is_looked_at_is_heard():
    """Its message was not there; then it told, left, and was seen to be gone: what it said counts."""
    c = crowd(np.eye(2), matrices("ring", 2))
    x, leaver = c.learners

    class Here:
        def __getitem__(self, j: int) -> int:
            if c.board.here[j]:
                assert leaver._tell(leaver.params)
                leaver.__exit__(None, None, None)
            return int(c.board.here[j])

    class Watched:
        here = Here()

    x.board = Watched()
    assert x._hear(x.params)
    assert x.params.data[:2].tolist() == [0.5, 0.5]


def test_alone_at_last_weights_stay_as_they_are():
    c = crowd(np.eye(3), matrices("ring", 3), tau=0, timeout=0.0)
    for gone in c.learners[1:]:
        gone.__exit__(None, None, None)
    for _ in range(5):
        step(c.learners[0])
    assert c.learners[0].params.data[:3].tolist() == [1, 0, 0]


@pytest.mark.parametrize("topology", ["ring", "exponential", "complete"])
@pytest.mark.parametrize("tau", [0, 3])
def test_unequal_numbers_of_steps_end(tau, topology):
    """The original hangs here: a learner that is done tells nothing any more, and a slower one reaches its bound."""
    n, counts = 4, [5, 40, 12, 23]
    c = crowd(np.eye(n), matrices(topology, n), tau=tau, timeout=20.0)

    def run(i: int) -> None:
        with c.learners[i] as x:
            for _ in range(counts[i]):
                step(x)

    together([partial(run, i) for i in range(n)])
    assert [x.made for x in c.learners] == counts
    assert c.board.here.tolist() == [0] * n
    np.testing.assert_allclose(c.weights().sum(1), 1, atol=1e-5)
    if tau == 0:
        assert c.shared.arrays["mixed"].tolist() == counts


# --- who comes back ---


def lockstep(learners: Sequence[Gossip], count: int) -> None:
    def run(x: Gossip) -> None:
        for _ in range(count):
            step(x)

    together([partial(run, x) for x in learners])


@pytest.mark.parametrize("topology", ["ring", "exponential", "complete"])
def test_who_comes_back_takes_a_peers_weights_trains_and_then_mixes(topology):
    rng = np.random.default_rng(9)
    norms = [[Normalizer((2,))] for _ in range(3)]
    for i, (norm,) in enumerate(norms):
        norm.update(torch.full((4 + i, 2), float(i)))
    c = crowd(rng.standard_normal((3, 5)), matrices(topology, 3), norms)
    lockstep(c.learners, 4)
    c.board.here[2] = 0
    lockstep(c.learners[:2], 6)
    assert c.shared.arrays["told"].tolist() == [10, 10, 4]
    c.shared.arrays["message"][2] = 1e6  # what it said long ago counts no more
    fresh = Normalizer((2,))
    back = one(c.shared, c.board, c.learners[0].sequence, 2, np.full(5, 100.0), norms=[fresh], rejoin=True)
    assert c.board.here[2] == 0  # not before it is entered
    back.__enter__()
    assert c.board.here[2] == 1
    messages, sums = c.shared.arrays["message"], c.shared.arrays["moments"]
    mine = Moments([fresh]).read().numpy()
    assert any(
        np.array_equal(back.params.data.numpy(), messages[j]) and np.allclose(mine, sums[j], rtol=1e-9) for j in (0, 1)
    )
    for name in ("begun", "told", "mixed", "joined"):  # it has published nothing, at a number nobody has reached
        assert c.shared.arrays[name][2] == 13
    lockstep(c.learners[:2], 3)  # numbers 10 to 12: the others neither wait for it nor hear it
    x = c.weights()[:2]
    assert abs(x).max() < 10
    assert c.shared.arrays["told"].tolist() == [13, 13, 13]
    back.params.grad[:5] = -7.0  # it trains: weights that nobody else has
    expected = c.weights()
    expected[2] = back.params.data[:5].double().numpy() + 7.0
    everybody = [*c.learners[:2], back]
    lockstep(everybody, 1)
    p = c.learners[0].sequence[13 % len(c.learners[0].sequence)]
    after = np.stack([x.params.data[:5].double().numpy() for x in everybody])
    np.testing.assert_allclose(after, p @ expected, atol=1e-5)
    assert c.shared.arrays["told"].tolist() == c.shared.arrays["mixed"].tolist() == [14, 14, 14]
    assert c.shared.arrays["moved"][2, 13] == pytest.approx(5 * 7.0**2, rel=1e-5)  # from the peer's weights
    lockstep(everybody, 40)
    after = np.stack([x.params.data[:5].double().numpy() for x in everybody])
    assert distance(after) < 1e-4


@pytest.mark.parametrize("tau", [-1, 2])
def test_coming_back_while_nobody_is_in_step(tau):
    """Free-running threads, one dies in the middle and comes back: all go on until it has mixed, and all agree."""
    n = 3
    c = crowd(np.eye(n), matrices("ring", n), tau=tau, timeout=20.0)
    mixed, joined, again = c.shared.arrays["mixed"], c.shared.arrays["joined"], []

    def run(x: Gossip) -> None:
        with x:
            while mixed[1] < joined[1] + 40 or not joined[1]:
                step(x)
                time.sleep(1e-4)

    def dies_and_returns() -> None:
        for _ in range(20):
            step(c.learners[1])
            time.sleep(1e-4)
        c.board.here[1] = 0  # as the supervisor does for one that was killed
        time.sleep(0.01)
        again.append(one(c.shared, c.board, c.learners[0].sequence, 1, np.zeros(n), tau=tau, rejoin=True))
        run(again[0])

    together([partial(run, c.learners[0]), partial(run, c.learners[2]), dies_and_returns])
    x = np.stack([y.params.data[:n].double().numpy() for y in (c.learners[0], again[0], c.learners[2])])
    np.testing.assert_allclose(x.sum(1), 1, atol=1e-4)
    assert (x >= 0).all()
    assert distance(x) < 0.01


def test_the_newest_complete_message_is_taken(monkeypatch):
    c = crowd(np.diag([1.0, 2, 3, 4]), matrices("ring", 4), tau=-1)
    arrays = c.shared.arrays
    for j, told in enumerate([5, 9, 7, 0]):
        arrays["told"][j] = arrays["begun"][j] = told
        arrays["message"][j, :4] = 10 * (j + 1)
    c.board.here[3] = 0
    arrays["begun"][1] += 1  # the newest is half written, and its writer died without anybody knowing
    monkeypatch.setattr("coterie.exchange.gossip.time.sleep", lambda seconds: None)
    back = one(c.shared, c.board, matrices("ring", 4), 3, np.zeros(4), tau=-1, rejoin=True)
    back.__enter__()
    assert back.params.data[:4].tolist() == [30.0] * 4  # learner 2's
    assert arrays["joined"][3] == 12


def test_coming_back_to_nobody_keeps_the_weights():
    c = crowd(np.eye(2), matrices("ring", 2), timeout=0.0)
    c.board.here[:] = 0
    back = one(c.shared, c.board, matrices("ring", 2), 0, np.array([5.0, 6.0]), timeout=0.0, rejoin=True)
    back.__enter__()
    step(back)
    assert back.params.data[:2].tolist() == [5, 6]


# --- what never leaves a learner ---


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("tau", [0, -1])
def test_weights_that_are_not_finite_are_never_told(tau, bad):
    c = crowd(np.eye(2), matrices("ring", 2), tau=tau, timeout=1.0)
    together([partial(step, x) for x in c.learners])
    if tau:
        together([partial(step, x) for x in c.learners])
    sick, well = c.learners
    told, message = c.shared.arrays["told"].copy(), c.shared.arrays["message"].copy()
    while c.shared.arrays["mixed"][1] < told[0]:  # so that there is room for a message
        step(well)
        told[1] = c.shared.arrays["told"][1]
        message[1] = c.shared.arrays["message"][1]
    sick.params.data[1] = bad
    with pytest.raises(NonFinite, match=r"^the weights of w0 are not finite$"):
        step(sick)
    assert c.shared.arrays["told"].tolist() == told.tolist()
    assert np.array_equal(c.shared.arrays["message"], message)
    assert c.shared.arrays["begun"].tolist() == told.tolist()
    assert np.isfinite(c.weights()[1]).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(bad):
    c = crowd(np.eye(2), matrices("ring", 2), tau=-1, rule=RMSProp(0.9, 1e-5), skip=True)
    x = c.learners[0]
    step(x, gradients(x.params, 1)[0], 0.1)
    weights, square = x.params.data.clone(), x.state["square"].clone()
    assert x.params.data[0] != 1  # a good one does
    x.params.grad[1] = bad
    x.step(x.params, 0.1)
    assert torch.equal(x.params.data, weights)
    assert torch.equal(x.state["square"], square)
    assert not x.params.grad.any()
    assert x.guard.skipped == 1


def test_a_gradient_that_is_not_finite_stops_where_asked_and_tells_nothing():
    c = crowd(np.eye(2), matrices("ring", 2), tau=0, timeout=0.0)
    x = c.learners[0]
    x.params.grad[0] = math.nan
    with pytest.raises(NonFinite, match="the gradient of w0 is not finite"):
        x.step(x.params, 0.1)
    assert x.params.data[:2].tolist() == [1, 0]
    assert c.shared.arrays["told"].tolist() == [0, 0]


# --- how far learners may be apart ---


@pytest.mark.parametrize("topology", ["ring", "exponential", "file"])
@pytest.mark.parametrize(("rule", "steps"), [("sgd", 1), ("rmsprop", 1), ("sgd", 3)])
def test_proposition_1_bounds_the_distance_to_the_mean(topology, rule, steps, tmp_path):
    """b_{k+1} = beta (b_k + ||U_k||_F), with the lengths that the learners wrote down; noisy gradients of a quadratic.

    `steps` updates between two mixes count as one.
    """
    n, size, count = 4, 30, 60
    if topology == "file":
        path = tmp_path / "p.json"
        path.write_text(json.dumps([[0.6, 0.4, 0, 0], [0.1, 0.5, 0.4, 0], [0, 0.2, 0.6, 0.2], [0.3, 0, 0.2, 0.5]]))
        topology = str(path)
    sequence = matrices(topology, n)
    rng = np.random.default_rng(10)
    goals, noise = rng.standard_normal((n, size)) * 3, rng.standard_normal((count, steps, n, size)) * 2
    c = crowd(np.tile(rng.standard_normal(size), (n, 1)), sequence, mix_every=0)  # all begin alike
    history: list[list[Array]] = [[] for _ in range(n)]
    lengths: list[list[float]] = [[] for _ in range(n)]
    if rule == "rmsprop":
        for x in c.learners:
            x.rule = RMSProp(0.9, 1e-3)
            x.state = x.rule.state(x.params.data)

    def run(i: int) -> None:
        x = c.learners[i]
        for k in range(count):
            here = x.params.data[:size].clone()
            for noises in noise[k]:
                x.params.grad[:size] = x.params.data[:size] - torch.as_tensor(goals[i] + noises[i], dtype=torch.float32)
                x.step(x.params, 0.05)
            lengths[i].append(float((x.params.data[:size] - here).double().norm()))
            x.after_rollout(x.params)
            history[i].append(x.params.data[:size].double().numpy())

    together([partial(run, i) for i in range(n)])
    moved = c.shared.arrays["moved"][:, :count]
    np.testing.assert_allclose(np.sqrt(moved), lengths, rtol=1e-4)
    assert not c.shared.arrays["moved"][:, count:].any()
    bound, largest = 0.0, 0.0
    for k in range(count):
        bound = contraction([sequence[k % len(sequence)]]) * (bound + math.sqrt(moved[:, k].sum()))
        apart = distance(np.stack([h[k] for h in history]))
        assert apart <= bound * (1 + 1e-5)
        largest = max(largest, apart / bound)
    assert largest > 0.1  # no bound that anything would keep
    alone = distance(goals) * (1 - 0.95 ** (count * steps))  # where they would be without mixing, but for the noise
    assert rule == "rmsprop" or alone > 3 * apart


def test_lengths_are_kept_for_the_last_mixes_only():
    c = crowd(np.eye(2), matrices("ring", 2))
    for x in c.learners:
        for name in ("begun", "told", "mixed"):
            c.shared.arrays[name][x.rank] = RECENT - 1
    for value in (3.0, 4.0):
        for x in c.learners:
            x.params.grad[x.rank] = value
        together([partial(x.step, x.params, 1.0) for x in c.learners])
    assert c.shared.arrays["moved"][:, RECENT - 1].tolist() == [9, 9]
    assert c.shared.arrays["moved"][:, 0].tolist() == [16, 16]
    assert c.shared.arrays["mixed"].tolist() == [RECENT + 1] * 2
