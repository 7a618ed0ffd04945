"""Faults on purpose, for users who want to know: processes of a run are killed, stopped and slowed, links are cut."""

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

_STOPPED_S = (0.2, 5.0)  # for how long one is stopped
_SLOWED_S = 5.0  # for how long one is slowed
_SLICE_S = 0.1  # that a slowed one works and rests, in turns


class Disturber:
    """Disturbs one of `children` (by their rows of the board; below `learners` they are learners) at random times,
    which are those of the seed. `cut`: cuts the run's links to other runs and returns whether there were any. Whom
    nothing could bring back is not killed: `spare` says so of a row.
    """

    def __init__(
        self, own: Chaos, learners: int, say: Callable[[str], None], name: Callable[[int], str],
        spare: Callable[[int], bool], cut: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        self.own, self.learners, self.say, self.name, self.spare, self.cut = own, learners, say, name, spare, cut
        self.rng = random.Random(own.seed)
        self.done = Counter[str]()
        self.due = time.monotonic() + self._pause()
        self.resting: dict[int, tuple[Child, float]] = {}  # who is stopped, by row, and until when
        self.slowed: dict[int, tuple[Child, float, float, bool]] = {}  # until when, when to change, whether it rests

    def _pause(self) -> float:
        return self.rng.expovariate(1 / self.own.every)

    def poll(self, children: Mapping[int, Child], calm: bool = False) -> None:
        """Do what is due. Called often. `calm`: nothing new."""
        now = time.monotonic()
        self._wake(children, now)
        self._slow(children, now)
        if calm or now < self.due or not children:
            return
        self.due = now + self._pause()
        kind, row = self.rng.choice(("kill", "stop", "slow", "cut")), self.rng.choice(sorted(children))
        seconds = self.rng.uniform(*_STOPPED_S)
        if kind == "cut" and not self.cut():
            kind = "stop"
        if kind == "kill" and self.spare(row):
            kind = "stop"
        if kind in ("stop", "slow") and (row in self.resting or row in self.slowed):
            return
        child = children[row]
        what = {
            "kill": "is killed",
            "stop": f"is stopped for {seconds:.1f} s",
            "slow": f"is slowed for {_SLOWED_S:g} s",
        }
        if kind == "kill":
            _signal(child, signal.SIGKILL)
        elif kind == "stop":
            _signal(child, signal.SIGSTOP)
            self.resting[row] = child, now + seconds
        elif kind == "slow":
            self.slowed[row] = child, now + _SLOWED_S, now, False
        self.done[kind] += 1
        self.say(f"chaos: {self.name(row)} {what[kind]}" if kind in what else "chaos: links are cut")

    def _wake(self, children: Mapping[int, Child], now: float) -> None:
        for row, (child, until) in list(self.resting.items()):
            if now >= until or children.get(row) is not child:
                _signal(child, signal.SIGCONT)
                del self.resting[row]

    def _slow(self, children: Mapping[int, Child], now: float) -> None:
        for row, (child, until, turn, rests) in list(self.slowed.items()):
            if now >= until or children.get(row) is not child:
                _signal(child, signal.SIGCONT)
                del self.slowed[row]
            elif now >= turn:
                _signal(child, signal.SIGCONT if rests else signal.SIGSTOP)
                self.slowed[row] = child, until, now + _SLICE_S, not rests

    def close(self) -> None:
        """Everybody goes on."""
        for child in (*(c for c, _ in self.resting.values()), *(c for c, *_ in self.slowed.values())):
            _signal(child, signal.SIGCONT)
        self.resting.clear()
        self.slowed.clear()


def _signal(child: Child, number: int) -> None:
    if child.process.pid is not None:
        with suppress(OSError):  # it is gone, and somebody else may have its number
            os.kill(child.process.pid, number)
