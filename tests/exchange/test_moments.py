"""A normalizer's statistics as sums: there and back, added up, averaged, and shared between learners."""

from __future__ import annotations

import torch

from coterie.exchange.shared_weights import SharedWeights, shared_memory_for
from coterie.models.heads import Moments, Normalizer
from coterie.ops.optim import RMSProp

SHAPES = [(3,), (), (2, 4)]


def normalizer_set() -> list[Normalizer]:
    return [Normalizer(shape) for shape in SHAPES]


def rows(count: int, seed: int) -> list[torch.Tensor]:
    """Rows for each normalizer, far from zero and of several scales."""
    rng = torch.Generator().manual_seed(seed)
    scales = [10.0, 1e-3, 500.0]
    return [torch.randn(count, *shape, generator=rng) * s + 3 * s for shape, s in zip(SHAPES, scales, strict=True)]


def feed(norms: list[Normalizer], count: int, seed: int) -> None:
    for norm, x in zip(norms, rows(count, seed), strict=True):
        norm.update(x)


def assert_same(a: list[Normalizer], b: list[Normalizer]) -> None:
    for x, y in zip(a, b, strict=True):
        for name in ("count", "mean", "m2"):
            torch.testing.assert_close(getattr(x, name), getattr(y, name), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(x.deviation(), y.deviation(), rtol=1e-6, atol=0)


def test_moments_are_the_sums_of_the_rows():
    norms = normalizer_set()
    feed(norms, 30, 1)
    sums, at = Moments(norms).read(), 0
    for x in rows(30, 1):
        x = x.double().reshape(30, -1)
        expected = torch.cat([torch.tensor([30.0], dtype=torch.float64), x.sum(0), (x * x).sum(0)])
        torch.testing.assert_close(sums[at : at + len(expected)], expected, rtol=1e-9, atol=1e-12)
        at += len(expected)
    assert at == len(sums)


def test_two_sums_are_one_that_saw_all_rows():
    a, b, both, out = (normalizer_set() for _ in range(4))
    feed(a, 40, 1)
    feed(b, 7, 2)
    feed(both, 40, 1)
    feed(both, 7, 2)
    Moments(out).write(Moments(a).read() + Moments(b).read())
    assert_same(out, both)


def test_learners_share_rows_through_the_centre():
    """Whatever the order, each ends with the rows of all, counted once."""
    sets = [normalizer_set() for _ in range(3)]
    shared = shared_memory_for(torch.zeros(16), RMSProp(0.9, 1e-5), 1, Moments(sets[0]).read())
    views = [SharedWeights(shared, Moments(s), 1, 5.0) for s in sets]
    everything = normalizer_set()
    for seed, who in enumerate([0, 1, 1, 2, 0, 2, 2, 1, 0]):
        feed(sets[who], 4 + seed, seed)
        feed(everything, 4 + seed, seed)
        views[who].share_moments()
        assert_same(sets[who], everything)  # at once the rows of all
    for view in views:
        view.share_moments()  # nothing new: nothing is counted twice
    for s in sets:
        assert_same(s, everything)
    for view in views:
        view.close()
    shared.close()
