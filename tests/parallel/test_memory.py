"""What malloc does with freed memory, seen by page faults."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from coterie.parallel import affinity

STEPS = """
import resource
import numpy as np
from coterie.parallel.affinity import keep_freed_memory

def step():
    kept = [np.ones(8 << 20, np.uint8) for _ in range(10)]

def faults():
    for _ in range(5):
        step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        step()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 20

print(faults())
keep_freed_memory()
print(faults())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="not glibc")
def test_freed_memory_is_used_again_without_page_faults():
    """Faults of each step, with malloc's initial threshold: if it grows, it sometimes spares them."""
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(128 << 10)}
    done = subprocess.run([sys.executable, "-c", STEPS], env=env, capture_output=True, text=True, check=True)
    plain, kept = map(float, done.stdout.split())
    assert plain >= 40  # 10 blocks of 2,048 pages, or of 4 huge ones
    assert kept < plain / 4


def test_a_refused_setting_of_malloc_leaves_the_other_one_alone(monkeypatch):
    """The second alone would fix a threshold that is too low."""
    calls: list[int] = []
    glibc = SimpleNamespace(mallopt=lambda what, value: calls.append(what) or 0)
    monkeypatch.setattr(affinity.ctypes, "CDLL", lambda name: glibc)
    affinity.keep_freed_memory()
    assert len(calls) == 1
