"""Runs that train with each other, each with its own folder, as processes of their own."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import made_by
from tests.support.commands import Command
from tests.support.net import free_port
from tests.support.process_table import family
from tests.support.runs import check_rows, inline_options

# Runs start processes for minutes. tests/remote/test_gossip_link.py and tests/exchange/test_elastic.py show the same
# in one process; in tests/launch/test_fault_table.py they are on machines of which one is lost or cut off.
pytestmark = pytest.mark.slow


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

    def is_one_of(self, machines: int) -> None:
        """So many machines make every update together, and go on."""
        self.until(lambda: self.line().get("allreduce/machines") == machines, f"a group of {machines}: {self.line()}")
        steps = self.line()["learner_steps"]
        self.until(lambda: self.line()["learner_steps"] > steps + 20, "they train")

    def learner(self) -> int:
        """The process of learner 0: the first that its fork server has forked."""
        forked = [pid for pid in family(self.process.pid) if b"forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        return sorted(forked)[1]

    def is_killed(self) -> None:
        self.until(lambda: list(self.out.glob("checkpoints/step_*")), "it has a checkpoint")
        self.process.kill()
        self.process.wait()

    def finish(self, number: int = 0) -> dict[str, Any]:
        """End with 75 after a signal and 0 without; returns the summary, whose rows add up."""
        self.end(number, 75 if number else 0)
        return check_rows(self.out)


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Callable[..., Linked]]:
    def start(name: str, exchange: str = "gossip", resume: bool = False, **changes: object) -> Linked:
        own = {"learners": 1, "steps": 10**9, "env.delay": 0.005, "log.checkpoint_every": 0.5}
        own |= {"log.consensus": exchange == "gossip", **changes}
        args = ["resume", str(tmp_path / name)] if resume else inline_options(tmp_path / name, exchange, **own)
        return Linked(args, tmp_path / name)

    yield from made_by(start, Linked.close)


def test_runs_gossip_on_after_the_one_that_listens_was_killed_and_resumed_and_without_it(runs):
    at = f"127.0.0.1:{free_port()}"
    other = runs("other", **{"gossip.connect": at, "learners": 2})  # before there is a run
    hub = runs("hub", **{"gossip.bind": at})
    other.gossips(1)
    hub.gossips(2)
    hub.is_killed()
    other.until(lambda: "gossip: no learner at" in other.log(), "it is missed")
    other.trains()
    hub = runs("hub", resume=True)
    other.until(lambda: f"gossip: a learner at {at} after" in other.log(), "it is found")
    other.gossips(1)
    hub.gossips(2)
    hub.finish(signal.SIGTERM)  # which is to be resumed, too: the other goes on looking for it
    other.until(lambda: other.log().count("gossip: no learner at") == 2, "it is missed")
    other.trains()
    other.finish(signal.SIGTERM)
    alone = runs("other", resume=True)
    alone.until(lambda: "this run continues alone until" in alone.log(), "it looks for the other")
    alone.trains()
    hub = runs("hub", resume=True)
    alone.gossips(1)
    hub.finish(signal.SIGTERM)
    alone.finish(signal.SIGTERM)


def test_machines_train_together_on_after_one_is_lost_its_learner_is_killed_or_it_leaves(runs):
    """One that is lost costs the others one update, and joins them again when it is resumed."""
    at = f"127.0.0.1:{free_port()}"
    ends = [{"allreduce.bind": at, "allreduce.machines": 3}, *[{"allreduce.connect": at}] * 2]
    mine = [
        runs(str(k), "allreduce", **end, **{"seed": k, "allreduce.trusted_network": True, "learners": 1 + (k == 2)})
        for k, end in enumerate(ends)
    ]
    for one in mine:
        one.is_one_of(3)
    mine[1].is_killed()
    mine[0].is_one_of(2)
    assert "is lost" in mine[0].log()
    assert mine[0].line()["allreduce/updates_lost"] <= 1
    mine[1] = runs("1", "allreduce", resume=True)
    for one in mine:
        one.is_one_of(3)
    os.kill(mine[2].learner(), signal.SIGKILL)
    mine[2].until(lambda: "all learners go back" in mine[2].log(), "its run restarts it")
    for one in mine:
        one.is_one_of(3)
    mine[2].finish(signal.SIGTERM)
    mine[0].is_one_of(2)
    assert "has left" in mine[0].log()
    mine[0].finish(signal.SIGTERM)  # and with it the meeting: the other goes on by itself
    mine[1].until(lambda: "continues alone" in mine[1].log(), "it is reported")
    mine[1].trains()
    mine[1].finish(signal.SIGTERM)
