"""One command of a sweep: signals that reach it, and one that is begun again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

from coterie.tools.job import Job
from coterie.tools.sweep import run_jobs


def test_a_second_ctrl_c_ends_the_runs_at_once(tmp_path, monkeypatch):
    def start(job: Job, cores: list[int]) -> subprocess.Popen[bytes]:
        code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
        begun.append(subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL))
        with begun[0].stdout as said:
            said.readline()
        for timer in timers:
            timer.start()
        return begun[0]

    timers = [threading.Timer(wait, os.kill, (os.getpid(), signal.SIGINT)) for wait in (0.1, 1.5)]
    begun: list[subprocess.Popen[bytes]] = []
    monkeypatch.setattr(Job, "start", start)
    try:
        assert run_jobs([Job("a", ("ppo",), tmp_path / "run")], 1) == 75
    finally:
        for timer in timers:
            timer.cancel()  # or it interrupts the tests
    assert begun[0].returncode == -signal.SIGINT


def test_a_run_that_was_refused_at_its_start_begins_with_other_options(tmp_path, monkeypatch):
    monkeypatch.setattr(Job, "_command", lambda self, resumed: ["false"])
    assert run_jobs([Job("a", ("ppo", "--device", "cuda"), tmp_path / "run")], 1) == 1
    assert not Job("a", ("ppo",), tmp_path / "run").done()
