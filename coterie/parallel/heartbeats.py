"""The health of a run's processes, and which of them hangs."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import psutil

from coterie.parallel.affinity import rss_mb
from coterie.parallel.board import Board
from coterie.parallel.clock import awake

_STOPPED = {psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP, psutil.STATUS_DISK_SLEEP}


class Heartbeats:
    """For how long the processes of a board have been silent, in seconds that this process was awake."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[float, float]] = {}  # of each row: its last heartbeat, and when it was seen

    def silent(self, board: Board, rows: Iterable[int]) -> dict[int, float]:
        """Seconds without a new heartbeat, by row."""
        now = awake()
        for row in (found := {row: float(board.heartbeats[row]) for row in rows}):
            if row not in self._last or self._last[row][0] != found[row]:
                self._last[row] = found[row], now
        return {row: now - self._last[row][1] for row in found}

    def stalled(self, board: Board, pids: Mapping[int, int | None], limit: float) -> tuple[int, float] | None:
        """The row of a process that was silent for more than `limit` seconds, if there is one, and for how many.
        `pids`: of the rows to watch, None where no process is running.
        """
        silent = self.silent(board, pids)
        # A process may be stopped while it waits for others: they need not miss it.
        stopped = [row for row, seconds in silent.items() if seconds > limit and _is_stopped(pids[row])]
        stale = stopped or board.stale(silent, limit)
        return (stale[0], silent[stale[0]]) if stale else None


def _is_stopped(pid: int | None) -> bool:
    with suppress(psutil.Error):
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
