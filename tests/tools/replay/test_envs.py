"""What befell the envs of a run befalls them again in its replay."""

from __future__ import annotations

import pytest

from coterie.flight.record import read_life
from coterie.roles.callbacks import Callback
from coterie.runs.config_io import load_config, replace, save_config
from tests.tools.replay.test_replay import LAYOUTS, assert_equal, replayed, run

ENV = {"env.id": "tests.support.mortal_env:Mortal", "env.threads": 1, "env.on_error": "replace"}


class Longer(Callback):
    """Episodes become longer as the run goes on."""

    def on_rollout(self, run):
        if run.env_steps >= 300:
            run.set_env("length", 5 + run.env_steps // 300)


def events(folder, kind):
    return [event for path in (folder / "flight").glob("*[0-9]") for event in read_life(path).of(kind)]


@pytest.mark.parametrize("layout", ["a2c", "impala", "seed"])
def test_envs_that_failed_and_died_are_replaced_again_and_attributes_are_set_again(tmp_path, monkeypatch, layout):
    """Some failed at the first reset, and some of those in their place as they were made."""
    folder = tmp_path / "run"
    summary = run(folder, [Longer], **LAYOUTS[layout], **ENV, steps=900)
    replaced = events(folder, "replaced")
    assert sum(len(ids) for _, _, ids in replaced) == summary["envs_replaced"]
    answers = {answers for _, answers, _ in replaced}
    assert {1, 2} <= answers
    assert max(answers) > 19  # those that died
    assert events(folder, "set")
    monkeypatch.setenv("REPLAYED", "1")
    save_config(folder / "config.json", replace(load_config(folder / "config.json"), {"env.replace_budget": 1}))
    assert_equal(replayed(folder))
