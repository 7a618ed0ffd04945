"""What envs report besides their steps: why they were replaced, and the numbers in their `info`."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from coterie import config
from coterie.errors import CoterieError
from coterie.parallel.clock import Budget
from coterie.types import Array

_REASONS_KEPT = 50
_NAMES = 200
_LARGEST = 1e15  # a number beyond is not averaged


class Means(dict[str, tuple[float, int]]):
    """By name: the sum of some values, and how many they are. Names beyond the first 200 are left out: each would be a
    metric of the run, and an id or a seed in a name would make new ones without limit.
    """

    def __init__(self, given: Mapping[str, tuple[float, int]] | None = None) -> None:
        super().__init__(given or {})
        self.names, self.said = set[str](), False  # that were ever added; whether one was left out

    def add(self, more: Mapping[str, tuple[float, int]]) -> list[str]:
        """Returns a line for the log when the first name is left out."""
        lines = []
        for name, (total, count) in more.items():
            if name not in self.names and len(self.names) == _NAMES:
                if not self.said:
                    lines = [f"info has more than {_NAMES} numbers; {name[:100]!r} and others are no metrics"]
                self.said = True
                continue
            self.names.add(name)
            before = self.get(name, (0.0, 0))
            self[name] = before[0] + total, before[1] + count
        return lines

    def take(self) -> Means:
        """What was added since the last call."""
        taken = Means(self)
        self.clear()
        return taken

    def means(self, prefix: str = "") -> dict[str, float]:
        return {f"{prefix}{name}": total / count for name, (total, count) in sorted(self.items())}


class EnvNews(NamedTuple):
    """What the envs have reported since the last one."""

    failures: list[str]  # lines for the log, with tracebacks
    info: Means
    warnings: Sequence[str] = ()  # of the failures, those that are also shown on the screen


def first_time(places: set[str], reason: str) -> str:
    """Why an env was replaced, with the traceback behind it only where nothing was raised at that place before."""
    line, _, trace = reason.partition("\n")
    place = line.rpartition(" (")[2]
    if not trace or place in places:
        return line
    places.add(place)
    return reason.rstrip()


class Reports:
    """Collects the news of an `Envs`, whose groups may run in threads of their own."""

    def __init__(self, env: config.Env) -> None:
        self._budget, self._which = Budget(env.replace_budget), env.info
        self._reasons, self._places, self._info = deque[str](maxlen=_REASONS_KEPT), set[str](), Means()
        self._lock = threading.Lock()
        self._ignored: Array = np.zeros((), bool)

    def replace(self, reasons: Sequence[str]) -> None:
        """Count replaced envs. Raises `CoterieError` beyond the budget."""
        with self._lock:
            allowed = self._budget.spend(len(reasons))
            self._reasons.extend(f"replaced {first_time(self._places, reason)}" for reason in reasons)
        if not allowed:
            line, _, trace = reasons[-1].partition("\n")
            raise CoterieError(
                f"{self.replaced} envs had to be replaced, more than env.replace_budget {self._budget.limit} in an "
                f"hour; the last: {line}",
                trace,
            )

    @property
    def replaced(self) -> int:
        """Envs that were replaced so far."""
        return self._budget.total

    def ignore(self, rows: Array) -> None:
        """Leave these envs' info out from now on. For envs in one group."""
        self._ignored = rows

    def inform(self, info: Mapping[str, Array], stepped: Array, ended: Array) -> None:
        """Add up the numbers in the info of the envs that took a step, or of those whose episode ended."""
        rows = {"steps": stepped, "episodes": ended, "off": False}[self._which] & ~self._ignored
        given = {name: x[rows & (np.abs(x) <= _LARGEST)] for name, x in info.items()}
        with self._lock:
            self._reasons.extend(self._info.add({k: (float(x.sum()), len(x)) for k, x in given.items() if len(x)}))

    def take(self) -> EnvNews:
        """Replaced envs (the last 50) and numbers in info, since the last call."""
        with self._lock:
            reasons = list(self._reasons)
            self._reasons.clear()
            return EnvNews(reasons, self._info.take())
