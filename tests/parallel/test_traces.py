"""What TorchScript records of a function, and what stays a plain call."""

from __future__ import annotations

import pytest
import torch

from coterie.parallel.graphs import Graphed, recordable
from coterie.parallel.traces import trace


def calls(function, *inputs):
    """The results of the call that records, and of one with other numbers."""
    first, run = trace(function, list(inputs), [])
    return first, run and run([x + 1 for x in inputs])


def test_memory_that_stays_is_read_and_written_in_place():
    weight, total = torch.tensor([2.0, 3.0]), torch.zeros(2)

    def function(tensors):
        product = tensors[0] * weight
        total.add_(product)
        return [product]

    x = torch.ones(2)
    _, run = trace(function, [x], [])
    assert total.tolist() == [2, 3]  # recording is one call
    weight.mul_(2)
    assert run([x])[0].tolist() == [4, 6]
    assert total.tolist() == [6, 9]


def test_a_backward_pass_is_recorded():
    weight = torch.tensor([1.0, 2.0], requires_grad=True)
    weight.grad = torch.zeros(2)

    def function(tensors):
        loss = (tensors[0] * weight).tanh().log_softmax(-1)[0]  # both keep their results for the backward pass
        loss.backward()
        return [loss.detach()]

    x, y = torch.tensor([0.3, -0.2]), torch.tensor([-0.1, 0.4])
    _, run = trace(function, [x], [])
    weight.grad.zero_()
    found, grad = run([y]), weight.grad.clone()
    weight.grad.zero_()
    assert torch.equal(function([y])[0], found[0])
    assert torch.equal(weight.grad, grad)


def test_random_numbers_go_on_where_the_recording_ends():
    rngs = [torch.Generator().manual_seed(1) for _ in range(2)]

    def function(tensors, rng=rngs[0]):
        return [tensors[0] + torch.rand(3, generator=rng)]

    x = torch.zeros(3)
    first, run = trace(function, [x], rngs[:1])
    for found in (first, run([x]), run([x])):
        assert torch.equal(found[0], function([x], rngs[1])[0])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * float(x.sum()),
        lambda x: x * x.tolist()[0],
        lambda x: torch.from_numpy(x.numpy() * 2),
        lambda x: x[x > 1.5].sum() / max(1, len(x[x > 1.5])),
        lambda x: x.unique(),
        lambda x: x.view(torch.int32),  # TorchScript cannot trace its argument
    ],
    ids=["float", "tolist", "numpy", "mask", "unique", "dtype"],
)
def test_what_cannot_be_recorded_stays_a_plain_call(function):
    graphed = Graphed(recordable(lambda x: (function(x), x.shape[0])), trace)
    for i in range(6):
        x = torch.tensor([1.0, 2.0]) + i
        found, length = graphed(x)
        assert torch.equal(found, function(x))
        assert length == 2
    assert graphed.record is None


def fresh(x):
    total = torch.tensor(0.0)
    total += x.sum()
    return total


@pytest.mark.parametrize(
    "function",
    [
        fresh,
        lambda x: x.expand(2, -1).unbind(0)[1] * 2,
        lambda x: x[torch.tensor([1, 0])],
        lambda x: x.flatten() * 2,
        lambda x: torch.zeros(3),
    ],
    ids=["fresh", "unbind", "index", "flatten", "constant"],
)
def test_recorded_calls_are_the_plain_ones(function):
    graphed = Graphed(recordable(function), trace)
    for i in range(6):
        x = torch.arange(6.0).view(2, 3) * i
        x = x if i % 2 else x.T.contiguous().T  # other strides
        found = graphed(x)
        assert torch.equal(found, function(x))
        found.add_(1)  # what a caller does with a result is its own affair
    assert graphed.recordings


def test_results_may_be_the_arguments():
    first, second = calls(lambda tensors: [tensors[1], tensors[0]], torch.zeros(2), torch.ones(3))
    assert [x.tolist() for x in first] == [[1, 1, 1], [0, 0]]
    assert [x.tolist() for x in second] == [[2, 2, 2], [1, 1]]
