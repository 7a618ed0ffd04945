"""Runs that gossip with each other, each with its own folder, as processes of their own."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from coterie.cli.main import main
from tests.conftest import made_by
from tests.launch.namespaces import bridged, ip
from tests.support.commands import Command
from tests.support.net import free_port
from tests.support.runs import check_rows, inline_options

# Runs start processes for minutes. tests/remote/test_gossip_client.py shows the same in one process.
pytestmark = pytest.mark.slow
ENDLESS = 10**9


class Linked(Command):
    """One of the runs."""

    def trains(self, steps: int = 1000) -> None:
        """It trains on for this number of env steps."""
        before = self.line().get("env_steps", 0)
        self.until(lambda: self.line().get("env_steps", 0) > before + steps, "it trains")

    def gossips(self, peers: int) -> None:
        """Its learners mix with this number of others."""
        self.until(lambda: self.line().get("gossip/peers") == peers, f"it has {peers} peers: {self.line()}")
        before = self.line()["gossip/remote_messages"]
        self.until(lambda: self.line()["gossip/remote_messages"] > before + 20, "they average the others' messages")
        self.until(lambda: "consensus/distance" in self.line(), "a distance is logged")

    def finish(self, number: int = 0) -> dict[str, Any]:
        """End with 75 after a signal and 0 without; returns the summary, whose rows add up."""
        self.end(number, 75 if number else 0)
        return check_rows(self.out)


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Callable[..., Linked]]:
    def start(name: str, prefix: tuple[str, ...] = (), resume: bool = False, **changes: object) -> Linked:
        own = {"learners": 1, "steps": ENDLESS, "env.delay": 0.005, "log.checkpoint_every": 0.5, **changes}
        args = ["resume", str(tmp_path / name)] if resume else inline_options(tmp_path / name, "gossip", **own)
        return Linked(args, tmp_path / name, prefix)

    yield from made_by(start, Linked.close)


def test_gossiping_runs_come_and_go_while_others_train(runs):
    """One finishes, one is killed, one gets SIGTERM."""
    at = f"127.0.0.1:{free_port()}"
    early = runs("early", **{"gossip.connect": at, "steps": 80_000, "learners": 2})  # before there is a run
    hub = runs("hub", **{"gossip.bind": at})
    early.gossips(1)
    hub.gossips(2)
    early.finish()
    hub.until(lambda: hub.line()["gossip/peers"] == 0, "it has left")
    killed, stopped = (runs(name, **{"gossip.connect": at}) for name in ("killed", "stopped"))
    hub.gossips(2)
    killed.gossips(2)
    killed.process.kill()
    hub.gossips(1)
    stopped.trains()
    stopped.finish(signal.SIGTERM)
    hub.finish(signal.SIGINT)


def test_the_run_that_listens_is_killed_and_resumed(runs):
    at = f"127.0.0.1:{free_port()}"
    hub, other = runs("hub", **{"gossip.bind": at}), runs("other", **{"gossip.connect": at})
    other.gossips(1)
    hub.until(lambda: list(hub.out.glob("checkpoints/step_*")), "it has a checkpoint")
    hub.process.kill()
    hub.process.wait()
    other.until(lambda: "is away" in other.log(), "it is missed")
    other.trains()
    hub = runs("hub", resume=True)
    other.until(lambda: f"back at {at}" in other.log(), "it is found")
    other.gossips(1)
    hub.gossips(1)
    hub.finish(signal.SIGTERM)  # which is to be resumed, too: the other goes on looking for it
    other.until(lambda: other.log().count("is away") == 2, "it is missed")
    other.trains()
    other.finish(signal.SIGTERM)


def test_a_resumed_run_without_its_hub_trains_alone(runs):
    at = f"127.0.0.1:{free_port()}"
    hub, other = runs("hub", **{"gossip.bind": at}), runs("other", **{"gossip.connect": at})
    other.gossips(1)
    for one in (other, hub):
        one.finish(signal.SIGTERM)
    alone = runs("other", resume=True)
    alone.until(lambda: "this run goes on by itself" in alone.log(), "it looks for the other")
    alone.trains()
    alone.finish(signal.SIGTERM)


@pytest.mark.parametrize("away", [3.0, 60.0])
def test_runs_gossip_over_three_networks(tmp_path, runs, away):
    """Each run has a network namespace of its own; TLS and a token; the link of one is down for a while."""
    with bridged(2, "g") as (here, machines):
        keys, at = tmp_path / "keys", f"{here}:{free_port()}"
        assert main(["keys", str(keys), "--host", here]) == 0
        common = {"wire.token-file": keys / "token", "wire.cert": keys / "cert.pem"}
        hub = runs("hub", **common, **{"gossip.bind": at, "wire.key": keys / "key.pem"})
        others = [
            runs(name, prefix=("ip", "netns", "exec", name), **common, **{"gossip.connect": at})
            for name, _, _ in machines
        ]
        for one in (hub, *others):
            one.gossips(2)
        ip("link", "set", machines[0][2], "down")
        time.sleep(away)
        for one in (hub, *others):
            one.trains()
        ip("link", "set", machines[0][2], "up")
        for one in (hub, *others):
            one.gossips(2)
        for one in (*others, hub):
            one.finish(signal.SIGTERM)
