"""What malloc does with freed memory, seen by the pages that a process must get anew."""

from __future__ import annotations

import ctypes
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
    kept = [torch.ones(40 << 20, dtype=torch.uint8) for _ in range(2)]

for _ in range(5):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    step()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 20)
"""


def faults(keep: bool) -> float:
    code = STEP.format(keep=keep)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="not glibc")
def test_the_next_step_gets_the_pages_of_the_last_one():
    plain, kept = faults(keep=False), faults(keep=True)
    assert plain >= 40  # 2 blocks of 10,240 pages, or of 20 huge ones
    assert kept < plain / 4


def test_where_malloc_is_another_nothing_happens(monkeypatch):
    monkeypatch.setattr(affinity.ctypes, "CDLL", lambda name: object())
    affinity.keep_freed_memory()
