"""The choice of bf16: measured once per machine, and not again."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from coterie.build import precision
from coterie.build.precision import Bf16, bf16_pays, measure
from coterie.models.torsos import Torso

Choose = Callable[..., tuple[bool, int]]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "coterie"


@pytest.fixture
def choose(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Choose]:
    """What a new process chooses that would measure this, and how often it measured."""

    def make(speed: float, error: float = 0.01) -> tuple[bool, int]:
        calls: list[str] = []
        monkeypatch.setattr(precision, "measure", lambda device: calls.append(device) or Bf16(speed, error))
        precision._kept.cache_clear()
        return bf16_pays("cpu"), len(calls)

    yield make
    precision._kept.cache_clear()


def test_both_precisions_are_measured_on_one_thread_without_touching_random_numbers():
    torch.manual_seed(1)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    found = measure("cpu")
    assert 0.01 < found.speed < 100
    avx2 = torch.backends.cpu.get_cpu_capability() == "AVX2"  # there torch adds up weight gradients in bf16
    assert 0 < found.error < (2 if avx2 else 1) * precision.ROUNDING
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads


def test_a_kernel_that_makes_a_nan_is_not_right(monkeypatch):
    right = Torso.forward

    def broken(self: Torso, x: torch.Tensor) -> torch.Tensor:
        y = right(self, x)
        return torch.where(torch.arange(y.shape[1]) == 3, torch.nan, y) if y.dtype == torch.bfloat16 else y

    monkeypatch.setattr(Torso, "forward", broken)
    assert not measure("cpu").error < precision.ROUNDING


@pytest.mark.parametrize(
    ("speed", "error", "pays"), [(1.5, 0.01, True), (1.05, 0.01, False), (0.3, 0.01, False), (1.5, 0.2, False)]
)
def test_bf16_is_taken_where_it_is_faster_and_right(choose, speed, error, pays):
    assert choose(speed, error) == (pays, 1)


def test_a_measurement_is_kept_for_later_processes_until_the_machine_is_another(choose, cache, monkeypatch):
    assert choose(1.5) == (True, 1)
    assert choose(0.5) == (True, 0)
    monkeypatch.setattr(precision, "_instructions", lambda: {"another"})
    assert choose(0.5) == (False, 1)
    assert len(list(cache.iterdir())) == 2  # machines that share a home folder do not disturb each other


def test_of_two_processes_that_measure_at_once_the_first_decides(choose, monkeypatch):
    link = os.link

    def late(draft: str, path: Path) -> None:
        path.write_text('{"speed": 1.5, "error": 0.01}')
        link(draft, path)

    monkeypatch.setattr(os, "link", late)
    assert choose(0.5) == (True, 1)


@pytest.mark.parametrize("flag", ["amx_bf16", "sse2"])
@pytest.mark.parametrize("text", [None, "", "[]", "{}", '{"speed": 1.5', "null"])
def test_without_a_cache_folder_or_with_a_damaged_file_all_go_by_the_instructions(
    choose, cache, monkeypatch, text, flag
):
    monkeypatch.setattr(precision, "_instructions", lambda: {flag})
    if text is None:
        cache.touch()  # a file in the place of the folder
    else:
        assert choose(1.5) == (True, 1)
        (kept,) = cache.iterdir()
        kept.write_text(text)
    assert choose(1.5) == (flag == "amx_bf16", 0)


def test_without_a_home_folder_nothing_is_made_in_the_working_folder(choose, tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.chdir(tmp_path)

    def none() -> Path:
        raise RuntimeError("no home")

    monkeypatch.setattr(Path, "home", none)
    assert choose(1.5)[1] == 0
    assert not list(tmp_path.iterdir())
