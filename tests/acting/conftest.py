"""Central acting in this process, checked when a test has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.acting.central_harness import Rig
from tests.conftest import made_by


def _end(one: Rig) -> None:
    one.close()
    for batch in one.batches:
        assert len({env for env, _ in batch}) == len(batch), "an env is twice in a batch"


@pytest.fixture
def rig() -> Iterator[Callable[..., Rig]]:
    yield from made_by(Rig, _end)
