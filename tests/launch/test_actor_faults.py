"""Actors killed at each point of their work, and runs with actors or hosts that are ended from outside."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.launch import test_central
from tests.launch.harness import ENDLESS, last_checkpoint, last_line, named_memory, read_summary, until
from tests.launch.test_decoupled import CROWD, check, options
from tests.launch.test_killed import TALLY

# For `--model.torso fatal:torso`: actor 0 kills itself, once, around the fifth call of one method.
FATAL = """
import multiprocessing
import os
import signal
from pathlib import Path

from coterie.models.mlp import MLPTorso
from coterie.parallel.slots import Slots
from coterie.parallel.weights import Weights

MARK, OWNER, NAME, AFTER = Path({mark!r}), {owner}, {name!r}, {after}
done, call = 0, getattr(OWNER, NAME)


def die():
    if done == 5 and not MARK.exists():
        MARK.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def fatal(self, *args, **kwargs):
    global done
    if not AFTER:
        die()
    out = call(self, *args, **kwargs)
    done += out is not None or NAME != "take"  # who finds no slot asks again
    if AFTER:
        die()
    return out


def torso(obs, config):
    if multiprocessing.current_process().name == "coterie-actor-0":
        setattr(OWNER, NAME, fatal)
    return MLPTorso(obs[""].shape, config.hidden, config.activation, False)
"""
LOCKSTEP = {"decoupled.lockstep": True}


@pytest.mark.parametrize(
    ("point", "exchange", "changes"),
    [
        ("before Weights.read", "solo", {}),
        ("after Weights.read", "store", {}),
        ("before Slots.take", "solo", LOCKSTEP),
        ("after Slots.take", "hogwild", {}),  # it holds a slot of which nothing is written
        ("after Slots.take", "solo", LOCKSTEP),
        ("before Slots.promise", "store", {}),  # all rows are counted, and nobody is told of them
        ("after Slots.promise", "gossip", {}),
        ("before Slots.fill", "solo", {}),
        ("after Slots.fill", "hogwild", {}),  # the learner has them, but they are not said to be delivered
        ("after Slots.fill", "solo", LOCKSTEP),
    ],
)
def test_an_actor_killed_at_a_point_of_its_work(tmp_path, monkeypatch, meddler, point, exchange, changes):
    when, method = point.split()
    owner, name = method.split(".")
    mark, tally = tmp_path / "mark", tmp_path / "tally"
    (tmp_path / "tally_env.py").write_text(TALLY)
    (tmp_path / "fatal.py").write_text(FATAL.format(mark=str(mark), owner=owner, name=name, after=when == "after"))
    monkeypatch.syspath_prepend(str(tmp_path))
    for module in ("fatal", "tally_env"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    own = {"env.id": "tally_env:Tally", "env.kwargs": json.dumps({"path": str(tally)}), "model.torso": "fatal:torso"}

    def wait_and_end() -> None:
        meddler.until(lambda: [r for r, _ in meddler.started].count("actor 0") == 2, "it is started again")
        steps = meddler.steps()
        meddler.until(lambda: meddler.steps() > steps + 20 * CROWD, "the run goes on")
        os.kill(os.getpid(), signal.SIGTERM)

    assert meddler.run(options(meddler.out, exchange, **{**ENDLESS, **own, **changes}), wait_and_end) == 75
    assert mark.exists()
    summary = check(meddler.out)
    assert (meddler.out / "log.txt").read_text().count("actor 0 was killed by SIGKILL") == 1
    assert summary["rows"]["rolled_back"] == 0
    actors, width = (2 if exchange == "solo" else 4), CROWD // 2
    # Only what it had not handed over when it was killed, which is a whole rollout at these three points.
    lost = point in ("before Slots.promise", "after Slots.promise", "before Slots.fill")
    assert summary["rows"]["dropped"] in (range(1, 5 * width + 1) if lost else [0])
    # Of each life a step that nobody saw.
    produced = summary["rows"]["produced"]
    assert produced <= tally.stat().st_size <= produced + (actors + 1) * 2 * width
    meddler.check_nothing_left()


def arguments(out: Path, acting: str, **changes: object) -> list[str]:
    return (options if acting == "decoupled" else test_central.options)(out, **{**ENDLESS, **changes})


@pytest.mark.parametrize("acting", ["decoupled", "central"])
def test_shared_memory_has_no_name_and_all_are_gone_after_a_signal(meddler, acting):
    def interrupt() -> None:
        meddler.at_work()
        assert {r for r, _ in meddler.started} > {0}
        for _, pid in meddler.started:
            assert not named_memory(pid)
        os.kill(os.getpid(), signal.SIGTERM)

    assert meddler.run(arguments(meddler.out, acting), interrupt) == 75
    check(meddler.out)
    meddler.check_nothing_left()


@pytest.mark.parametrize("acting", ["decoupled", "central"])
def test_a_second_signal_ends_actors_at_once(meddler, acting, capsys):
    """They are in the middle of an env step of a minute, or on the way to one."""
    own, sent = {"env.delay": 60, "steps": 10**9}, []

    def interrupt_twice() -> None:
        children = 3 if acting == "decoupled" else 2
        meddler.until(lambda: len(meddler.started) >= children and meddler.saved() == 0, "all are started")
        time.sleep(1)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            sent.append(time.monotonic())
            time.sleep(0.3)

    assert meddler.run(arguments(meddler.out, acting, **own), interrupt_twice) == 1
    assert time.monotonic() - sent[1] < 30
    assert last_line(capsys) == "coterie: stopped at once; the last checkpoint stands"
    assert read_summary(meddler.out)["status"] == "failed"
    last_checkpoint(meddler.out)
    meddler.check_nothing_left()


@pytest.mark.parametrize("acting", ["decoupled", "central"])
def test_actors_go_with_a_killed_parent(outside, acting):
    run = outside(make=lambda out: arguments(out, acting, **{"env.id": "coterie.envs.testing:CountingEnv"}))
    run.wait_for("metrics.jsonl")
    alive = run.processes()
    assert len(alive) >= 5  # parent, fork server, learner, who acts, an env worker
    run.process.kill()
    run.process.wait()
    until(lambda: not run.processes(), "all are gone", 10)
