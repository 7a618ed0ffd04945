"""Large arrays, in memory or on a disk."""

from __future__ import annotations

import os
import shutil
import tempfile

import numpy as np

from coterie.parallel.affinity import machine_memory
from coterie.types import Array, ConfigError

_FREE = 0.8  # of the machine's memory that replay may take


def room_for(field: str, need: int, what: str, disk: str = "") -> None:
    """Refuse, in the name of an option, what the machine's memory cannot hold; on a disk, what has no room there."""
    if disk:
        memory((1,), "uint8", disk)  # can it be written to?
        have, where, share = shutil.disk_usage(disk).free, f"free in {disk}", 1.0
    else:
        have, where, share = machine_memory(), "of memory in the machine", _FREE
    if need > share * have:
        raise ConfigError(f"{field}: {what} need {need / 2**30:.1f} GiB, and there are {have / 2**30:.1f} {where}")


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
