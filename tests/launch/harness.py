"""The former names of what is in tests/support/ now."""

from __future__ import annotations

from collections.abc import Callable

from tests.support.meddler import PATIENCE, Meddler, Outside
from tests.support.process_table import family, gone, named_memory, put_down, tagged
from tests.support.runs import ENDLESS, check_accounts, last_checkpoint, last_line, read_summary, tiny
from tests.support.runs import inline_options as options
from tests.support.waiting import wait_until

__all__ = [
    "ENDLESS", "PATIENCE", "Meddler", "Outside", "check_accounts", "family", "gone", "last_checkpoint", "last_line",
    "named_memory", "options", "put_down", "read_summary", "tagged", "tiny", "until",
]  # fmt: skip


def until(condition: Callable[[], object], what: str, seconds: float = PATIENCE) -> None:
    wait_until(condition, seconds, what)
