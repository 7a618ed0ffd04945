"""How often the parts of a run may be restarted."""

from __future__ import annotations

from coterie.types import CoterieError


class RestartBudget:
    """Restarts of one kind that the whole run may make. `field`: the option that limits them."""

    def __init__(self, field: str, limit: int) -> None:
        self.field, self.limit = field, limit
        self.used = 0

    @property
    def left(self) -> int:
        return self.limit - self.used

    def spend(self, reason: str) -> None:
        """Count one restart. Raises `CoterieError` with the reason for it when there is none left."""
        self.used += 1
        if self.used > self.limit:
            raise CoterieError(f"{reason}; {self.field} ({self.limit}) are used up")
