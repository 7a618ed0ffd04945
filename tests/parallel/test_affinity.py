"""Where learners are placed, and the limits of a container."""

from __future__ import annotations

import itertools
import os

import psutil
import pytest

from coterie.parallel import affinity
from coterie.parallel.affinity import Place, available_cores, machine_memory, place


@pytest.mark.parametrize(
    ("learners", "cores", "expected"),
    [
        (1, [0, 1, 2, 3], [(0, 1, 2, 3)]),
        (2, [0, 1, 2, 3], [(0, 1), (2, 3)]),
        (3, [4, 5, 6, 7], [(4,), (5,), (6, 7)]),
        (2, [9], [(9,), (9,)]),
        (5, [3, 8], [(3,), (8,), (3,), (8,), (3,)]),
    ],
)
def test_without_gpus_cores_are_shared_out_in_order_or_round_robin(learners, cores, expected):
    assert place(learners, cores, 0) == [Place(share) for share in expected]


@pytest.mark.parametrize(
    ("learners", "cores", "gpus", "expected"),
    [
        # Eight cores, two GPUs: cores 0 and 4 drive them, the rest step envs.
        (4, range(8), 2, [((0, 1), 0), ((4, 5), 1), ((0, 2, 3), 0), ((4, 6, 7), 1)]),
        (1, range(4), 1, [((0, 1, 2, 3), 0)]),
        (2, range(4), 1, [((0, 1), 0), ((0, 2, 3), 0)]),
        (2, range(4), 8, [((0, 1), 0), ((2, 3), 1)]),  # GPUs that no learner drives take no cores
        (2, [5, 6], 2, [((5,), 0), ((6,), 1)]),  # a GPU with one core has it for everything
        (3, [5], 3, [((5,), 0), ((5,), 1), ((5,), 2)]),
    ],
)
def test_one_core_of_each_gpu_is_kept_for_the_learners_that_drive_it(learners, cores, gpus, expected):
    assert place(learners, cores, gpus) == [Place(*each) for each in expected]


@pytest.mark.parametrize("gpus", [0, 1, 2, 3, 8])
def test_cores_are_shared_out_evenly_on_any_machine(gpus):
    for learners, count in itertools.product(range(1, 13), range(1, 17)):
        cores = list(range(100, 100 + 2 * count, 2))
        places = place(learners, cores, gpus)
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
    [
        ("max 100000", 4), ("200000 100000", 2), ("50000 100000", 1), ("350000 100000", 4), ("900000 100000", 4),
        ("", 4), ("max", 4), (None, 4),
    ],
)  # fmt: skip
def test_a_cpu_quota_of_the_container_limits_the_cores(monkeypatch, tmp_path, text, count):
    """350 % of a core is four, to the nearest. A quota above what the process may use changes nothing."""
    file = tmp_path / "cpu.max"
    if text is not None:
        file.write_text(text + "\n")
    monkeypatch.setattr(affinity, "Path", lambda path: file)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {7, 3, 5, 1}, raising=False)
    assert available_cores() == [1, 3, 5, 7][:count]


@pytest.mark.parametrize(("text", "limit"), [("1048576\n", 1 << 20), ("max\n", None), ("", None)])
def test_a_memory_limit_of_the_container_is_the_machines_memory(monkeypatch, tmp_path, text, limit):
    file = tmp_path / "memory.max"
    file.write_text(text)
    monkeypatch.setattr(affinity, "Path", lambda path: file)
    assert machine_memory() == (limit or psutil.virtual_memory().total)
