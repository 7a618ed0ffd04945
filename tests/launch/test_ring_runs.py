"""Runs whose learners make every update together, each in a network namespace of its own, as processes of their own."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import made_by
from tests.launch.namespaces import bridged, ip
from tests.launch.test_linked_runs import ENDLESS, Linked
from tests.support.net import free_port
from tests.support.process_table import family
from tests.support.runs import inline_options

# Runs start processes for minutes. tests/exchange/test_elastic.py shows the same in one process.
pytestmark = pytest.mark.slow
Machines = list[tuple[str, str, str]]


@pytest.fixture
def machines() -> Iterator[tuple[str, Machines]]:
    with bridged(2, "a") as found:
        yield found


class Ringed(Linked):
    def is_one_of(self, machines: int) -> None:
        """So many machines train together, and go on."""
        self.until(lambda: self.line().get("allreduce/machines") == machines, f"a group of {machines}: {self.line()}")
        steps = self.line()["learner_steps"]
        self.until(lambda: self.line()["learner_steps"] > steps + 20, "they train")

    def learner(self) -> int:
        """The process of learner 0: the first that its fork server has forked."""
        forked = [pid for pid in family(self.process.pid) if b"forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        return sorted(forked)[1]


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Callable[..., Ringed]]:
    def start(number: int, prefix: tuple[str, ...] = (), resume: bool = False, **changes: object) -> Ringed:
        out = tmp_path / str(number)
        own = {
            "learners": 1, "steps": ENDLESS, "env.delay": 0.002, "log.checkpoint_every": 0.5, "seed": number,
            "allreduce.trusted_network": True, **changes,
        }  # fmt: skip
        return Ringed(["resume", str(out)] if resume else inline_options(out, "allreduce", **own), out, prefix)

    yield from made_by(start, Ringed.close)


def inside(name: str) -> tuple[str, ...]:
    return ("ip", "netns", "exec", name)


def begin(runs: Callable[..., Ringed], here: str, machines: Machines, **changes: object) -> list[Ringed]:
    at = f"{here}:{free_port()}"
    hub = runs(0, **{"allreduce.bind": at, "allreduce.machines": 1 + len(machines), **changes})
    return [
        hub,
        *(
            runs(k, prefix=inside(name), **{"allreduce.connect": at, **changes})
            for k, (name, _, _) in enumerate(machines, 1)
        ),
    ]


def test_a_machine_is_lost_and_another_leaves(runs, machines):
    """All processes of one are killed at once, and it is resumed; the others lose at most one rollout."""
    here, others = machines
    mine = begin(runs, here, others)
    for one in mine:
        one.is_one_of(3)
    lost = mine[1]
    lost.until(lambda: list(lost.out.glob("checkpoints/step_*")), "it has a checkpoint")
    lost.process.kill()
    lost.process.wait()
    mine[0].is_one_of(2)
    assert "is lost" in mine[0].log()
    assert mine[0].line()["allreduce/updates_lost"] <= 1
    mine[1] = runs(1, prefix=inside(others[0][0]), resume=True)
    for one in mine:
        one.is_one_of(3)
    mine[2].finish(signal.SIGTERM)
    mine[0].is_one_of(2)
    assert "has left" in mine[0].log()
    mine[0].finish(signal.SIGTERM)  # and with it the meeting: the other goes on by itself
    mine[1].until(lambda: "goes on by itself" in mine[1].log(), "it is told")
    mine[1].trains()
    mine[1].finish(signal.SIGTERM)


@pytest.mark.parametrize("away", [3.0, 40.0])
def test_machines_group_again_after_a_link_was_cut(runs, machines, away):
    here, others = machines
    mine = begin(runs, here, others)
    for one in mine:
        one.is_one_of(3)
    ip("link", "set", others[0][2], "down")
    time.sleep(away)
    if away > 20:
        for one in (mine[0], mine[2]):
            one.is_one_of(2)
    ip("link", "set", others[0][2], "up")
    for one in mine:
        one.is_one_of(3)
    for one in reversed(mine):
        one.finish(signal.SIGTERM)


@pytest.mark.parametrize("number", [0, 1])
def test_a_killed_learner_restarts_with_its_machine(runs, machines, number):
    """Also that of the machine where all meet; the run that it is of starts it again."""
    here, others = machines
    mine = begin(runs, here, others[:1], learners=2)
    for one in mine:
        one.is_one_of(2)
    one = mine[number]
    one.until(lambda: list(one.out.glob("checkpoints/step_*")), "it has a checkpoint")
    os.kill(one.learner(), signal.SIGKILL)
    one.until(lambda: "all learners go back" in one.log(), "it is missed")
    for each in mine:
        each.is_one_of(2)
    for each in reversed(mine):
        each.finish(signal.SIGTERM)
