"""Which runs are one method, its name, and what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest

from coterie.tools.report.runs import differences, find_runs, methods, read_run
from coterie.tools.report.sections import AXES, aggregates, final_return
from coterie.types import ConfigError
from tests.tools.report.recorded import record


def test_seeds_are_one_method_and_settings_name_the_others(tmp_path):
    for k in range(2):
        record(tmp_path / f"a{k}", "ppo", seed=k)
    record(tmp_path / "b", "ppo", optim__lr=1e-2)
    record(tmp_path / "c", "a2c")
    found = methods(find_runs([str(tmp_path)]))
    assert [(m.label.split(" (")[0], len(m.runs)) for m in found] == [("ppo", 2), ("ppo", 1), ("a2c", 1)]
    assert found[1].label == "ppo (optim.lr 0.01)"
    assert found[2].label == "a2c"


def test_different_envs_are_one_method(tmp_path):
    for game in ("Pong-v5", "Breakout-v5"):
        record(tmp_path / game, "ppo", env=game)
    found = methods(find_runs([str(tmp_path)]))
    assert [len(m.runs) for m in found] == [2]
    assert "env.id" in differences(found[0].runs)


def test_scores_of_atari_games_are_human_normalised(tmp_path):
    for k in range(3):
        record(tmp_path / f"p{k}", "ppo", seed=k, env="Pong-v5", level=14.6 / 0.95)
        record(tmp_path / f"b{k}", "ppo", seed=k, env="Breakout-v5", level=30.5 / 0.95)
    runs = find_runs([str(tmp_path)])
    assert final_return(runs[0]) == pytest.approx(30.5)  # of the lines from 900 env steps on: 90% and 100%
    _, table = aggregates(methods(runs))
    (row,) = table.rows
    assert "human" in table.head[1]
    assert float(row[1]) == pytest.approx(1.0, abs=0.01)  # the published human scores, which are 1


def test_envs_without_human_scores_have_no_common_scale(tmp_path):
    record(tmp_path / "c", "ppo", env="CartPole-v1", level=500)
    record(tmp_path / "l", "ppo", env="LunarLander-v3", level=200)
    _, table = aggregates(methods(find_runs([str(tmp_path)])))
    assert [row[0].split(",")[0] for row in table.rows] == ["CartPole-v1", "LunarLander-v3"]


def test_energy_accumulates_over_a_resume(tmp_path):
    record(tmp_path / "a", "ppo")
    lines = [json.loads(line) for line in (tmp_path / "a/metrics.jsonl").read_text().splitlines()]
    for line in lines[5:10]:
        line["joules"] -= 250  # a resumed run counts from zero
    (tmp_path / "a/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    _, _, per_kilojoule = AXES[2]
    x, _ = per_kilojoule(read_run(tmp_path / "a"), "mean_return")
    assert np.allclose(x, 0.05 * np.arange(1, 11))


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="not a run folder"):
        read_run(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not a run folder"):
        find_runs([str(tmp_path)])
    record(tmp_path / "sub/a", "ppo")
    with pytest.raises(ConfigError, match="given twice"):
        find_runs([str(tmp_path / "sub"), str(tmp_path / "sub/a")])
