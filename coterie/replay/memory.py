"""Large arrays, in memory or on a disk."""

from __future__ import annotations

import tempfile

import numpy as np

from coterie.types import Array


def memory(shape: tuple[int, ...], dtype: str, disk: str = "") -> Array:
    """Zeroed; where `disk` names a folder, in a file there that has no name and goes with this process."""
    if not disk:
        return np.zeros(shape, dtype)
    with tempfile.TemporaryFile(dir=disk) as file:
        file.truncate(max(1, int(np.prod(shape)) * np.dtype(dtype).itemsize))
        return np.memmap(file, dtype, "r+", shape=shape)
