"""Running mean and deviation of an input, which an absurd number does not spoil."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from coterie.models.heads import Moments, Normalizer


def test_normalizer_agrees_with_numpy_whatever_the_batches():
    rng = np.random.default_rng(0)
    x = rng.normal(3, 5, (1000, 4)).astype(np.float32)
    norm = Normalizer((4,))
    assert torch.equal(norm(torch.ones(1, 4)), torch.ones(1, 4))  # knows nothing yet: leaves as is
    for part in np.split(x, [1, 10, 400]):
        norm.update(torch.from_numpy(part))
    norm.update(torch.zeros(0, 4))
    np.testing.assert_allclose(norm.mean.numpy(), x.mean(0), rtol=1e-5)
    np.testing.assert_allclose(norm.deviation.numpy(), x.std(0), rtol=1e-5)
    got = norm(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(got, np.clip((x - x.mean(0)) / x.std(0), -10, 10), atol=1e-4)


def test_a_copy_that_takes_over_what_was_seen_normalizes_as_the_original():
    norm, rows = Normalizer((4,)), torch.randn(100, 4) * 3 + 1
    loaded, written = copy.deepcopy(norm), Normalizer((4,))
    norm.update(rows)
    loaded.load_state_dict(norm.state_dict())
    Moments([written]).write(Moments([norm]).read())
    assert set(norm.state_dict()) == {"mean", "m2", "count"}
    torch.testing.assert_close(norm(rows).std(0, correction=0), torch.ones(4))
    assert torch.equal(loaded(rows), norm(rows))
    torch.testing.assert_close(written(rows), norm(rows))


@pytest.mark.parametrize("bad", [1e6, 1e15, 1e30])
@pytest.mark.parametrize("rows", [0, 512, 1_000_000])
def test_one_absurd_number_does_not_blind_a_normalizer(bad: float, rows: int) -> None:
    norm, rng = Normalizer((4,)), torch.Generator().manual_seed(0)

    def sample(count: int) -> torch.Tensor:
        return torch.randn(count, 4, generator=rng)

    if rows:
        norm.update(sample(rows))
    batch = sample(512)
    batch[7, 0] = bad
    norm.update(batch)
    for _ in range(10):
        norm.update(sample(100_000))
    spread = norm(sample(10_000)).std(0)
    assert spread[0] > 0.25
    torch.testing.assert_close(spread[1:], torch.ones(3), rtol=0.03, atol=0)


@pytest.mark.parametrize("bad", [1e6, -1e30])
@pytest.mark.parametrize("first", [0, 5])
def test_one_absurd_number_in_the_first_rollouts_is_forgotten(bad: float, first: int) -> None:
    norm, without, rng = Normalizer((4,)), Normalizer((4,)), torch.Generator().manual_seed(0)
    for number in range(40):
        batch = 3 + 5 * torch.randn(128, 4, generator=rng)
        without.update(batch)
        batch[7, 0] = bad if number == first else batch[7, 0]
        norm.update(batch)
    assert (norm.outliers, without.outliers) == (1, 0)
    torch.testing.assert_close(norm.deviation, without.deviation, rtol=0.02, atol=0)
    assert float(((norm.mean - without.mean) / without.deviation).abs().max()) < 0.01


@pytest.mark.parametrize("bad", [1e8, 1e30])
@pytest.mark.parametrize("share", [0.005, 0.06, 0.2])
def test_absurd_numbers_that_come_again_and_again_do_not_blind_a_normalizer(bad: float, share: float) -> None:
    norm, without, rng, rows = Normalizer((2,)), Normalizer((2,)), torch.Generator().manual_seed(0), 0
    for _ in range(200):
        batch = 3 + 5 * torch.randn(512, 2, generator=rng)
        without.update(batch)
        absurd = torch.rand(512, generator=rng) < share
        batch[absurd, 0], rows = bad, rows + int(absurd.sum())
        norm.update(batch)
    assert (norm.outliers, without.outliers) == (rows, 0)
    torch.testing.assert_close(norm.mean, without.mean, rtol=0.02, atol=0)
    assert float((norm.deviation / without.deviation).log().abs().max()) < 0.15  # those rows count as the mean


@pytest.mark.parametrize("rows", [1, 2, 4, 64])
def test_a_normalizer_follows_an_input_that_moves_far_for_good(rows: int) -> None:
    norm, rng = Normalizer(()), torch.Generator().manual_seed(0)
    for k in range(4000):
        norm.update((1e9 if k > 100 else 0.0) + 1e6 * torch.randn(rows, generator=rng, dtype=torch.float64))
    assert float(norm.mean) == pytest.approx(1e9, rel=0.1)


def test_what_is_only_rare_is_counted_as_it_is_in_time() -> None:
    norm, rng = Normalizer(()), torch.Generator().manual_seed(0)
    for _ in range(2000):
        norm.update((torch.rand(64, generator=rng) < 0.01).double())
    assert float(norm.mean) == pytest.approx(0.01, rel=0.2)
    assert float(norm.deviation) == pytest.approx(0.1, rel=0.1)


def test_a_normalizer_follows_an_input_that_begins_to_move() -> None:
    norm = Normalizer((1,))
    norm.update(torch.full((20_000, 1), 3.0))
    for _ in range(50):
        norm.update(torch.where(torch.rand(1000, 1) < 0.1, 10.0, 3.0))
    assert float(norm.deviation) == pytest.approx((0.072 * 0.928) ** 0.5 * 7, rel=0.1)
