"""The versioned weights: a reader gets whole weights, whatever the writer does meanwhile, and also if it died."""

from __future__ import annotations

import pytest
import torch

from coterie.errors import CoterieError
from coterie.parallel.weights import Weights
from coterie.types import Post
from tests.exchange.harness import start

SIZE = 300_000


def publish(weights: Weights, version: int) -> None:
    """All weights and moments are `version % 2` at any time."""
    odd = float(version % 2)
    weights.publish(torch.full((SIZE,), odd), torch.full((3,), odd, dtype=torch.float64), version)


def publish_for_ever(post: Post, weights: Weights) -> None:
    """A child, which is killed in the middle of a copy, most of the time."""
    for version in range(weights.version + 1, 10**9):
        publish(weights, version)


def test_readers_never_see_torn_weights_also_after_their_writers_were_killed():
    weights, mine, sums = Weights(SIZE, 3), torch.empty(SIZE), torch.empty(3, dtype=torch.float64)
    versions = [-1]

    def read() -> None:
        versions.append(weights.read(mine, sums))
        assert float(mine.min()) == float(mine.max()) == versions[-1] % 2
        assert float(sums.min()) == float(sums.max()) == versions[-1] % 2

    for _ in range(4):
        writer, goal = start(publish_for_ever, weights), len(set(versions)) + 10
        try:
            while len(set(versions)) < goal:
                read()
        finally:
            writer.kill()
        read()
        publish(weights, versions[-1] + 1)  # its successor
        read()
        assert weights.version == versions[-1]
    assert versions == sorted(versions)
    weights.release()


def test_the_last_two_versions_can_be_read():
    weights, mine, sums = Weights(SIZE, 3), torch.empty(SIZE), torch.empty(3, dtype=torch.float64)
    assert not weights.read_version(0, mine, sums)
    for version in range(3):
        publish(weights, version)
    for version in (1, 2):
        assert weights.read_version(version, mine, sums)
        assert float(mine.min()) == float(sums.max()) == version % 2
    assert not weights.read_version(0, mine, sums)
    weights.release()


def test_nothing_published_is_an_error_with_a_reason():
    weights, none = Weights(8, 0), torch.empty(0, dtype=torch.float64)
    with pytest.raises(CoterieError, match=r"no weights were published for 0\.01 s"):
        weights.read(torch.empty(8), none, timeout=0.01)
