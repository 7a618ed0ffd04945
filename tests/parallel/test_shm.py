"""Anonymous shared memory between processes."""

import os
import subprocess
import sys

import numpy as np
import pytest

from coterie.parallel import shm
from coterie.parallel.shm import SharedArrays

LAYOUT = {"a": ((3, 2), "float32"), "b": ((5,), "uint8"), "c": ((), "int64")}


def test_two_processes_see_the_same_arrays():
    shared = SharedArrays(LAYOUT)
    assert not any(x.any() for x in shared.arrays.values())
    shared.arrays["a"][1] = 7
    code = (
        "import sys; from coterie.parallel.shm import SharedArrays\n"
        f"s = SharedArrays({LAYOUT!r}, int(sys.argv[1]))\n"
        "assert s.arrays['a'][1].tolist() == [7, 7]\n"
        "s.arrays['b'][4] = 9; s.arrays['c'][...] = -1; s.close()"
    )
    subprocess.run([sys.executable, "-c", code, str(shared.fd)], pass_fds=[shared.fd], check=True)
    assert shared.arrays["b"].tolist() == [0, 0, 0, 0, 9]
    assert shared.arrays["c"] == -1
    assert shared.arrays["a"].sum() == 14
    shared.close()


def test_arrays_do_not_overlap_and_are_aligned():
    shared = SharedArrays(LAYOUT)
    for value, x in enumerate(shared.arrays.values()):
        x[...] = value + 1
        assert x.ctypes.data % 64 == 0
    assert [int(x.max()) for x in shared.arrays.values()] == [1, 2, 3]
    assert [int(x.min()) for x in shared.arrays.values()] == [1, 2, 3]
    shared.close()


def test_close_frees_the_descriptor_and_views_stay_readable():
    before = os.listdir("/proc/self/fd")
    shared = SharedArrays(LAYOUT)
    view = shared.arrays["a"]
    view[:] = 3
    shared.close()
    shared.close()
    assert view.sum() == 18
    del view
    assert os.listdir("/proc/self/fd") == before


def test_memory_that_is_too_small_for_the_layout_is_refused():
    shared = SharedArrays(LAYOUT)
    with pytest.raises(ValueError, match="holds 192 bytes, the layout needs 65536"):
        SharedArrays({"a": ((65536,), np.uint8)}, os.dup(shared.fd))
    shared.close()


def test_a_fence_has_a_release_before_an_acquisition(monkeypatch):
    """One lock alone lets the store before it and the store after it meet in between."""
    calls: list[str] = []

    class Recorder:
        def __enter__(self) -> None:
            calls.append("acquire")

        def __exit__(self, *_: object) -> None:
            calls.append("release")

    monkeypatch.setattr(shm, "_FIRST", Recorder())
    monkeypatch.setattr(shm, "_SECOND", Recorder())
    shm.fence()
    assert calls == ["acquire", "release", "acquire", "release"]
