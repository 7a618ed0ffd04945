"""Servers that are closed after each test, and must not have logged anything."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from coterie.wire.server import Server
from tests.conftest import made_by
from tests.remote import gossip_runs
from tests.support.waiting import wait_until
from tests.support.wire import EchoService


class Served:
    """A server, its service, and its lines on refused clients."""

    def __init__(self, address: str, **options: Any) -> None:
        self.service, self.lines = EchoService(), list[str]()
        self.server = Server(
            address, {"Infer": self.service}, on_client=lambda line, refused: self.lines.append(line), **options
        )
        self.address = address


Serve = Callable[..., Served]


@pytest.fixture
def serve(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[Serve]:
    """Makes servers, by default at a unix socket."""
    made: list[Served] = []

    def make(address: str = "", **options: Any) -> Served:
        made.append(Served(address or f"unix:{tmp_path}/s{len(made)}", **options))
        return made[-1]

    yield make
    for one in made:
        if not one.server.is_closed:
            wait_until(lambda server=one.server: not server._streams, what="streams that have ended are closed")  # type: ignore[misc]
        assert all(stream.left == 1 for stream in one.service.streams), "each is left once"
        one.server.close()
        assert one.server.is_closed
    gc.collect(1)  # reports what was never awaited or retrieved
    logged = [r.getMessage() for when in ("setup", "call") for r in caplog.get_records(when) if r.levelname != "DEBUG"]
    # gRPC's own: its one poller wakes a loop that has closed meanwhile.
    logged = [message for message in logged if "PollerCompletionQueue" not in message]
    assert logged == [], "asyncio and gRPC log what the server did not catch"


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"unix:{tmp_path}/s"


@pytest.fixture
def hubs() -> Iterator[Callable[..., gossip_runs.HubRun]]:
    yield from made_by(gossip_runs.HubRun, lambda run: run.close())


@pytest.fixture
def gossip_clients() -> Iterator[Callable[..., gossip_runs.ClientRun]]:
    yield from made_by(gossip_runs.ClientRun, lambda run: run.close())
