"""What callbacks record that is no number."""

from __future__ import annotations

import math

import pytest

import coterie
from coterie import presets
from coterie.errors import CoterieError
from coterie.runs.metrics import read_metrics


class Odd(coterie.Callback):
    """Records a number that is none, and what is no number."""

    def on_rollout(self, run):
        run.record("odd", math.nan)
        run.record("unknown yet", None)
        if run.env_steps > 100:
            run.record("word", "two")


def test_what_a_callback_records_that_is_no_number(tmp_path):
    small = {"env.num_envs": 4, "algo.unroll_length": 8, "log.tensorboard": False, "log.every": 0.0}
    config = presets.a2c(env="CartPole-v1", steps=10**6, out=str(tmp_path / "run"), **small)
    with pytest.raises(CoterieError, match=r"record\('word'\) takes a number, not str"):
        coterie.train(config, callbacks=[Odd], quiet=True)
    lines = read_metrics(tmp_path / "run")
    assert lines[-1]["custom/odd"] is None
    assert "custom/unknown yet" not in lines[-1]
    assert "mean_return" in lines[-1]  # no further line that has only what is new
