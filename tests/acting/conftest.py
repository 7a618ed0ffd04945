"""Central acting in this process, checked when a test has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.acting.central_harness import Rig


@pytest.fixture
def rig() -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(**changes: object) -> Rig:
        made.append(Rig(**changes))
        return made[-1]

    yield make
    for one in made:
        one.gate.set()
        one.central.close()
        assert not any(thread.is_alive() for thread in one.central._threads)
        assert one.error is not None or one.central._error is None, one.central._error
        for batch in one.batches:
            assert len({env for env, _ in batch}) == len(batch), "an env is twice in a batch"
