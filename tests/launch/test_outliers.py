"""An absurd observation is counted in the metrics and is in the log, in every acting."""

import json

import pytest

from coterie.launch.session import train
from coterie.runs.metrics import read_metrics


@pytest.mark.parametrize("acting", ["inline", "decoupled", "central"])
def test_a_clamped_observation_is_counted_and_said_once(tmp_path, acting):
    out, kwargs = tmp_path / "run", {"how": "huge_obs", "at": 72, "marker": str(tmp_path / "one")}
    settings = {
        "env.num_envs": 4, "env.kwargs": json.dumps(kwargs), "model.normalize_obs": True, "log.tensorboard": False,
        "actors": 0 if acting == "inline" else 1, "log.every": 0.0,
    }  # fmt: skip
    preset, env = "a2c" if acting == "inline" else "impala", "tests.support.flaky:FlakyEnv"
    train(preset=preset, env=env, acting=acting, steps=600, out=str(out), quiet=True, **settings)
    assert [line["normalizer/clamped"] for line in read_metrics(out)][-1] == 1
    said = [line for line in (out / "log.txt").read_text().splitlines() if "far from the mean" in line]
    assert [line.partition(" 1 ")[2] for line in said] == [
        "observation far from the mean: clamped or left out by the normalizer"
    ]
