"""What befell the envs of a run befalls them again in its replay."""

from __future__ import annotations

import pytest

from coterie.flight.record import read_life
from coterie.roles.callbacks import Callback
from tests.tools.replay.test_replay import LAYOUTS, assert_equal, replayed, run

ENV = {"env.id": "tests.support.mortal_env:Mortal", "env.threads": 1}


class Longer(Callback):
    """Episodes become longer as the run goes on."""

    def on_rollout(self, run):
        if run.env_steps >= 300:
            run.set_env("length", 5 + run.env_steps // 300)


def events(folder, kind):
    return [event for path in (folder / "flight").glob("*[0-9]") for event in read_life(path).of(kind)]


@pytest.mark.parametrize("layout", ["a2c", "impala", "seed"])
def test_envs_that_died_are_replaced_again(tmp_path, monkeypatch, layout):
    summary = run(tmp_path / "run", **LAYOUTS[layout], **ENV)
    assert sum(len(ids) for _, _, ids in events(tmp_path / "run", "replaced")) == summary["envs_replaced"] > 0
    monkeypatch.setenv("REPLAYED", "1")
    assert_equal(replayed(tmp_path / "run"))


@pytest.mark.parametrize("layout", ["a2c", "impala", "seed"])
def test_envs_that_failed_as_they_were_made_are_replaced_again(tmp_path, monkeypatch, layout):
    """Some at the first reset, and some of those in their place as they were made."""
    failing = {"env.id": "tests.support.mortal_env:Stillborn", "env.threads": 1, "env.on_error": "replace"}
    run(tmp_path / "run", **LAYOUTS[layout], **failing)
    found = [answers for _, answers, _ in events(tmp_path / "run", "replaced")]
    assert {1, 2} <= set(found)
    monkeypatch.setenv("REPLAYED", "1")
    assert_equal(replayed(tmp_path / "run"))


@pytest.mark.parametrize("layout", ["a2c", "impala", "seed"])
def test_attributes_are_set_again(tmp_path, monkeypatch, layout):
    monkeypatch.setenv("REPLAYED", "1")
    run(tmp_path / "run", [Longer], **LAYOUTS[layout], **ENV)
    assert events(tmp_path / "run", "set")
    assert_equal(replayed(tmp_path / "run"))
