"""Faults on purpose: what is disturbed, and that the run bears it."""

from __future__ import annotations

import json
import os
import signal
from types import SimpleNamespace

import pytest

from coterie.cli.main import main
from coterie.config import Chaos
from coterie.launch import chaos
from coterie.launch.chaos import Disturber
from tests.launch import test_central, test_decoupled
from tests.launch.harness import ENDLESS, options
from tests.launch.test_decoupled import CROWD, check
from tests.launch.test_killed import TALLY


class Run:
    """Children that only note their signals, and a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, spare=lambda row: False, cut=lambda: False, **own) -> None:
        self.now, self.lines, self.sent = 0.0, list[str](), list[tuple[int, int]]()
        self.children = {row: SimpleNamespace(process=SimpleNamespace(pid=row)) for row in range(4)}
        monkeypatch.setattr(chaos, "time", SimpleNamespace(monotonic=lambda: self.now))
        fake = SimpleNamespace(kill=lambda pid, number: self.sent.append((pid, number)))
        monkeypatch.setattr(chaos, "os", fake)
        own = Chaos(**{"every": 2.0, **own})
        self.it = Disturber(own, 2, self.lines.append, lambda row: f"number {row}", spare, cut)

    def go(self, seconds: float, calm: bool = False) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += 0.05
            self.it.poll(self.children, calm)


def test_everything_happens_as_often_as_asked_and_the_same_with_the_same_seed(monkeypatch):
    one, same, other = (Run(monkeypatch, cut=lambda: True, seed=s) for s in (1, 1, 2))
    for run in (one, same, other):
        monkeypatch.setattr(chaos, "time", SimpleNamespace(monotonic=lambda run=run: run.now))
        monkeypatch.setattr(chaos, "os", SimpleNamespace(kill=lambda p, n, run=run: run.sent.append((p, n))))
        run.it.due = run.it._pause()
        run.go(2000)
    assert one.lines == same.lines != other.lines
    assert 800 < one.it.done.total() < 1200
    assert all(one.it.done[kind] > 100 for kind in ("kill", "stop", "slow", "cut"))
    assert {pid for pid, number in one.sent if number == signal.SIGKILL} == set(one.children)


def test_who_was_stopped_goes_on(monkeypatch):
    run = Run(monkeypatch, spare=lambda row: True)
    run.go(500)
    assert signal.SIGKILL not in {number for _, number in run.sent}
    stops = sum(number == signal.SIGSTOP for _, number in run.sent)
    assert stops > 200
    run.go(20, calm=True)
    assert (run.it.resting, run.it.slowed) == ({}, {})
    for row in run.children:
        assert [number for pid, number in run.sent if pid == row][-1] == signal.SIGCONT
    run.it.due = 0
    run.it.poll(run.children)
    before = len(run.sent)
    run.it.close()
    assert all(number == signal.SIGCONT for _, number in run.sent[before:])


def test_without_links_there_is_nothing_to_cut(monkeypatch):
    run = Run(monkeypatch)
    run.go(500)
    assert run.it.done["cut"] == 0
    assert run.it.done["stop"] > run.it.done["slow"]


def test_a_process_of_its_own_has_to_be_there(capsys):
    assert main(["train", "ppo", "--env", "CartPole-v1", "--chaos"]) == 2
    assert "chaos.every: a lone learner that acts itself has no processes to disturb" in capsys.readouterr().err


SEVERE = {"chaos.every": 0.4, "restarts": 2, "log.checkpoint_every": 0.3}


@pytest.mark.parametrize(
    ("kind", "exchange"),
    [("inline", "gossip"), ("decoupled", "allreduce"), ("central", "gossip"), ("inline", "store")],
)
def test_a_run_bears_it(tmp_path, meddler, monkeypatch, kind, exchange):
    """With its accounts in order (the envs count their steps themselves), everything that chaos did in the log, and
    nothing left behind.
    """
    tally = tmp_path / "tally"
    (tmp_path / "tally_env.py").write_text(TALLY)
    monkeypatch.syspath_prepend(str(tmp_path))
    env = {"env.id": "tally_env:Tally", "env.kwargs": json.dumps({"path": str(tally)}), "env.delay": 0.01}
    monkeypatch.setattr(chaos, "_STOPPED_S", (0.1, 1.0))
    monkeypatch.setattr(chaos, "_SLOWED_S", 1.0)
    how = {**ENDLESS, **SEVERE, **env, "env.num-envs": CROWD}
    args = {
        "inline": lambda: options(meddler.out, exchange, **how),
        "decoupled": lambda: test_decoupled.options(meddler.out, exchange, **{**how, "learners": 2, "actors": 4}),
        "central": lambda: test_central.options(meddler.out, exchange, **{**how, "learners": 2, "actors": 2}),
    }[kind]()

    def said() -> list[str]:
        log = meddler.out / "log.txt"
        return [line for line in log.read_text().splitlines() if "chaos: " in line] if log.exists() else []

    def meddle() -> None:
        meddler.until(lambda: len(said()) >= 12 and any("is killed" in x for x in said()), "a lot happens")
        at = meddler.saved()
        meddler.until(lambda: meddler.saved() > at, "it learns on")
        os.kill(os.getpid(), signal.SIGTERM)

    assert meddler.run(args, meddle) == 75
    summary = json.loads((meddler.out / "summary.json").read_text())
    rows = summary["rows"]
    assert rows["produced"] == rows["learned"] + rows["in_flight"] + rows["dropped"] + rows["rolled_back"]
    assert min(rows.values()) >= 0
    # Of who is killed, or leaves, what it was at may be in nobody's books: an inline learner's rollout, else a step.
    starts, unroll = len(meddler.started), 8 if kind == "inline" else 2
    assert rows["produced"] <= tally.stat().st_size <= rows["produced"] + starts * CROWD * unroll
    assert rows["in_flight"] <= 2 * CROWD * 5 * (3 + 2 + 1)
    assert sum(summary["chaos"].values()) == len(said())
    if kind != "inline":
        check(meddler.out)
    meddler.check_nothing_left()
