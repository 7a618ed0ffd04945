"""What malloc does with freed memory, seen by the pages that a process must get anew."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

from coterie.parallel import affinity

STEP = """
import resource
import torch
from coterie.parallel.affinity import keep_freed_memory
torch.set_num_threads(1)
if {keep}:
    keep_freed_memory()

def step():
    kept = [torch.ones(8 << 20, dtype=torch.uint8) for _ in range(10)]

for _ in range(5):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    step()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 20)
"""


def faults(keep: bool) -> float:
    """Page faults of one step. The threshold is held at malloc's first one: left to grow, it sometimes spares them."""
    code, env = STEP.format(keep=keep), os.environ | {"MALLOC_MMAP_THRESHOLD_": str(128 << 10)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    return float(done.stdout)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="not glibc")
def test_the_next_step_gets_the_pages_of_the_last_one():
    plain, kept = faults(keep=False), faults(keep=True)
    assert plain >= 40  # 10 blocks of 2,048 pages, or of 4 huge ones
    assert kept < plain / 4


def test_where_malloc_is_another_nothing_happens(monkeypatch):
    monkeypatch.setattr(affinity.ctypes, "CDLL", lambda name: object())
    affinity.keep_freed_memory()


def test_nothing_is_changed_by_halves(monkeypatch):
    """Where the first setting is refused, the second alone would fix a threshold that is too low."""
    calls: list[int] = []

    class Glibc:
        def mallopt(self, what: int, value: int) -> int:
            calls.append(what)
            return 0

    monkeypatch.setattr(affinity.ctypes, "CDLL", lambda name: Glibc())
    affinity.keep_freed_memory()
    assert calls == [affinity._M_MMAP_THRESHOLD]
