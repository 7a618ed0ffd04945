"""The command `coterie reproduce`: what it runs, keeps, writes, announces, and refuses."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest

from coterie.cli.main import main
from coterie.errors import ConfigError
from coterie.tools.report.runs import read_run
from coterie.tools.reproduce import command, runs
from coterie.tools.reproduce.figure import FIGURES, ArmResult, read_figures
from coterie.tools.reproduce.runs import sized
from tests.tools.report.recorded import record

ONE_FIGURE = """
source = "A paper"
[words]
base = "ppo --env {env}"
[figure.test-1]
title = "Figure 1: a test"
claim = "PPO is fast."
checks = [{ measure = "rate", above = "PPO", below = 500 }]
x = "simulators"
draw = ["swept rate"]
smoke = { steps = 500, envs = "CartPole-v1", simulators = [2, 4], seeds = 3 }
small = { steps = 500, envs = "CartPole-v1", simulators = [2] }
full = { steps = 500, envs = "CartPole-v1", simulators = [2] }
smaller = "Everything."
runs.PPO = "{base} --env.num-envs {simulators}"
paper.PPO = ["12"]
"""


@pytest.mark.slow
def test_a_page_pictures_numbers_and_tables_are_written_and_drawn_again_without_new_runs(tmp_path, capsys):
    """The distance to consensus of three learners, at the smallest budget."""
    words = ["reproduce", "gala-2a", "--budget", "smoke", "--out", str(tmp_path)]
    assert main(words) == 0
    smoke = tmp_path / "gala-2a" / "smoke"
    page = (smoke / "index.html").read_text()
    assert "coterie reproduce gala-2a --budget smoke: 4,000 env steps of each run, 1 seed, CartPole-v1." in page
    assert "CartPole-v1 stands for the six Atari games" in page  # how it differs from the paper
    assert "remarkably tight" in page  # what the paper states
    assert "<svg" in page
    assert (smoke / "1.svg").read_text().startswith("<svg")
    with (smoke / "data.csv").open() as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["chart", "label", "x", "y", "low", "high"]
    bound, distance = (
        {float(row[2]): float(row[3]) for row in rows if len(row) > 2 and row[1].startswith(name)}
        for name in ("bound", "distance")
    )
    assert len(bound) > 1
    assert all(distance[x] <= bound[x] for x in bound if x in distance)
    tables = (smoke / "tables.md").read_text()
    assert tables.startswith(f"## {FIGURES['gala-2a'].title}\n\nVerdict: undecided.\n")  # of one seed
    shares = re.findall(r"\| ring of 3 \| CartPole-v1 \| ([\d.]+) \|", tables)
    mean, largest = map(float, shares)
    assert 0 < mean <= largest <= 1
    (run,) = (path for path in (smoke / "runs").iterdir() if path.is_dir())
    before = (run / "metrics.jsonl").stat().st_mtime_ns
    assert main(words) == 0
    assert "(already done)" in capsys.readouterr().out
    assert (run / "metrics.jsonl").stat().st_mtime_ns == before


def test_without_a_name_all_figures_are_listed(capsys):
    assert len(FIGURES) == 36
    assert main(["reproduce"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed and figure.source in printed for name, figure in FIGURES.items())


def pretend(monkeypatch, code=0, only=None):
    """Runs that are made at once, at 1,000 env steps/s; the first `only` of them, then exit code `code`."""
    made = []

    def run_jobs(jobs, at_once):
        for job in jobs[:only]:
            made.append(job)
            steps = int(job.args[job.args.index("--steps") + 1])
            env = job.args[job.args.index("--env") + 1]
            job.folder.mkdir(parents=True)
            config = {"preset": job.args[0], "steps": steps, "env": {"id": env}}
            (job.folder / "config.json").write_text(json.dumps(config))
            lines = [{"env_steps": n, "seconds": n / 1000, "mean_return": 1.0} for n in (steps // 2, steps)]
            (job.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return code

    monkeypatch.setattr(runs, "run_jobs", run_jobs)
    monkeypatch.setattr(command, "run_jobs", run_jobs)
    return made


def test_a_dry_run_prints_the_commands_and_their_time(tmp_path, capsys, monkeypatch):
    made = pretend(monkeypatch)
    assert main(["reproduce", "gala-2a", "--budget", "3600000", "--dry-run", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "6 commands of 3,600,000 env steps, 1 at a time" in printed
    assert "about 6:00:00" in printed  # six runs of an hour each
    assert printed.count("coterie train gala-a2c") == 6
    assert {int(job.args[job.args.index("--steps") + 1]) for job in made} == {4000}  # short ones, for the rates
    assert not (tmp_path / "gala-2a" / "3600000").exists()


def test_a_figure_about_time_runs_one_command_at_a_time(tmp_path, capsys, monkeypatch):
    pretend(monkeypatch, code=75, only=0)
    words = ["reproduce", "seed-table1", "--budget", "smoke", "--jobs", "2", "--out", str(tmp_path)]
    assert main(words) == 75
    assert "one run at a time" in capsys.readouterr().out


def test_a_failed_run_is_named_and_the_others_are_drawn(tmp_path, monkeypatch):
    pretend(monkeypatch, code=1, only=1)
    assert main(["reproduce", "a3c-gae-3-entropy", "--budget", "smoke", "--out", str(tmp_path)]) == 1
    page = (tmp_path / "a3c-gae-3-entropy" / "smoke" / "index.html").read_text()
    assert "Failed, not drawn: beta 0.01, MountainCar-v0, seed 0, dynamic, MountainCar-v0, seed 0." in page
    assert "<svg" in page


def test_a_custom_figure_in_toml_is_drawn(tmp_path, monkeypatch):
    """Words, a sweep, a drawing, the paper's values and a verdict."""
    pretend(monkeypatch)
    monkeypatch.setitem(FIGURES, "test-1", read_figures(ONE_FIGURE)["test-1"])
    assert main(["reproduce", "test-1", "--budget", "smoke", "--out", str(tmp_path)]) == 0
    tables = (tmp_path / "test-1" / "smoke" / "tables.md").read_text()
    assert tables.startswith("## Figure 1: a test\n\nVerdict: agrees.\n\nClaim: PPO is fast.\n")
    assert "| rate | CartPole-v1 | PPO, 4 | 1,000, 1,000, 1,000 | 500 | - | holds |" in tables
    assert "| PPO | CartPole-v1 | 2 | 12 | 1,000 +- 0 |" in tables
    assert "| PPO | CartPole-v1 | 4 | paper's value not available here | 1,000 +- 0 |" in tables


def test_a_budget_is_a_name_or_env_steps():
    figure = FIGURES["gala-1a"]
    assert sized(figure, "full").steps == 40_000_000
    assert sized(figure, "1234").steps == 1234
    assert sized(figure, "1234").values == figure.sizes["small"].values
    with pytest.raises(ConfigError, match="--budget"):
        sized(figure, "large")
    with pytest.raises(ConfigError, match="accel-1b trains nothing"):
        sized(FIGURES["accel-1b"], "1000")
    assert main(["reproduce", "accel-1b", "--seeds", "2"]) == 2


def test_an_evaluation_that_is_done_is_not_made_again_where_the_folder_has_another_name(tmp_path, monkeypatch):
    monkeypatch.setattr(runs.checkpoint, "latest", lambda folder: Path("7"))
    run, figure = read_run(record(tmp_path / "moved", "a2c")), FIGURES["gala-table1"]
    (tmp_path / "moved-7-eval10.args.json").write_text('["runs/old", "--episodes", "10"]')
    (tmp_path / "moved-7-eval10.json").write_text('{"mean_return": 3.0}')
    result = ArmResult(figure.arms(figure.sizes["smoke"])[0], runs=[run])
    assert runs.evaluate(figure, [result]) == 0
    assert result.evaluations == {"CartPole-v1": {"mean_return": 3.0}}
