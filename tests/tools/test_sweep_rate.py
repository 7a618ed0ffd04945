"""The line that a sweep writes now and then about all that run, from figures that are made up."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.tools import sweep
from coterie.tools.sweep import Job, _together, run_jobs


def job(folder: Path, *lines: dict[str, Any], rest: str = "") -> Job:
    """One whose run has written these lines of metrics; `rest`: what stands below them."""
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + rest)
    return Job(folder.name, (), folder)


def line(steps: int, rate: float | None) -> dict[str, Any]:
    return {"env_steps": steps, "seconds": 1.0, "env_steps_per_s": rate}


def test_steps_and_rates_of_all_are_added(tmp_path):
    jobs = [job(tmp_path / "a", line(1_000, 9_000.0), line(2_000, 100.0)), job(tmp_path / "b", line(30_500, 1_250.4))]
    assert _together(jobs, 3, 8) == "3 of 8 done, 2 run: 32,500 env steps so far, 1,350 env steps/s together"


def test_what_tells_no_rate_yet_adds_none(tmp_path):
    """Each for itself: one that cannot be read does not take the others' figures away."""
    score = {"env_steps": 9_000, "seconds": 1.0, "eval/return": 1.0}  # a line of an evaluation has no rate
    jobs = [
        job(tmp_path / "unreadable", line(1, 1.0), rest="{}\n" + json.dumps(line(2, 2.0)) + "\n"),
        job(tmp_path / "evaluated", line(200, 20.0), score),
        job(tmp_path / "in-the-middle-of-a-line", line(3_000, 300.0), rest='{"env_steps": 4000, "env_st'),
        job(tmp_path / "first", line(10_000, None)),  # no time has passed
        job(tmp_path / "empty"),
        Job("not begun", (), tmp_path / "not-begun"),
    ]
    assert _together(jobs, 0, 6) == "0 of 6 done, 6 run: 13,200 env steps so far, 320 env steps/s together"


@dataclass
class Process:
    """Stands in for a run's process: it ends when it has been looked at so often."""

    looks: int
    returncode: int = 0

    def poll(self) -> int | None:
        self.looks -= 1
        return None if self.looks > 0 else self.returncode


def test_the_line_comes_while_some_run(tmp_path, monkeypatch, capsys):
    """Of those alone: one that has ended is counted as done, and its rate is no more."""
    jobs = [job(tmp_path / "ended", line(500, 50.0)), job(tmp_path / "runs", line(7_000, 70.0))]
    for each in jobs:
        told = {"status": "finished", "mean_return": 1.0, "env_steps": 900}
        (each.folder / "summary.json").write_text(json.dumps(told))
    looks = {"ended": 2, "runs": 3}
    monkeypatch.setattr(sweep, "_LINE_S", 0.0)
    monkeypatch.setattr(sweep, "_same", lambda job: False)  # or else they would be those of another command
    monkeypatch.setattr(sweep, "_start", lambda job, cores: Process(looks[job.name]))
    assert run_jobs(jobs, 2) == 0
    ended, runs = (f"{j.name}: finished, mean return 1.0, 900 env steps (exit 0) {j.folder}" for j in jobs)
    assert capsys.readouterr().out.splitlines() == [
        "0 of 2 done, 2 run: 7,500 env steps so far, 120 env steps/s together",
        ended,
        "1 of 2 done, 1 run: 7,000 env steps so far, 70 env steps/s together",
        runs,
    ]
