"""What failed and is tried again, for a while."""

from __future__ import annotations

from coterie.parallel.clock import awake
from coterie.types import CoterieError

_LONGEST_S = 60.0


class Retries:
    """When to try again what failed. `limit`: seconds for which it may fail; `field`: the option that sets it."""

    def __init__(self, limit: float, field: str) -> None:
        self.limit, self.field = limit, field
        self.succeed()

    def succeed(self) -> None:
        self._since, self._count, self._reason, self._again = 0.0, 0, "", 0.0

    @property
    def are_due(self) -> bool:
        return awake() >= self._again

    def fail(self, reason: str) -> bool:
        """Wait, longer each time; returns whether the reason is another one than before. Raises `CoterieError` with it
        past the limit.
        """
        now = awake()
        self._since, self._count = (self._since if self._count else now), self._count + 1
        if now - self._since > self.limit:
            raise CoterieError(f"{reason}, for {now - self._since:.0f} s ({self.field})")
        self._again = now + min(_LONGEST_S, 0.25 * 2**self._count, self.limit / 4)
        new, self._reason = reason != self._reason, reason
        return new
