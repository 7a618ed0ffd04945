"""Where learners are placed, the limits of a container, and what malloc does with freed memory."""

from __future__ import annotations

import ctypes
import itertools
import os
import socket
import subprocess
import sys

import psutil
import pytest

from coterie.parallel.hardware import CoreAssignment, assign_cores, available_cores, machine_memory


@pytest.mark.parametrize(
    ("learners", "cores", "gpus", "expected"),
    [
        (1, range(4), 0, [((0, 1, 2, 3), -1)]),
        (3, range(4, 8), 0, [((4,), -1), ((5,), -1), ((6, 7), -1)]),
        (3, [3, 8], 0, [((3,), -1), ((8,), -1), ((3,), -1)]),  # round robin
        # Eight cores, two GPUs: cores 0 and 4 drive them, the rest step envs.
        (4, range(8), 2, [((0, 1), 0), ((4, 5), 1), ((0, 2, 3), 0), ((4, 6, 7), 1)]),
        (2, range(4), 8, [((0, 1), 0), ((2, 3), 1)]),  # GPUs that no learner drives take no cores
        (3, [5], 3, [((5,), 0), ((5,), 1), ((5,), 2)]),  # a GPU with one core has it for everything
    ],
)
def test_cores_are_shared_out_in_order_and_one_of_each_gpu_is_kept_for_driving_it(learners, cores, gpus, expected):
    assert assign_cores(learners, cores, gpus) == [CoreAssignment(*each) for each in expected]


@pytest.mark.parametrize("gpus", [0, 1, 2, 3, 8])
def test_cores_are_shared_out_evenly_on_any_machine(gpus):
    for learners, count in itertools.product(range(1, 13), range(1, 17)):
        cores = list(range(100, 100 + 2 * count, 2))
        places = assign_cores(learners, cores, gpus)
        used = min(gpus, learners)
        assert [p.gpu for p in places] == [i % used if gpus else -1 for i in range(learners)]
        assert all(len(set(p.cores)) == len(p.cores) > 0 for p in places)
        if learners > count or used > count:
            continue
        pools = [set().union(*(p.cores for p in places if p.gpu == gpu)) for gpu in range(used)] or [
            set(p.cores) for p in places
        ]
        assert sorted(core for pool in pools for core in pool) == cores  # disjoint, and nothing is left over
        assert max(map(len, pools)) - min(map(len, pools)) <= 1
        for gpu in range(used):
            first, *others = (p for p in places if p.gpu == gpu)
            assert all(p.cores[0] == first.cores[0] for p in others)  # the same core drives it for all


@pytest.mark.parametrize(
    ("text", "count"),
    [("max 100000", 4), ("200000 100000", 2), ("50000 100000", 1), ("350000 100000", 4), ("900000 100000", 4), ("", 4)],
)
def test_a_cpu_quota_of_the_container_limits_the_cores(monkeypatch, tmp_path, text, count):
    """350 % of a core is four, to the nearest. A quota above what the process may use changes nothing."""
    (tmp_path / "cpu.max").write_text(text)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {7, 3, 5, 1}, raising=False)
    found = set()
    for k in range(40):
        monkeypatch.setattr(socket, "gethostname", lambda k=k: f"pod-{k}")
        cores = available_cores(tmp_path)
        assert len(cores) == count
        found.update(cores)
    assert found == {1, 3, 5, 7}  # containers of one machine have different ones
    assert available_cores(tmp_path / "none") == [1, 3, 5, 7]


@pytest.mark.parametrize(("text", "limit"), [("1048576\n", 1 << 20), ("max\n", None), ("", None)])
def test_a_memory_limit_of_the_container_is_the_machines_memory(tmp_path, text, limit):
    (tmp_path / "memory.max").write_text(text)
    assert machine_memory(tmp_path) == (limit or psutil.virtual_memory().total)


STEPS = """
import resource
import sys
import numpy as np
from coterie.parallel.hardware import keep_freed_memory

def faults():
    before = 0
    for k in range(25):
        if k == 5:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        kept = [np.ones(int(sys.argv[1]), np.uint8) for _ in range(10)]
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 20

print(faults())
keep_freed_memory()
print(faults())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="not glibc")
def test_freed_memory_is_used_again_without_page_faults():
    """Faults of each step, with malloc's initial threshold: if it grows, it sometimes spares them."""
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(128 << 10)}
    recent = tuple(map(int, os.confstr("CS_GNU_LIBC_VERSION").split()[1].split("."))) >= (2, 35)
    call = [sys.executable, "-c", STEPS, str((40 if recent else 8) << 20)]
    done = subprocess.run(call, env=env, capture_output=True, text=True, check=True)
    plain, kept = map(float, done.stdout.split())
    assert plain >= 40  # 10 blocks of 2,048 pages or more, or of 4 huge ones
    assert kept < plain / 4
