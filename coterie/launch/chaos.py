"""Deliberate faults (`--chaos`): processes are killed, stopped and slowed, and links to other runs are cut."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress

from coterie.config import Chaos
from coterie.parallel.processes import Child

_STOPPED_S = (0.2, 5.0)  # for how long a process is stopped
_SLOWED_S = 5.0  # that a slowed process alternates between stopped and running
_SLICE_S = 0.1  # of each turn


class FaultInjector:
    """Disturbs one process at a time, at random moments that the seed determines.

    `log` takes a line about each fault. `spare(name)`: True where killing that process would end the run; it is stopped
    instead. `cut` cuts the links to other runs and returns whether there were any.
    """

    def __init__(
        self, config: Chaos, log: Callable[[str], None], spare: Callable[[str], bool], cut: Callable[[], bool]
    ) -> None:
        self.config, self.log, self.spare, self.cut = config, log, spare, cut
        self.rng = random.Random(config.seed)
        self.done = Counter[str]()
        self.due = time.monotonic() + self._pause()
        self.pending: list[tuple[float, Child, signal.Signals]] = []  # signals to come, by their times

    def _pause(self) -> float:
        return self.rng.expovariate(1 / self.config.every)

    def poll(self, children: Mapping[str, Child], calm: bool = False) -> None:
        """Do what is due to `children`, by name. Called often. `calm`: begin nothing new."""
        now = time.monotonic()
        for when, child, number in self.pending:
            if when <= now:
                _send(child, number)
        self.pending = [entry for entry in self.pending if entry[0] > now]
        if calm or now < self.due or not children:
            return
        self.due = now + self._pause()
        kind, name = self.rng.choice(("kill", "stop", "slow", "cut")), self.rng.choice(sorted(children))
        seconds, child = self.rng.uniform(*_STOPPED_S), children[name]
        if (kind == "cut" and not self.cut()) or (kind == "kill" and self.spare(name)):
            kind = "stop"
        if kind in ("stop", "slow") and any(other is child for _, other, _ in self.pending):
            return
        self.done[kind] += 1
        if kind == "cut":
            self.log("chaos: links are cut")
        elif kind == "kill":
            _send(child, signal.SIGKILL)
            self.log(f"chaos: {name} is killed")
        elif kind == "stop":
            self._rest(child, now, seconds)
            self.log(f"chaos: {name} is stopped for {seconds:.1f} s")
        else:
            for turn in range(int(_SLOWED_S / _SLICE_S / 2)):
                self._rest(child, now + 2 * turn * _SLICE_S, _SLICE_S)
            self.log(f"chaos: {name} is slowed for {_SLOWED_S:g} s")

    def _rest(self, child: Child, begin: float, seconds: float) -> None:
        self.pending += [(begin, child, signal.SIGSTOP), (begin + seconds, child, signal.SIGCONT)]

    def close(self) -> None:
        """Resume all stopped processes."""
        for _, child, _ in self.pending:
            _send(child, signal.SIGCONT)
        self.pending.clear()


def _send(child: Child, number: signal.Signals) -> None:
    if child.process.is_alive() and child.process.pid is not None:  # else another process may have its pid
        with suppress(OSError):
            os.kill(child.process.pid, number)
