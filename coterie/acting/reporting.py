"""What an actor or an env host reports to the run's log."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from coterie.parallel.affinity import rss_mb
from coterie.parallel.stages import Stages

_REPORT_S = 0.5  # between two reports


class WorkerReport:
    """Stage times, memory, replaced envs and action latencies of one worker process."""

    def __init__(self, worker: str, stages: Stages, failures: Callable[[], list[str]]) -> None:
        self._worker, self._stages, self._failures = worker, stages, failures
        self._reported = 0.0
        self.latencies = deque[float](maxlen=4096)  # seconds that envs waited for their actions

    def is_due(self) -> bool:
        return time.monotonic() - self._reported > _REPORT_S

    def take(self) -> dict[str, Any]:
        """The report since the last one."""
        self._reported = time.monotonic()
        latencies = list(self.latencies)
        self.latencies.clear()
        return {
            "stages": {f"{self._worker}/{k}": v for k, v in self._stages.seconds.items()},
            "rss_mb": rss_mb(),
            "failures": [f"replaced {reason}" for reason in self._failures()],
            "latencies": latencies,
        }
