"""The choice of bf16: measured once per machine, and not again."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from coterie.build import precision
from coterie.build.precision import Bf16, bf16_pays, measure


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "coterie" / "bf16.json"


def choose(monkeypatch: pytest.MonkeyPatch, found: Bf16) -> tuple[bool, int]:
    """What a process chooses that would measure `found`, and how often it measured."""
    calls: list[str] = []
    monkeypatch.setattr(precision, "measure", lambda device: calls.append(device) or found)
    precision._kept.cache_clear()
    return bf16_pays("cpu"), len(calls)


def test_both_precisions_are_measured_on_one_thread_without_touching_random_numbers():
    torch.manual_seed(1)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    found = measure("cpu")
    assert 0.01 < found.speed < 100
    assert 0 < found.error < precision.ROUNDING
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(
    ("speed", "error", "pays"), [(1.5, 0.01, True), (1.05, 0.01, False), (0.3, 0.01, False), (1.5, 0.2, False)]
)
def test_bf16_is_taken_where_it_is_faster_and_right(cache, monkeypatch, speed, error, pays):
    assert choose(monkeypatch, Bf16(speed, error)) == (pays, 1)


def test_a_measurement_is_kept_for_later_processes_until_the_machine_is_another(cache, monkeypatch):
    assert choose(monkeypatch, Bf16(1.5, 0.01)) == (True, 1)
    assert choose(monkeypatch, Bf16(0.5, 0.01)) == (True, 0)
    kept = json.loads(cache.read_text())
    cache.write_text(json.dumps({**kept, "machine": {"processor": "another"}}))
    assert choose(monkeypatch, Bf16(0.5, 0.01)) == (False, 1)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"machine": 1, "speed"', "null"])
def test_a_spoiled_file_is_measured_again(cache, monkeypatch, text):
    cache.parent.mkdir()
    cache.write_text(text)
    assert choose(monkeypatch, Bf16(1.5, 0.01)) == (True, 1)
    assert choose(monkeypatch, Bf16(0.5, 0.01)) == (True, 0)


def test_a_cache_folder_that_cannot_be_made_costs_a_measurement_only(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(blocked))
    assert choose(monkeypatch, Bf16(1.5, 0.01)) == (True, 1)
    assert choose(monkeypatch, Bf16(0.5, 0.01)) == (False, 1)
