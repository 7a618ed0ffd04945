"""The live page: what it shows of a running run, and what it refuses."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from coterie.errors import ConfigError
from coterie.tools.report.dashboard import Live, make_server
from tests.support.commands import Command
from tests.support.http import serving
from tests.tools.report.recorded import record


@contextmanager
def served(folder):
    server = make_server(str(folder), 0)
    with serving(server):
        yield server.server_address[1]


def ask(port: int, path: str = "/", method: str = "GET", host: str | None = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, headers={"Host": host or f"127.0.0.1:{port}"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_the_live_page_follows_the_run(tmp_path):
    run = record(tmp_path / "a", "ppo")
    (run / "summary.json").unlink()
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    report = {
        "unix": time.time() - 100, "restarts": 2, "processes": [
            {"name": "learner 0", "pid": os.getpid(), "silent_s": 7.0, "env_steps": 12345, "rss_mb": 100.0},
            {"name": "actor 1", "pid": gone.pid, "silent_s": 9.0, "env_steps": 1, "rss_mb": None},
        ],
    }  # fmt: skip
    foreign = [{"name": "foreign"}, {**report["processes"][0], "name": "foreign", "env_steps": "many"}, 3]
    (run / "processes.json").write_text(json.dumps({**report, "processes": [*foreign, *report["processes"]]}))
    (run / "log.txt").write_text("2026-01-01 <b>something</b> happened\n")
    with served(run) as port:
        status, first = ask(port)
        assert status == 200
        for words in (
            "12,345",
            "<td>gone</td>",
            "the run hangs, was stopped, or was killed",
            "2 learners were restarted",
            "&lt;b&gt;something&lt;/b&gt; happened",
            'http-equiv="refresh"',
            "<svg",
        ):
            assert words in first, words
        assert "foreign" not in first
        assert re.search(r"1[0-9]\d s ago", first)  # the run is silent, too
        (run / "processes.json").write_text(json.dumps(report | {"unix": time.time()}))
        assert "the run hangs" not in ask(port)[1]
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"env_steps": 777_000, "seconds": 99.0, "mean_return": 1.0}) + "\n")
        assert "777,000" in ask(port)[1]
        (run / "summary.json").write_text('{"status": "finished"}')
        last = ask(port)[1]
        assert "Status: finished" in last
        assert "last heartbeat" not in last


def test_the_dashboard_answers_only_the_page_and_only_loopback(tmp_path):
    run = record(tmp_path / "a", "ppo")
    with served(run) as port:
        assert ask(port, "/config.json")[0] == 404
        assert ask(port, "/../../etc/passwd")[0] == 404
        assert ask(port, method="POST")[0] == 501
        assert ask(port, host=f"evil.example:{port}")[0] == 421
        assert ask(port, host="localhost:1")[0] == 200  # forwarded from another port
        with pytest.raises(ConfigError, match="cannot listen on"):
            make_server(str(run), port)
        (run / "metrics.jsonl").write_text("{}\n{}\n")
        status, text = ask(port)
        assert status == 500
        assert "damaged" in text
        (run / "metrics.jsonl").write_text('{"env_steps": "x"}\n')
        status, text = ask(port)
        assert status == 500
        assert "Error: " in text


def test_a_resume_may_remove_the_summary_at_any_time(tmp_path, monkeypatch):
    run = record(tmp_path / "a", "ppo")
    (run / "summary.json").unlink()
    monkeypatch.setattr(Path, "exists", lambda self: True)  # before it was removed
    assert "Status: running" in Live(run).html()


def acting(run: Path) -> bool:
    """Whether the run has reported that all of its actors act."""
    if not (run / "processes.json").exists():
        return False
    report = json.loads((run / "processes.json").read_text())["processes"]
    return len(report) == 3 and all(p["env_steps"] for p in report[1:])


@pytest.mark.slow
def test_each_process_of_a_real_run_is_on_the_live_page(tmp_path):
    """Each process of a run that goes on is on its page, with its own pid."""
    out = tmp_path / "run"
    options = ("--actors", "2", "--steps", "100000000", "--log.every", "0.3", "--log.tensorboard", "False")
    run = Command(["train", "impala", "--env", "CartPole-v1", *options, "--out", str(out)], out)
    try:
        run.until(lambda: acting(out), "both actors act")
        report = json.loads((out / "processes.json").read_text())["processes"]
        assert [p["name"] for p in report] == ["learner 0", "actor 0", "actor 1"]
        assert len({p["pid"] for p in report}) == 3
        assert all(os.path.exists(f"/proc/{p['pid']}") and p["rss_mb"] for p in report)
        with served(out) as port:
            text = ask(port)[1]
            assert "actor 1" in text
            assert "running" in text
        run.end(signal.SIGTERM, 75)
    finally:
        run.close()
