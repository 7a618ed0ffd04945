"""Which runs are one method, its name, what is refused, and the statistics of several runs."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import numpy as np
import pytest

from coterie.errors import ConfigError, CoterieError
from coterie.tools.report.runs import differences, find_runs, methods, read_run
from coterie.tools.report.sections import AXES, aggregates, diagnostics, returns
from coterie.tools.report.stats import band, interquartile_mean, interval, on_grid
from coterie.tools.report.tables import final_return, outcomes
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


def test_a_method_is_named_by_as_few_options_as_tell_it_from_others_of_its_preset(tmp_path):
    record(tmp_path / "a", "ppo", model__hidden=(8,), algo__gamma=0.9, ppo__epochs=2)
    for k, changes in enumerate(({"algo__gae_lambda": 0.5}, {"reward__scale": 0.5}, {"actors": 2}, {"learners": 2})):
        record(tmp_path / f"b{k}", "ppo", **changes)
    record(tmp_path / "c", "ppo", optim__lr=0.5, algo__gae_lambda=0.5)
    labels = [m.label for m in methods(find_runs([str(tmp_path)]))]
    assert labels == [
        "ppo (model.hidden 8)", "ppo (algo.gae_lambda 0.5)", "ppo (reward.scale 0.5)", "ppo (actors 2)",
        "ppo (learners 2)", "ppo (optim.lr 0.5)",
    ]  # fmt: skip


def test_runs_on_different_envs_are_one_method(tmp_path):
    for game in ("Pong-v5", "Breakout-v5"):
        record(tmp_path / game, "ppo", env=game)
    found = methods(find_runs([str(tmp_path)]))
    assert [len(m.runs) for m in found] == [2]
    assert "env.id" in differences(found[0].runs)


def test_runs_of_different_lengths_are_different_methods_unless_each_env_has_one(tmp_path):
    for game, steps, seed in (("Pong-v5", 500, 0), ("Pong-v5", 500, 1), ("Breakout-v5", 900, 0)):
        record(tmp_path / f"{game}{seed}", "ppo", seed, game, steps=steps)
    record(tmp_path / "a2c", "a2c", 0, "Pong-v5", steps=300)
    assert [len(m.runs) for m in methods(find_runs([str(tmp_path)]))] == [3, 1]
    record(tmp_path / "z", "ppo", 2, "Pong-v5", steps=700)
    found = methods(find_runs([str(tmp_path)]))
    assert [m.label for m in found if m.runs[0].preset == "ppo"] == [
        "ppo (steps 900)",
        "ppo (steps 500)",
        "ppo (steps 700)",
    ]


def test_files_that_a_sweep_leaves_beside_its_runs_are_left_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a-seed0", "a-seed1"):
        record(tmp_path / name, "ppo", seed=int(name[-1]))
    for name in (f"{x}{end}" for x in ("a-seed2", "a-seed0-step_9-eval10") for end in (".args.json", ".json", ".txt")):
        (tmp_path / name).touch()  # the third run did not begin
    assert [run.folder.name for run in find_runs(sorted(map(str, Path().glob("a-*"))))] == ["a-seed0", "a-seed1"]
    for wrong in (["a-seed0", "a-seed1/config.json"], ["a-seed2.txt"]):
        with pytest.raises(CoterieError, match="not a run folder"):
            find_runs(wrong)


def test_scores_of_atari_games_are_human_normalized(tmp_path):
    for k in range(3):
        record(tmp_path / f"p{k}", "ppo", seed=k, env="Pong-v5", level=14.6 / 0.95)
        record(tmp_path / f"b{k}", "ppo", seed=k, env="Breakout-v5", level=30.5 / 0.95)
    runs = find_runs([str(tmp_path)])
    assert final_return(runs[0]) == pytest.approx(30.5)  # of the lines from 900 env steps on: 90% and 100%
    _, table = aggregates(methods(runs))
    (row,) = table.rows
    assert "human" in table.head[1]
    assert float(row[1]) == pytest.approx(1.0, abs=0.01)  # the published human scores, which are 1


def test_methods_are_compared_over_the_games_that_all_have_finished(tmp_path):
    for name, env, level in (("a2c", "Pong-v5", 14), ("a2c", "Breakout-v5", 9), ("ppo", "Pong-v5", 13)):
        record(tmp_path / f"{name}{env}", name, env=env, level=level)
    _, table = aggregates(methods(find_runs([str(tmp_path)])))
    first, second = (float(row[1]) for row in table.rows)  # of a2c and ppo on Pong
    assert first > second
    assert "Left out: Breakout-v5, where not every method has a finished run" in table.text
    unfinished = record(tmp_path / "impala", "impala", env="Pong-v5")
    (unfinished / "summary.json").unlink()
    (unfinished / "metrics.jsonl").write_text((unfinished / "metrics.jsonl").read_text().splitlines()[0] + "\n")
    assert aggregates(methods(find_runs([str(tmp_path)])))[1].rows == table.rows  # which has none anywhere


def test_runs_with_the_same_seed_are_not_called_seeds(tmp_path):
    for k in range(2):
        record(tmp_path / f"p{k}", "ppo", seed=3, env="Pong-v5")
    found = methods(find_runs([str(tmp_path)]))
    assert "the same seed" in aggregates(found)[1].text
    assert "ppo, 2 runs" in str(returns(found))


def test_runs_that_failed_or_ended_early_are_not_taken_for_whole_ones(tmp_path):
    for k in range(4):
        record(tmp_path / "sweep" / f"p{k}", "ppo", seed=k, steps=1000)
    (failed, early, silent) = (tmp_path / "sweep" / f"p{k}" for k in (1, 2, 3))
    (failed / "metrics.jsonl").write_text("".join((failed / "metrics.jsonl").read_text().splitlines(True)[:3]))
    (failed / "summary.json").write_text('{"status": "failed"}')
    (early / "summary.json").write_text('{"status": "finished", "reason": "should_stop of Best", "env_steps": 600}')
    (early / "metrics.jsonl").write_text("".join((early / "metrics.jsonl").read_text().splitlines(True)[:3]))
    record(tmp_path / "alone", "ppo", seed=4, steps=1000)
    (silent / "metrics.jsonl").write_text('{"env_steps": 1000, "seconds": 2.0}\n')
    found = methods(find_runs([str(tmp_path)]))  # two levels above them
    assert "Not drawn: 3 runs that did not go to their end, or with too few values" in str(chart := returns(found)[0])
    assert "ppo, 2 seeds" in str(chart)
    text = aggregates(found)[1].text
    silent_one = "1 run without a score: no episode ended, or none of a task."
    for left in ("1 unfinished run.", f"{silent_one} 1 run ended before the env steps"):
        assert left in text
    assert outcomes(found).rows[3][4] == "finished: should_stop of Best"


def test_the_shares_of_time_are_of_all_time(tmp_path):
    record(tmp_path / "a", "ppo")
    lines = [
        {"env_steps": 50, "seconds": 2.0, "stage/train": 1.0, "stage/env": 0.0},
        {"env_steps": 50, "seconds": 8.0, "stage/train": 0.0, "stage/env": 0.0},  # it waits for an evaluation
        {"env_steps": 100, "seconds": 10.0, "stage/train": 0.5, "stage/env": 0.5},
    ]
    (tmp_path / "a" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shown = str(diagnostics(methods([read_run(tmp_path / "a")])[0]))
    assert "On average train 30%, env 10%; 60% in none of these, such as evaluations." in shown


def test_a_run_whose_process_is_gone_is_not_running(tmp_path):
    for name, pid in (("gone", 2**22 + 1), ("on", os.getpid())):
        record(tmp_path / name, "ppo")
        (tmp_path / name / "summary.json").unlink()
        (tmp_path / name / ".lock").write_text(f"pid {pid} on {socket.gethostname()}\n")
    assert [row[4] for row in outcomes(methods(find_runs([str(tmp_path)]))).rows] == ["killed", "running"]


def test_an_evaluation_of_earlier_env_steps_is_not_where_a_run_is(tmp_path):
    record(tmp_path / "a", "ppo", steps=100)
    (tmp_path / "a" / "summary.json").unlink()
    lines = [{"env_steps": 100, "seconds": 2.0, "env_steps_per_s": 50.0}, {"env_steps": 60, "seconds": 1.0}]
    (tmp_path / "a" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = read_run(tmp_path / "a")
    assert run.finished
    assert outcomes(methods([run])).rows[0][5:8] == ["100", "2", "50"]


def test_the_same_class_from_two_sessions_is_one_method(tmp_path):
    for k, token in enumerate(("k3j2x9ab", "z8y7w6cd")):
        record(tmp_path / f"a{k}", "ppo", seed=k, model__torso=f"pickle:Mine.5f3e1a2b@{token}")
    found = methods(find_runs([str(tmp_path)]))
    assert [(m.label, len(m.runs), m.runs[0].config["model.torso"]) for m in found] == [("ppo", 2, "Mine")]


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


@pytest.mark.parametrize("damaged", ["{", "[1]"])
def test_a_damaged_summary_is_as_none(tmp_path, damaged):
    folder = record(tmp_path / "a", "ppo")
    (folder / "summary.json").write_text(damaged)
    assert read_run(folder).summary == {}


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="not a run folder"):
        read_run(tmp_path)
    for damaged in ("{", "[1]"):
        (tmp_path / "config.json").write_text(damaged)
        with pytest.raises(ConfigError, match="not a run folder"):
            find_runs([str(tmp_path)])
    record(tmp_path / "sub/a", "ppo")
    with pytest.raises(ConfigError, match="given twice"):
        find_runs([str(tmp_path / "sub"), str(tmp_path / "sub/a")])


def test_files_that_a_sweep_wrote_beside_a_run_are_passed_over(tmp_path):
    for k in (0, 1):
        record(tmp_path / f"sweep-lr-{k}", "ppo", seed=k)
        for suffix in (".args.json", ".txt"):
            (tmp_path / f"sweep-lr-{k}{suffix}").write_text("[]")
    assert [run.seed for run in find_runs(sorted(map(str, tmp_path.glob("sweep-*"))))] == [0, 1]


def test_the_interquartile_mean_is_of_the_middle_half():
    assert interquartile_mean(np.array([9.0, -100, 2, 4, 1e6, 3, 5, 8])) == pytest.approx((3 + 4 + 5 + 8) / 4)
    assert interquartile_mean(np.array([1.0, 2.0, 6.0])) == pytest.approx(3.0)  # a quarter of three is none
    assert interquartile_mean(np.arange(10.0).reshape(2, 5)) == pytest.approx(np.arange(2, 8).mean())


def test_an_interval_covers_the_mean_at_its_level():
    rng = np.random.default_rng(3)
    hits = 0
    for k in range(200):
        low, high = interval([rng.normal(5, 2, 20), rng.normal(1, 2, 20)], np.mean, seed=k)
        hits += low < 3 < high
    assert 0.88 <= hits / 200 <= 0.99


def test_the_bootstrap_of_an_interval_is_stratified_by_game():
    low, high = interval([np.full(5, 0.0), np.full(5, 10.0)], np.mean)
    assert low == high == 5.0  # mixed together, a draw could be all of one game


def test_one_run_has_no_confidence_interval():
    assert np.isnan(interval([np.array([3.0]), np.array([4.0])])).all()
    middle, low, high = band(np.array([[1.0, 2.0]]))
    assert middle.tolist() == [1.0, 2.0]
    assert np.isnan([low, high]).all()


def test_a_band_contains_the_mean_and_shrinks_where_curves_agree():
    middle, low, high = band(np.array([[1.0, 4.0], [3.0, 4.0], [5.0, 4.0]]))
    assert middle.tolist() == [3.0, 4.0]
    assert low[0] < 3 < high[0]
    assert low[1] == high[1] == 4.0


def test_curves_are_interpolated_on_their_common_range():
    grid, curves = on_grid([(np.array([0.0, 10]), np.array([0.0, 10])), (np.array([4.0, 8]), np.array([1.0, 3]))], 5)
    assert grid.tolist() == [4, 5, 6, 7, 8]
    assert curves.tolist() == [[4, 5, 6, 7, 8], [1, 1.5, 2, 2.5, 3]]
    assert on_grid([(np.array([0.0, 1]), np.zeros(2)), (np.array([2.0, 3]), np.zeros(2))])[0].size == 0
    assert on_grid([(np.empty(0), np.empty(0))])[0].size == 0
    assert on_grid([(np.array([2.0, 3]), np.ones(2)), (np.ones(1), np.ones(1))], 2)[1].tolist() == [[1, 1]]
