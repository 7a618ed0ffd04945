"""Anonymous shared memory between processes."""

import os
import subprocess
import sys
from unittest.mock import MagicMock

import numpy as np
import pytest

from coterie.parallel.shm import LOCKS, SharedArrays, fence

LAYOUT = {"a": ((3, 2), "float32"), "b": ((5,), "uint8"), "c": ((), "int64")}


def test_two_processes_see_the_same_arrays_which_are_aligned_and_do_not_overlap():
    shared = SharedArrays(LAYOUT)
    assert not any(x.any() or x.ctypes.data % 64 for x in shared.arrays.values())
    shared.arrays["a"][:] = 7
    code = (
        "import sys; from coterie.parallel.shm import SharedArrays\n"
        f"s = SharedArrays({LAYOUT!r}, int(sys.argv[1]))\n"
        "assert (s.arrays['a'] == 7).all()\n"
        "s.arrays['b'][:] = 9; s.arrays['c'][...] = -1; s.close()"
    )
    subprocess.run([sys.executable, "-c", code, str(shared.fd)], pass_fds=[shared.fd], check=True)
    assert [set(x.ravel().tolist()) for x in shared.arrays.values()] == [{7}, {9}, {-1}]
    shared.close()


def test_closed_shared_memory_frees_its_descriptor_and_views_stay_readable():
    """Other tests' memory may be collected meanwhile, so only what has this one's name is counted."""

    def descriptors():
        return [fd for fd in os.listdir("/proc/self/fd") if "this-test" in os.path.realpath(f"/proc/self/fd/{fd}")]

    shared = SharedArrays(LAYOUT, name="this-test")
    assert len(descriptors()) == 2  # a mapping has a copy
    view = shared.arrays["a"]
    view[:] = 3
    shared.close()
    shared.close()
    assert view.sum() == 18
    del view
    assert not descriptors()
    shared = SharedArrays(LAYOUT, name="this-test")
    del shared  # without being closed
    assert not descriptors()


def test_memory_that_is_too_small_for_the_layout_is_refused():
    shared = SharedArrays(LAYOUT)
    with pytest.raises(ValueError, match="holds 192 bytes, the layout needs 65536"):
        SharedArrays({"a": ((65536,), np.uint8)}, os.dup(shared.fd))
    shared.close()


def test_a_fence_has_a_release_before_an_acquisition():
    """One lock alone lets the store before it and the store after it meet in between."""
    lock = MagicMock()
    fence([lock] * len(LOCKS))
    assert [call[0] for call in lock.mock_calls] == ["__enter__", "__exit__"] * 2
