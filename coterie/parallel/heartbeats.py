"""The health of a run's processes, and which of them hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import psutil

from coterie.parallel.board import Board
from coterie.parallel.clock import awake
from coterie.parallel.hardware import rss_mb
from coterie.types import Array

_STOPPED = {psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP, psutil.STATUS_DISK_SLEEP}


@contextmanager
def shown_alive(board: Board, row: int, limit: float) -> Iterator[None]:
    """Meanwhile a thread shows that this process is alive, which is less than that it makes progress. A wait in C (a
    collective, a lock) does not stop that thread, native code that holds the GIL does. `limit`: of `stalled`.
    """
    ended = threading.Event()

    def show() -> None:
        while True:
            board.alive[row] = time.monotonic()
            if ended.wait(min(1.0, limit / 4)):
                return

    threading.Thread(target=show, name="coterie-alive", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


class Heartbeats:
    """For how long the processes of a board have been silent, in seconds that this process was awake."""

    def __init__(self) -> None:
        self._last: dict[tuple[int, str], tuple[float, float]] = {}  # of each row: the last sign, and when it was seen

    def silent(self, board: Board, rows: Iterable[int]) -> dict[int, float]:
        """Seconds without a new heartbeat, by row."""
        return {row: self._age(row, "heartbeat", board.heartbeats) for row in rows}

    def _age(self, row: int, kind: str, signs: Array) -> float:
        """Seconds since the sign of this row last changed."""
        now, sign = awake(), float(signs[row])
        if (last := self._last.get((row, kind))) is None or last[0] != sign:
            self._last[row, kind] = last = sign, now
        return now - last[1]

    def stalled(self, board: Board, pids: Mapping[int, int | None], limit: float) -> tuple[int, float] | None:
        """The row of a process that was silent for more than `limit` seconds, if there is one, and for how many.
        `pids`: of the rows to watch, None where no process is running.
        """
        silent = self.silent(board, pids)
        frozen = {row for row in pids if self._age(row, "alive", board.alive) > limit and board.alive[row]}
        # A process may be stopped or frozen while it waits for others: they need not miss it.
        late = [row for row, seconds in silent.items() if seconds > limit]
        stale = [row for row in late if row in frozen or _is_stopped(pids[row])] or board.stale(silent, limit)
        return (stale[0], silent[stale[0]]) if stale else None


def _is_stopped(pid: int | None) -> bool:
    with suppress(psutil.Error, OSError):
        return pid is not None and psutil.Process(pid).status() in _STOPPED
    return False


def health(board: Board, processes: Mapping[int, tuple[str, int]]) -> list[dict[str, Any]]:
    """One entry for each process, given by its row as name and pid; `rss_mb` is None where it is gone."""
    return [
        {
            "name": name,
            "pid": pid,
            "silent_s": round(time.monotonic() - float(board.heartbeats[row]), 1),
            "env_steps": board.read(row)["produced"],
            "rss_mb": rss_mb(pid),
        }
        for row, (name, pid) in sorted(processes.items())
    ]
