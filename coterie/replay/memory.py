"""Large arrays, in memory or on a disk."""

from __future__ import annotations

import os
import tempfile

import numpy as np

from coterie.types import Array, ConfigError


def memory(shape: tuple[int, ...], dtype: str, disk: str = "") -> Array:
    """Zeroed; where `disk` names a folder, in a file there that has no name and goes with this process."""
    if not disk:
        return np.zeros(shape, dtype)
    try:
        with tempfile.TemporaryFile(dir=disk) as file:
            # All of it now: a disk that is full later would end the process without a word.
            os.posix_fallocate(file.fileno(), 0, max(1, int(np.prod(shape)) * np.dtype(dtype).itemsize))
            return np.memmap(file, dtype, "r+", shape=shape)
    except OSError as error:
        raise ConfigError(f"replay.disk: cannot write to {disk}: {error.strerror or error}") from None
