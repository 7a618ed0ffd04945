"""The versioned weights: a reader gets whole weights, whatever the writer does meanwhile, and also if it died."""

from __future__ import annotations

import time

import pytest
import torch

from coterie.parallel.processes import Post
from coterie.parallel.weights import Weights
from coterie.types import CoterieError
from tests.exchange.harness import start

SIZE = 300_000


def flip(post: Post, weights: Weights, seconds: float) -> None:
    """A child. All weights are `version % 2` at any time."""
    version, end = 0, time.monotonic() + seconds
    ones = [torch.full((SIZE,), float(x)) for x in range(2)]
    sums = [torch.full((3,), float(x), dtype=torch.float64) for x in range(2)]
    while time.monotonic() < end:
        weights.publish(ones[version % 2], sums[version % 2], version)
        version += 1


def test_readers_never_see_torn_weights():
    weights = Weights(SIZE, 3)
    writer = start(flip, weights, 2.0)
    mine, sums = torch.empty(SIZE), torch.empty(3, dtype=torch.float64)
    versions = []
    try:
        while writer.process.is_alive():
            versions.append(weights.read(mine, sums))
            assert float(mine.min()) == float(mine.max()) == versions[-1] % 2
            assert float(sums.min()) == float(sums.max()) == versions[-1] % 2
    finally:
        writer.kill()
    assert versions == sorted(versions)
    assert len(set(versions)) > 20
    weights.close()


def test_a_writer_that_died_half_way_leaves_the_last_whole_weights():
    weights = Weights(8, 0)
    out, none = torch.empty(8), torch.empty(0, dtype=torch.float64)
    assert weights.version == -1
    weights.publish(torch.ones(8), none, 5)
    weights._writes[1 - int(weights._newest[0])] += 1  # as if killed while it wrote the other copy
    assert weights.read(out, none) == 5
    assert (out == 1).all()
    weights.publish(torch.full((8,), 2.0), none, 6)  # its successor writes there
    assert weights.read(out, none) == weights.version == 6
    assert (out == 2).all()


def test_nothing_published_is_an_error_with_a_reason():
    weights, none = Weights(8, 0), torch.empty(0, dtype=torch.float64)
    with pytest.raises(CoterieError, match=r"no whole weights were published for 0\.01 s"):
        weights.read(torch.empty(8), none, timeout=0.01)
