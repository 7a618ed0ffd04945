"""The league: its records, what a stopped run leaves, and README's table. What other benchmarks keep."""

import json
import os
import re
import signal
import sys
import threading

import curves
import layouts
import league
import league_entries
import league_page
import pytest

from coterie import presets
from coterie.errors import ConfigError
from tests.support.waiting import wait_until
from tests.tools.report.recorded import record


def test_records():
    """Each entry's has a name of its own, which suits a file."""
    names = [entry.path.name for entry in league_entries.entries()]
    assert len([name for name in set(names) if re.fullmatch(r"[\w.-]+", name)]) == len(names)


def test_runs_whose_layout_depends_on_the_cores_have_two(tmp_path, monkeypatch, capsys):
    found = [
        entry.record["machine"]["cores"] for entry in league_entries.entries() if entry.done and league.by_cores(entry)
    ]
    assert set(found) == {league.CORES}
    monkeypatch.setattr(league, "available_cores", lambda: [0])
    league.work([league.Entry("vectors", "gala-ppo", "CartPole-v1", 9, 1000, 1, ())], tmp_path)
    assert "gala-ppo/CartPole-v1/9: needs 2 cores" in capsys.readouterr().out


def test_readme():
    assert league_page.readme(text := (league_entries.ROOT / "README.md").read_text()) == text


def test_presets_that_are_said_to_learn_have_a_record():
    kinds = {"vectors": "vectors", "mujoco": "continuous control", "atari": "images"}
    found = {(kinds[e.group], e.method) for e in league_entries.listed() if e.group in kinds and e.done}
    named = {(kind, name) for kind, names in presets.SHOWN.items() for name in names}
    assert {pair for pair in found if not pair[1].startswith("sb3-")} == named


def test_stopped_run(tmp_path, monkeypatch):
    """It leaves a record without a score, which the page shows as under way, and a checkpoint."""
    monkeypatch.setattr(league_entries, "RECORDS", tmp_path)
    metrics = tmp_path / "a2c_CartPole-v1_0" / "metrics.jsonl"

    def stop():
        wait_until(lambda: metrics.exists() and '"mean_return": ' in metrics.read_text())
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop, daemon=True).start()
    with pytest.raises(SystemExit, match="75"):
        league.work([entry := league.Entry("vectors", "a2c", "CartPole-v1", 0, 10**7, 1, ())], tmp_path)
    assert (metrics.parent / "checkpoints").exists()
    assert "*under way at " in league_page.rows({"a2c": [(entry, entry.record)]})[-1]


def test_a_record_and_a_run_of_another_budget_or_other_defaults_are_not_taken_for_this_one(tmp_path, monkeypatch):
    monkeypatch.setattr(league_entries, "RECORDS", tmp_path)
    short, long = (league.Entry("vectors", "a2c", "CartPole-v1", 0, steps, 1, ()) for steps in (1000, 2000))
    league.write(short, {"score": {}})
    assert short.done
    assert not long.done
    (tmp_path / "run").mkdir()
    (tmp_path / "run.txt").write_text(f"{short.typed}\n{json.dumps(short.settings)}\n")
    with pytest.raises(FileExistsError, match=r"is of coterie train a2c .* --steps 1000 .* other defaults: remove it"):
        league.train(long, tmp_path / "run")
    monkeypatch.setattr(league_entries, "changes", lambda *words: {"optim.lr": 1.0})
    assert not short.done
    with pytest.raises(FileExistsError, match="or of other defaults: remove it"):
        league.train(short, tmp_path / "run")
    (tmp_path / "run.txt").unlink()
    with pytest.raises(FileExistsError, match="is of a command that is not known"):
        league.train(short, tmp_path / "run")


def test_a_default_that_changed_is_part_of_the_settings(monkeypatch):
    changes, words = league_entries.changes.__wrapped__, ("a2c", "--env", "CartPole-v1")
    missing = "write new options and their defaults to benchmarks/league_defaults.json"
    assert {*league_entries.own_defaults()} == {*league_entries.DEFAULTS}, missing
    assert "ppo.clip" not in changes(*words)
    monkeypatch.setitem(league_entries.DEFAULTS, "ppo.clip", 7.0)
    assert "ppo.clip" in changes(*words)


def test_methods_are_compared_after_the_time_of_the_shortest_run():
    def runs(method, seconds, score):
        machine = {"processor": "Intel(R) Xeon(R) Processor", "cores": 2}
        record = {"machine": machine, "seconds": seconds, "curve": [[0, 0.0, 0.0], [1000, seconds, score]], "score": {}}
        return [(league.Entry("vectors", method, "CartPole-v1", 0, 1000, 1, ()), record)]

    assert league_page.same_time({"a2c": runs("a2c", 10, 200.0)}) == []
    methods = {"a2c": runs("a2c", 10, 200.0), "sac": runs("sac", 160, 400.0), "sb3-a2c": runs("sb3-a2c", 40, 90.0)}
    shown = league_page.same_time(methods)
    assert shown[1].startswith("After 40 seconds")
    assert shown[-3:] == [
        "| a2c | 1 | 1,000 | 200.0 | 2 x Intel Xeon |",
        "| sac | 1 | 250 | 100.0 | 2 x Intel Xeon |",
        "| sb3-a2c | 1 | 1,000 | 90.0 | 2 x Intel Xeon |",
    ]


def test_layouts_keep_the_results_of_other_cases_and_machines(tmp_path, monkeypatch):
    out, other = tmp_path / "a.json", '{"recorded": "2001-01-01", "cases": {"sac": {"error": "kept"}}}'
    monkeypatch.setattr(layouts, "measure", lambda options, seconds: {"error": "made up"})

    def names(kind):
        monkeypatch.setattr(sys, "argv", ["layouts.py", kind, "--only", "inline, a3c, fp32", "dqn", "--out", str(out)])
        layouts.main()
        return list(json.loads(out.read_text())["cases"])

    assert [*names("cpu"), "dqn", "dqn, no graphs"] == names("gpu")
    out.write_text(other)
    assert names("cpu") == ["inline, a3c, fp32"]
    assert (tmp_path / "a-2001-01-01.json").read_text() == other


def test_curves_have_at_most_200_points_of_a_run_and_outlive_a_typo(tmp_path, monkeypatch):
    run = record(tmp_path / "a", "ppo")
    lines = [json.dumps({"env_steps": n, "seconds": n, "mean_return": n}) for n in range(399)]
    (run / "metrics.jsonl").write_text("\n".join(lines))
    monkeypatch.setattr(curves, "CURVES", tmp_path)
    monkeypatch.setattr(sys, "argv", ["curves.py", "kept", str(run)])
    curves.main()
    sys.argv.append("typo")
    with pytest.raises(ConfigError, match="typo"):
        curves.main()
    rows = (tmp_path / "kept.csv").read_text().splitlines()
    assert (len(rows), rows[1], rows[-1]) == (201, "seed 0,0,0,0,0,", "seed 0,0,398,398,398,")
