"""Actors killed at each point of their work."""

from __future__ import annotations

import pytest

from tests.support.runs import CROWD, ENDLESS, check_rows, decoupled_options

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
    done += out is not None or NAME != "take"  # an actor that finds no slot tries again
    if AFTER:
        die()
    return out


def torso(obs, config):
    if multiprocessing.current_process().name == "coterie-actor-0":
        setattr(OWNER, NAME, fatal)
    return MLPTorso(obs[""].shape, config.hidden, config.activation, False)
"""
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("point", "exchange", "changes"),
    [
        pytest.param("before Weights.read", "solo", {}, marks=slow),
        ("after Slots.take", "solo", {}),  # it holds a slot of which nothing is written
        # All rows are counted, and none are delivered.
        pytest.param("before Slots.promise", "store", {}, marks=slow),
        ("before Slots.fill", "gossip", {}),
        # The learner has them, but they are not counted as delivered.
        pytest.param("after Slots.fill", "solo", {"decoupled.lockstep": True}, marks=slow),
    ],
)
def test_an_actor_killed_at_any_point_loses_at_most_its_rollout(
    tmp_path, meddler, module, tally, point, exchange, changes
):
    when, method = point.split()
    owner, name = method.split(".")
    mark = tmp_path / "mark"
    module("fatal", FATAL.format(mark=str(mark), owner=owner, name=name, after=when == "after"))

    def wait_and_end() -> None:
        meddler.until(lambda: meddler.starts("actor 0") == 2, "it is restarted")
        steps = meddler.steps()
        meddler.until(lambda: meddler.steps() > steps + 20 * CROWD, "the run goes on")
        meddler.interrupt()

    fields = {**ENDLESS, **tally.options, "model.torso": "fatal:torso", **changes}
    assert meddler.run(decoupled_options(meddler.out, exchange, **fields), wait_and_end) == 75
    assert mark.exists()
    rows = check_rows(meddler.out)["rows"]
    assert meddler.log().count("actor 0 was killed by SIGKILL") == 1
    assert rows["rolled_back"] == 0
    actors, width = (2 if exchange == "solo" else 4), CROWD // 2
    lost = point in ("before Slots.promise", "before Slots.fill")  # a whole rollout
    assert rows["dropped"] in (range(1, 5 * width + 1) if lost else [0])
    # Each life of an actor ends with a step that is not counted.
    assert rows["produced"] <= tally.steps <= rows["produced"] + (actors + 1) * 2 * width
    meddler.check_nothing_left()
