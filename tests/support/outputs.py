"""Outputs that nobody reads, or nobody can."""

from __future__ import annotations

import os
import pty


def outputs(kind: str) -> tuple[int, int]:
    """The end that a run writes to, and the other one (-1: it is closed)."""
    read, write = pty.openpty() if "terminal" in kind else os.pipe()
    if "closed" in kind:
        os.close(read)
        return write, -1
    os.set_blocking(write, False)
    try:
        while True:
            os.write(write, b"." * 512)
    except BlockingIOError:
        os.set_blocking(write, True)
    return write, read
