"""What failed and is tried again: for a while, within a budget, and not too soon."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from pathlib import Path

from coterie.errors import CoterieError, counted, reason_of
from coterie.parallel.board import Board
from coterie.parallel.clock import Budget, awake
from coterie.parallel.processes import Child

NOT_STARTED = "could not be started"  # a child process that a run gives up as it ends
_NEEDED = 32  # descriptors, to read a checkpoint and start a learner
_LONGEST_S = 60.0  # between two attempts
_HURRY_S = 5.0  # the same after a signal: the sender may not wait for long
_STABLE_S = 120.0  # once an actor has lived this long, its earlier deaths no longer count


class RestartBudget(Budget):
    """Restarts of one kind. `field`: the option that limits them."""

    def __init__(self, field: str, limit: int) -> None:
        super().__init__(limit)
        self.field = field

    def restart(self, reason: str) -> None:
        """Count one restart. Raises `CoterieError` with the reason for it when there is none left."""
        if not self.spend():
            raise CoterieError(
                f"{reason}; the limit of {counted(self.limit, 'restart')} in an hour ({self.field}) is reached"
            )


class RestartDelays:
    """When the actors that died are restarted: later with each death soon after the last one."""

    def __init__(self) -> None:
        self._deaths: dict[int, tuple[float, int]] = {}  # of each actor: its last one, and how many came close together
        self._at: dict[int, float] = {}

    def died(self, row: int) -> None:
        now = time.monotonic()
        last, count = self._deaths.get(row, (-math.inf, 0))
        count = count + 1 if now - last < _STABLE_S else 0
        self._deaths[row] = now, count
        self._at[row] = now + min(_LONGEST_S, 0.1 * 2 ** min(count, 10))

    def due(self) -> list[int]:
        """The actors to restart now, each once."""
        rows = [row for row, when in self._at.items() if time.monotonic() >= when]
        self.forget(*rows)
        return rows

    def forget(self, *rows: int) -> None:
        for row in rows:
            self._at.pop(row, None)


class Starts:
    """Starts child processes, and tries again where the system lets none start: no descriptor is left."""

    def __init__(self, children: dict[int, Child], limit: float, log: Callable[[str], None]) -> None:
        self._children, self._log = children, log
        self._retries = Retries(limit)
        self._left: dict[int, Callable[[], Child]] = {}

    def start(self, row: int, make: Callable[[], Child]) -> None:
        """`make` the process of this row of the board, now or later. Raises `CoterieError` past the limit."""
        self._left.pop(row, None)
        try:
            self._children[row] = make()
        except (OSError, EOFError) as error:  # of this process, or of the fork server
            self._left[row] = make
            if self._retries.fail(reason := f"no process can be started: {reason_of(error)}"):
                self._log(reason)
        else:
            self._retries.succeed()

    def wait(self, ended: Callable[[], bool]) -> bool:
        """Wait until files can be opened; False if the run has `ended`. Raises `CoterieError` past the limit."""
        while not ended():
            with suppress(OSError), ExitStack() as opened:
                for _ in range(_NEEDED):
                    opened.enter_context(Path(os.devnull).open("rb"))
                return True
            if self._retries.are_due and self._retries.fail("no learner can be started: no descriptor is left"):
                self._log("no learner can be started: no descriptor is left")
            time.sleep(0.1)
        return False

    def retry(self, board: Board) -> list[int]:
        """Start those that are left, if it is time, and write their heartbeats, so that none counts as hung. Returns
        those that a run that is about to end gives up.
        """
        for row in list(self._left) if self._left and self._retries.are_due else ():
            self.start(row, self._left[row])
            if row in self._left:
                break
        for row in self._left:
            board.heartbeat(row)
        given_up = list(self._left) if board.stopping else []
        self.forget(given_up)
        return given_up

    def forget(self, rows: Iterable[int]) -> None:
        for row in rows:
            self._left.pop(row, None)


class Retries:
    """When to try again what failed. `limit`: `log.unsaved_limit`, seconds for which it may fail."""

    def __init__(self, limit: float) -> None:
        self.limit, self.longest = limit, _LONGEST_S
        self.succeed()

    def succeed(self) -> None:
        self._since, self._count, self._reason, self._next_attempt = 0.0, 0, "", 0.0

    def hurry(self) -> bool:
        """Begin again, and try more often from now on. Returns False where that was so before."""
        if self.longest == _HURRY_S:
            return False
        self.longest = _HURRY_S
        self.succeed()
        return True

    @property
    def are_due(self) -> bool:
        return awake() >= self._next_attempt

    @property
    def failed(self) -> bool:
        """Whether the last attempt failed."""
        return self._count > 0

    def fail(self, reason: str) -> bool:
        """Wait, longer each time; returns whether the reason is another one than before. Raises `CoterieError` with it
        past the limit.
        """
        now = awake()
        self._since, self._count = (self._since if self._count else now), self._count + 1
        if now - self._since > self.limit:
            raise CoterieError(f"{reason}, for {now - self._since:.0f} s (log.unsaved_limit)")
        self._next_attempt = now + min(self.longest, 0.25 * 2 ** min(self._count, 10), self.limit / 4)
        new, self._reason = reason != self._reason, reason
        return new
