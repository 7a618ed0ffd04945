from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.exchange.elastic_harness import Machine
from tests.support.net import free_port


@pytest.fixture
def machine() -> Iterator[Callable[..., Machine]]:
    port, made = free_port(), list[Machine]()

    def make(number: int, **options: object) -> Machine:
        made.append(Machine(port, number, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in reversed(made):
        one.end()
