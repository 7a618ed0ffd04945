"""The clock of every peer's script: the rate of training after a warm-up, as one line of JSON."""

from __future__ import annotations

import json
import os
import signal
import time

import psutil


class Meter:
    """Call `tick` with the number of env steps so far, often. After `warm` + `seconds` it prints the rate and ends the
    process and its children.
    """

    def __init__(self, seconds: float, warm: float, about: dict[str, object]) -> None:
        self.seconds, self.warm, self.about = seconds, warm, about
        self.begin = time.monotonic()
        self.start: tuple[float, int] | None = None

    def tick(self, steps: int) -> None:
        now = time.monotonic()
        if self.start is None:
            if steps > 0 and now - self.begin > self.warm:
                self.start = (now, steps)
        elif now - self.start[0] >= self.seconds:
            rate = (steps - self.start[1]) / (now - self.start[0])
            print(json.dumps({**self.about, "steps_per_s": round(rate)}), flush=True)
            for child in psutil.Process().children(recursive=True):
                child.send_signal(signal.SIGKILL)
            os._exit(0)
