"""`coterie reproduce` as it is typed: what it runs, keeps, writes, says before it starts, and refuses."""

from __future__ import annotations

import csv
import json
import re
import time

import pytest

from coterie.cli.main import main
from coterie.tools.reproduce import runs
from coterie.tools.reproduce.catalogue import FIGURES
from coterie.tools.reproduce.figure import PAPERS
from coterie.tools.reproduce.runs import sized, tell
from coterie.types import ConfigError, CoterieError


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """The distance to consensus of three learners, at the smallest budget."""
    out = tmp_path_factory.mktemp("reproduce")
    assert main(["reproduce", "gala-2a", "--budget", "smoke", "--out", str(out)]) == 0
    return out / "gala-2a" / "smoke"


def test_a_page_pictures_numbers_and_tables_are_written(drawn):
    page = (drawn / "index.html").read_text()
    assert "coterie reproduce gala-2a --budget smoke: 4,000 env steps of each run, 1 seed, CartPole-v1." in page
    assert "CartPole-v1 stands for the six Atari games" in page  # how it is scaled
    assert "remarkably tight" in page  # what the paper says
    assert "<svg" in page
    assert (drawn / "1.svg").read_text().startswith("<svg")
    with (drawn / "data.csv").open() as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["chart", "label", "x", "y", "low", "high"]
    bound = {float(row[2]): float(row[3]) for row in rows if len(row) > 2 and row[1].startswith("bound")}
    distance = {float(row[2]): float(row[3]) for row in rows if len(row) > 2 and row[1].startswith("distance")}
    assert len(bound) > 1
    assert all(distance[x] <= bound[x] for x in bound if x in distance)
    tables = (drawn / "tables.md").read_text()
    assert tables.startswith("## Figure 2a")
    share = float(re.search(r"\| ring of 3 \| CartPole-v1 \| [\d.]+ \| ([\d.]+) \|", tables)[1])
    assert 0 < share <= 1


def test_what_is_there_is_not_run_again(drawn, capsys):
    (run,) = (path for path in (drawn / "runs").iterdir() if path.is_dir())
    before = (run / "metrics.jsonl").stat().st_mtime_ns
    begin = time.monotonic()
    assert main(["reproduce", "gala-2a", "--budget", "smoke", "--out", str(drawn.parents[1])]) == 0
    assert time.monotonic() - begin < 60
    assert "(was there)" in capsys.readouterr().out
    assert (run / "metrics.jsonl").stat().st_mtime_ns == before


def test_without_a_name_all_are_listed(capsys):
    assert main(["reproduce"]) == 0
    told = capsys.readouterr().out
    assert all(name in told for name in FIGURES)
    assert all(paper in told for paper in PAPERS.values())


def test_what_would_run_and_how_long_it_takes_is_said_first(tmp_path, capsys, monkeypatch):
    made = []

    def quick(jobs, at_once):
        for job in jobs:
            made.append(job)
            steps = int(job.args[job.args.index("--steps") + 1])
            job.folder.mkdir(parents=True)
            (job.folder / "config.json").write_text(json.dumps({"preset": "gala-a2c", "steps": steps}))
            lines = [{"env_steps": n, "seconds": n / 1000} for n in (steps // 2, steps)]
            (job.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return 0

    monkeypatch.setattr(runs, "run_jobs", quick)
    assert main(["reproduce", "gala-2a", "--budget", "3600000", "--dry-run", "--out", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "2 commands of 3,600,000 env steps, 1 at a time" in told
    assert "about 2:00:00" in told  # two runs of an hour each
    assert told.count("coterie train gala-a2c") == 2
    assert {int(job.args[job.args.index("--steps") + 1]) for job in made} == {4000}  # short ones, for the rates
    assert not (tmp_path / "gala-2a" / "3600000").exists()


def test_what_is_about_time_runs_one_at_a_time(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(runs, "run_jobs", lambda jobs, at_once: 75)  # stopped
    words = ["reproduce", "seed-table1", "--budget", "smoke", "--jobs", "2", "--out", str(tmp_path)]
    assert main(words) == 75
    assert "one run at a time" in capsys.readouterr().out


def test_sizes():
    figure = FIGURES["gala-1a"]
    assert sized(figure, "full").steps == 40_000_000
    assert sized(figure, "1234").steps == 1234
    assert sized(figure, "1234").points == figure.sizes["small"].points
    with pytest.raises(ConfigError, match="--budget"):
        sized(figure, "large")


def test_a_number_of_env_steps_is_nothing_for_a_measurement():
    with pytest.raises(ConfigError, match="accel-1b trains nothing"):
        sized(FIGURES["accel-1b"], "1000")


def test_a_run_that_failed_is_named_and_the_others_are_drawn(tmp_path, monkeypatch):
    def some(jobs, at_once):
        for job in jobs[:1]:
            job.folder.mkdir(parents=True)
            (job.folder / "config.json").write_text(json.dumps({"preset": "a3c", "env": {"id": "MountainCar-v0"}}))
            lines = [{"env_steps": n, "seconds": n / 10, "mean_return": -200.0 + n} for n in (10, 20, 30)]
            (job.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return 1

    monkeypatch.setattr(runs, "run_jobs", some)
    assert main(["reproduce", "a3c-gae-3-entropy", "--budget", "smoke", "--out", str(tmp_path)]) == 1
    page = (tmp_path / "a3c-gae-3-entropy" / "smoke" / "index.html").read_text()
    assert "Failed, and are not drawn: beta 0.01, MountainCar-v0, seed 0, dynamic, MountainCar-v0, seed 0." in page
    assert "<svg" in page


def test_what_a_command_tells_is_asked_once(tmp_path):
    stem = tmp_path / "arm-0.5"
    (tmp_path / "arm-0.5.json").write_text('{"words": ["no-such-command"], "told": {"cores": 7}}')
    assert tell(["no-such-command"], stem) == {"cores": 7}
    with pytest.raises(CoterieError, match="unknown"):
        tell(["no-such-command", "--more"], stem)  # asked something else
    with pytest.raises(CoterieError, match="no-such-command: coterie: command: 'no-such-command' is unknown"):
        tell(["no-such-command"], tmp_path / "other")
    assert not (tmp_path / "other.json").exists()
