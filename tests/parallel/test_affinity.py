"""Where learners are placed: disjoint cores, one kept for each GPU, round robin where there are too many."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from coterie.parallel import affinity
from coterie.parallel.affinity import Place, available_cores, machine_memory, place


def test_without_gpus_all_cores_are_shared_out_in_order():
    assert place(1, [0, 1, 2, 3], 0) == [Place((0, 1, 2, 3), 4, -1)]
    assert place(2, [0, 1, 2, 3], 0) == [Place((0, 1), 2, -1), Place((2, 3), 2, -1)]
    assert place(3, [4, 5, 6, 7], 0) == [Place((4,), 1, -1), Place((5,), 1, -1), Place((6, 7), 2, -1)]
    assert place(2, [9], 0) == [Place((9,), 1, -1)] * 2


def test_more_learners_than_cores_go_round_robin():
    assert [p.cores for p in place(5, [3, 8], 0)] == [(3,), (8,), (3,), (8,), (3,)]
    assert all(p.env_threads == 1 for p in place(5, [3, 8], 0))


def test_one_core_of_each_gpu_is_kept_for_the_learners_that_drive_it():
    """Eight cores, two GPUs, four learners: cores 0 and 4 drive, the rest step envs."""
    assert place(4, range(8), 2) == [
        Place((0, 1), 1, 0),
        Place((4, 5), 1, 1),
        Place((0, 2, 3), 2, 0),
        Place((4, 6, 7), 2, 1),
    ]
    assert place(1, range(4), 1) == [Place((0, 1, 2, 3), 3, 0)]
    assert place(2, range(4), 1) == [Place((0, 1), 1, 0), Place((0, 2, 3), 2, 0)]


def test_gpus_that_no_learner_drives_take_no_cores():
    assert place(2, range(4), 8) == [Place((0, 1), 1, 0), Place((2, 3), 1, 1)]


def test_a_gpu_with_one_core_has_it_for_everything():
    assert place(2, [5, 6], 2) == [Place((5,), 1, 0), Place((6,), 1, 1)]
    assert place(4, [5, 6], 2) == [Place((5,), 1, 0), Place((6,), 1, 1)] * 2
    assert [p.cores for p in place(3, [5], 3)] == [(5,)] * 3
    assert [p.gpu for p in place(3, [5], 3)] == [0, 1, 2]


@pytest.mark.parametrize("gpus", [0, 1, 2, 3, 8])
def test_what_holds_for_any_machine(gpus):
    for learners, count in itertools.product(range(1, 13), range(1, 17)):
        cores = list(range(100, 100 + 2 * count, 2))
        places = place(learners, cores, gpus)
        assert len(places) == learners
        used = min(gpus, learners)
        assert [p.gpu for p in places] == [i % used if gpus else -1 for i in range(learners)]
        assert set().union(*(p.cores for p in places)) <= set(cores)
        assert all(len(set(p.cores)) == len(p.cores) > 0 for p in places)
        assert all(1 <= p.env_threads <= len(p.cores) for p in places)
        if gpus == 0:
            assert all(p.env_threads == len(p.cores) for p in places)
            if learners <= count:  # disjoint, nothing left over, evenly
                assert sorted(c for p in places for c in p.cores) == cores
                sizes = [len(p.cores) for p in places]
                assert max(sizes) - min(sizes) <= 1
            continue
        if used > count:
            continue
        assert set().union(*(p.cores for p in places)) == set(cores)
        by_gpu = [[p for p in places if p.gpu == gpu] for gpu in range(used)]
        pools = [set().union(*(p.cores for p in mine)) for mine in by_gpu]
        assert sum(map(len, pools)) == count  # no core serves two GPUs
        assert max(map(len, pools)) - min(map(len, pools)) <= 1
        for mine, pool in zip(by_gpu, pools, strict=True):
            driving = mine[0].cores[0]
            assert all(p.cores[0] == driving for p in mine)  # the same core drives it for all
            if len(pool) > 1:
                assert all(p.env_threads == len(p.cores) - 1 for p in mine)  # and steps no envs
            stepping = [c for p in mine for c in p.cores[1:]]
            if len(mine) < len(pool):
                assert sorted(stepping) == sorted(pool - {driving})  # the others are disjoint


@pytest.mark.parametrize(
    ("text", "count"),
    [("max 100000", 4), ("200000 100000", 2), ("50000 100000", 1), ("350000 100000", 4), ("900000 100000", 4)],
)
def test_a_quota_of_the_container_limits_the_cores(monkeypatch, tmp_path, text, count):
    """350 % of a core is four, to the nearest; a quota above what the process may use changes nothing."""
    file = tmp_path / "cpu.max"
    file.write_text(text + "\n")
    monkeypatch.setattr(affinity, "Path", lambda path: file if path == "/sys/fs/cgroup/cpu.max" else Path(path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {7, 3, 5, 1}, raising=False)
    assert available_cores() == [1, 3, 5, 7][:count]


@pytest.mark.parametrize(("text", "limit"), [("1048576\n", 1 << 20), ("max\n", None), ("", None)])
def test_a_limit_of_the_container_is_the_machines_memory(monkeypatch, tmp_path, text, limit):
    file = tmp_path / "memory.max"
    file.write_text(text)
    monkeypatch.setattr(affinity, "Path", lambda path: file if path == "/sys/fs/cgroup/memory.max" else Path(path))
    assert machine_memory() == (limit or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


@pytest.mark.parametrize("text", ["", "max", None])
def test_no_readable_quota_is_no_limit(monkeypatch, tmp_path, text):
    file = tmp_path / "cpu.max"
    if text is not None:
        file.write_text(text)
    monkeypatch.setattr(affinity, "Path", lambda path: file)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 0}, raising=False)
    assert available_cores() == [0, 2]
