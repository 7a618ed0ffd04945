"""Deliberate faults: what is disturbed, and that a run survives it."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from coterie.config import Chaos
from coterie.launch import chaos
from coterie.launch.chaos import FaultInjector
from coterie.launch.supervisor import Supervisor
from tests.support.runs import CROWD, ENDLESS, check_rows, decoupled_options


class World:
    """Four children that note their signals, and a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, spare=False, cut=True, seed=1) -> None:
        self.now, self.lines, self.sent = 0.0, list[str](), list[tuple[int, int]]()
        names = ("learner 0", "learner 1", "actor 0", "actor 1")
        processes = (SimpleNamespace(pid=pid, is_alive=lambda: True) for pid in range(4))
        self.children = {name: SimpleNamespace(process=x) for name, x in zip(names, processes, strict=True)}
        monkeypatch.setattr(chaos, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(chaos, "os", SimpleNamespace(kill=lambda pid, number: self.sent.append((pid, number))))
        self.it = FaultInjector(Chaos(every=2.0, seed=seed), self.lines.append, lambda name: spare, lambda: cut)

    def go(self, seconds: float, calm: bool = False) -> World:
        end = self.now + seconds
        while self.now < end:
            self.now += 0.05
            self.it.poll(self.children, calm)
        return self


def test_every_fault_happens_as_often_as_asked_and_the_same_with_the_same_seed(monkeypatch):
    one, same, other = (World(monkeypatch, seed=seed).go(2000) for seed in (1, 1, 2))
    assert one.lines == same.lines != other.lines
    assert 800 < one.it.done.total() < 1200
    assert all(one.it.done[kind] > 100 for kind in ("kill", "stop", "slow", "cut"))
    assert {pid for pid, number in one.sent if number == signal.SIGKILL} == {0, 1, 2, 3}


def test_a_stopped_process_always_continues_and_a_spared_one_is_not_killed(monkeypatch):
    world = World(monkeypatch, spare=True, cut=False).go(500)
    assert signal.SIGKILL not in {number for _, number in world.sent}
    assert world.it.done["cut"] == 0
    assert sum(number == signal.SIGSTOP for _, number in world.sent) > 200
    for leave in (lambda: world.go(20, calm=True), world.it.close):
        leave()
        for pid in range(4):
            assert [number for one, number in world.sent if one == pid][-1] == signal.SIGCONT
        world.it.due = 0.0
        world.it.poll(world.children)


def test_actors_that_are_stopped_go_on_when_they_are_to_leave(monkeypatch):
    world = World(monkeypatch, spare=True, cut=False)
    while not world.it.pending:
        world.go(0.1)
    Supervisor._dismiss_actors(Mock(chaos=world.it, children={}, **{"group.learners": 2, "run.board.counts": []}))
    assert not world.it.pending
    assert world.sent[-1][1] == signal.SIGCONT


def test_a_run_survives_chaos_with_its_rows_accounted_for(meddler, tally):
    """All that chaos did is in the log, and nothing is left behind."""
    severe = {"chaos.every": 0.4, "restarts": 2, "log.checkpoint_every": 0.3}

    def faults() -> list[str]:
        return [line for line in meddler.log().splitlines() if "chaos: " in line]

    def meddle() -> None:
        meddler.until(lambda: len(faults()) >= 6 and any("is killed" in x for x in faults()), "many faults")
        meddler.saves_again()
        meddler.interrupt()

    args = decoupled_options(meddler.out, "gossip", **{**ENDLESS, **severe, **tally.options})
    assert meddler.run(args, meddle) == 75
    summary = check_rows(meddler.out)
    # Each life of an actor may end with a step that is not counted.
    assert summary["rows"]["produced"] <= tally.steps <= summary["rows"]["produced"] + len(meddler.started) * 2 * CROWD
    assert summary["rows"]["in_flight"] <= 2 * CROWD * 5 * (3 + 2 + 1)
    assert sum(summary["chaos"].values()) == len(faults())
