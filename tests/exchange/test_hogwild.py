"""Lock-free shared weights: whose gradient is applied, whose statistics are used, and what is never written."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from coterie.exchange.base import Peers
from coterie.exchange.hogwild import Hogwild
from coterie.exchange.shared_weights import restore, shared_memory_for
from coterie.models.heads import Normalizer
from coterie.ops.optim import Adam, RMSProp
from coterie.parallel.board import Board
from coterie.parallel.params import FlatParams
from coterie.parallel.shm import SharedArrays
from tests.exchange.harness import Sgd, flat, gradients, make_setup

NOTHING = torch.zeros(0, dtype=torch.float64)


def worker(
    shared: SharedArrays, params: FlatParams, rule: object, *, rank: int = 0, own: bool = False, clip: float = 0.0,
    skip: bool = False, norms: tuple[Normalizer, ...] = (),
) -> Hogwild:  # fmt: skip
    peers, statistics = Peers(rank, Board(4), shared), "own" if own else "shared"
    return Hogwild(
        make_setup(params, rule, clip=clip, skip=skip, norms=norms, peers=peers, hogwild__statistics=statistics)
    )


def apply(exchange: Hogwild, params: FlatParams, grad: Tensor, lr: float = 1e-2) -> float:
    params.grad.copy_(grad)
    norm = exchange.step(params, lr)
    assert not params.grad.any()
    return norm


def test_each_step_applies_the_latest_gradient_of_its_own_worker_and_no_other():
    """The trap of shared `.grad`: two models whose backward passes add to gradients that were not cleared.

    All numbers have few bits, so every sum is exact: the centre is what it was minus every gradient, each once.
    """
    nets = [nn.Linear(8, 1, bias=False) for _ in range(2)]
    both = [FlatParams(net) for net in nets]
    both[1].data.copy_(both[0].data.zero_())
    shared = shared_memory_for(both[0].data, Sgd(), 1, NOTHING)
    exchanges = [worker(shared, p, Sgd(), rank=r) for r, p in enumerate(both)]
    rng, total = np.random.default_rng(0), torch.zeros(8)
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
        assert torch.equal(exchanges[0].shared.data[:8], -total)
        assert nets[who].weight.grad.data_ptr() == both[who].grad.data_ptr()  # still a view, and a cleared one
        assert not both[who].grad.any()
    assert total.any()


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("make", [lambda: RMSProp(0.9, 1e-3), lambda: Adam(0.8, 0.95, 1e-3)])
def test_statistics_are_of_all_or_each_workers_own(make, own):
    both = [flat(40, 9), flat(40, 9)]
    plain = both[0].data.clone()
    shared = shared_memory_for(plain, make(), 1, NOTHING)
    exchanges = [worker(shared, p, make(), rank=r, own=own) for r, p in enumerate(both)]
    rule = make()
    states = [rule.state(plain), rule.state(plain)] if own else [rule.state(plain)] * 2
    for k, grad in enumerate(gradients(both[0], 30)):
        who = [0, 1, 1][k % 3]
        rule.update(plain, grad * (who + 1), states[who], 1e-2)
        apply(exchanges[who], both[who], grad * (who + 1))
        torch.testing.assert_close(exchanges[0].shared.data, plain, rtol=0, atol=1e-6)
        assert torch.equal(both[who].data, exchanges[0].shared.data)
    for exchange, state in zip(exchanges, states, strict=True):
        for name, x in exchange.state_dict().items():
            torch.testing.assert_close(x.reshape(state[name].shape), state[name], rtol=1e-5, atol=1e-7)
    square = [exchange.state_dict()["square"] for exchange in exchanges]
    assert torch.equal(*square) != own
    assert bool(shared.arrays["state/square"].any()) != own


def test_a_snapshot_stays_what_it_was_until_the_next():
    both = [flat(40), flat(40)]
    shared = shared_memory_for(both[0].data, Sgd(), 1, NOTHING)
    one, two = (worker(shared, p, Sgd(), rank=r) for r, p in enumerate(both))
    one.pull(both[0])
    snapshot = both[0].data.clone()
    ones = torch.ones_like(snapshot)
    for _ in range(3):
        apply(two, both[1], ones, 1.0)
    assert torch.equal(both[0].data, snapshot)
    assert torch.equal(one.shared.data, snapshot - 1 - 1 - 1)
    apply(one, both[0], ones, 1.0)  # on the shared weights, not on the snapshot
    assert torch.equal(one.shared.data, snapshot - 1 - 1 - 1 - 1)
    assert torch.equal(both[0].data, one.shared.data)
    apply(two, both[1], ones, 1.0)
    one.pull(both[0])
    assert torch.equal(both[0].data, two.shared.data)
    both[0].data.fill_(7.0)  # whatever is done to a snapshot stays local
    assert not (two.shared.data == 7).any()


@pytest.mark.parametrize("own", [False, True])
def test_a_saved_state_goes_on_as_if_nothing_had_happened(own):
    rule, params = Adam(0.8, 0.95, 1e-3), flat(40)
    grads = gradients(params, 8)
    shared = shared_memory_for(params.data, rule, 1, NOTHING)
    exchange = worker(shared, params, rule, own=own)
    for grad in grads[:4]:
        apply(exchange, params, grad)
    saved, weights = exchange.state_dict(), params.data.clone()
    for grad in grads[4:]:
        apply(exchange, params, grad)
    again = flat(40, seed=3)
    again.data.copy_(weights)
    second = shared_memory_for(again.data, rule, 1, NOTHING)
    restore(second, saved, NOTHING)
    resumed = worker(second, again, rule, own=own)
    resumed.load_state_dict(saved)
    for grad in grads[4:]:
        apply(resumed, again, grad)
    assert torch.equal(again.data, params.data)
