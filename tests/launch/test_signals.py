"""Runs with child processes that are sent a signal, alone or as a process group, or whose parent is killed."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path
from socket import gethostname

import pytest

from coterie.cli.main import main
from coterie.parallel.processes import scratch_folder
from coterie.parallel.signals import on_signals
from coterie.runs import checkpoint
from tests.support.process_table import named_memory
from tests.support.runs import (
    ENDLESS,
    central_options,
    check_accounts,
    check_rows,
    decoupled_options,
    inline_options,
    last_checkpoint,
    last_line,
    read_summary,
)
from tests.support.waiting import wait_until

COUNTING = {"env.id": "coterie.envs.testing:CountingEnv"}
OPTIONS = {"inline": inline_options, "decoupled": decoupled_options, "central": central_options}


@pytest.mark.parametrize(
    ("acting", "exchange", "number"),
    [
        ("inline", "gossip", signal.SIGTERM),
        ("decoupled", "hogwild", signal.SIGINT),
        ("central", "solo", signal.SIGTERM),
    ],
)
def test_a_signal_checkpoints_and_no_process_or_named_memory_is_left(capsys, meddler, acting, exchange, number):
    out = meddler.out

    def interrupt() -> None:
        meddler.at_work()
        for _, pid in meddler.started:
            assert not named_memory(pid)
        os.kill(os.getpid(), number)

    assert meddler.run(OPTIONS[acting](out, exchange, **ENDLESS), interrupt) == 75
    assert f"{number.name}: checkpoint written" in capsys.readouterr().out
    summary = (check_accounts if acting == "inline" else check_rows)(out)
    assert (summary["status"], summary["reason"]) == ("interrupted", number.name)
    assert summary.get("restarts", 0) == 0
    assert summary["first_step_s"] > 0
    if exchange == "gossip":
        total = summary["env_steps"] + 1000
        assert main(["resume", str(out), "--steps", str(total)]) == 0
        again = check_accounts(out)
        assert again["status"] == "finished"
        assert again["rows"]["rolled_back"] == 0
        assert total <= again["env_steps"] <= total + 4 * 128
        assert again["learner_steps"] > summary["learner_steps"]


@pytest.mark.parametrize(("options", "exchange"), [(inline_options, "solo"), (central_options, "solo")])
def test_a_warning_to_all_processes_writes_a_checkpoint_and_training_goes_on(command, options, exchange):
    """As SLURM sends it to a job that it may take away."""
    learners = {"learners": 1} if options is inline_options else COUNTING
    changes = {"log.checkpoint_every": 1e6, "log.checkpoint_on_warning": True, "log.every": 0.1}
    run = command(options, exchange, **ENDLESS | learners | changes)
    for _ in range(2):
        saved = checkpoint.latest(run.out / "checkpoints")
        steps = run.line().get("env_steps", 0)
        run.until(lambda steps=steps: run.line().get("env_steps", 0) > steps + 200, "it trains")
        os.killpg(run.process.pid, signal.SIGUSR1)
        run.until(lambda saved=saved: checkpoint.latest(run.out / "checkpoints") != saved, "a checkpoint")
    workers = set(run.processes()) - {run.process.pid} if options is central_options else ()
    for pid in workers:  # none takes it for the death of its parent, twelve seconds after which it would be gone
        ignored = re.findall(r"SigIgn:\t(\w+)", Path(f"/proc/{pid}/status").read_text())
        assert int(*ignored, 16) >> signal.SIGUSR1 - 1 & 1
    run.end(signal.SIGTERM, 75)
    summary = check_rows(run.out)
    assert (summary["envs_replaced"], summary["status"]) == (0, "interrupted")


def test_a_second_signal_ends_a_run_at_once(capsys, meddler):
    """Learners wait for actors, which are in the middle of an env step of a minute."""
    sent: list[float] = []

    def interrupt_twice() -> None:
        meddler.until(lambda: len(meddler.started) == 3 and meddler.saved() == 0, "all are started")
        time.sleep(1)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            sent.append(time.monotonic())
            time.sleep(2 * (len(sent) < 2))  # two signals that come before the first is handled are one

    assert meddler.run(decoupled_options(meddler.out, **{**ENDLESS, "env.delay": 60}), interrupt_twice) == 1
    assert time.monotonic() - sent[1] < 30
    assert last_line(capsys) == "coterie: stopped at once; the last checkpoint is intact"
    assert read_summary(meddler.out)["status"] == "failed"
    last_checkpoint(meddler.out)


def test_all_processes_end_with_a_killed_parent(command):
    """A learner, its env hosts, and their env workers."""
    run = command(central_options, **ENDLESS, **COUNTING)
    run.until(run.line, "it trains")
    assert len(run.processes()) >= 5  # parent, fork server, learner, actor, an env worker
    run.process.kill()
    run.process.wait()
    wait_until(lambda: not run.processes(), 30, "all are gone")
    left = list(run.tmp.iterdir())  # the next run removes these
    scratch_folder(str(run.tmp))
    assert left
    assert not any(folder.exists() for folder in left)


@pytest.mark.parametrize("options", [inline_options, pytest.param(decoupled_options, marks=pytest.mark.slow)])
def test_no_process_outlives_its_parent_while_an_env_holds_the_interpreter(command, tmp_path, monkeypatch, options):
    """As careless simulators in C do: no thread of Python runs meanwhile."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    (tmp_path / "holding_env.py").write_text(HOLDING_ENV)
    run = command(options, **{"exchange": "solo", "learners": 1, **ENDLESS, "env.id": "holding_env:Holding"})
    run.until(lambda: (tmp_path / "holds").exists(), "it holds it")
    run.process.kill()
    run.process.wait()
    wait_until(lambda: not run.processes(), 25, "all are gone")


HOLDING_ENV = """
import ctypes
from pathlib import Path

from coterie.envs.testing import CountingEnv


class Holding(CountingEnv):
    def step(self, action):
        if self.steps == 3:
            Path(__file__).with_name("holds").touch()
            ctypes.PyDLL(None).sleep(120)
        return super().step(action)
"""


@pytest.mark.parametrize(
    ("learners", "exchange", "number", "changes", "early"),
    [
        (1, "solo", signal.SIGINT, {}, False),
        (2, "gossip", signal.SIGTERM, {**COUNTING, "env.num_envs": 2}, False),
        (1, "solo", signal.SIGHUP, {**COUNTING, "env.num_envs": 2}, False),
        pytest.param(2, "hogwild", signal.SIGINT, {}, True, marks=pytest.mark.slow),
    ],
)
def test_a_signal_to_the_whole_process_group_checkpoints(command, learners, exchange, number, changes, early):
    """As a terminal that closes, its Ctrl-C, `timeout` or a service manager send it: to every process of the run.

    `early`: while the server that the learners are forked from still loads torch.
    """

    run = command(inline_options, exchange, learners=learners, **ENDLESS, **changes)
    started = (lambda: exchange in run.text()) if early else run.line  # the title
    run.until(started, "it has started")
    os.killpg(run.process.pid, number)
    if number != signal.SIGINT:  # a terminal may send it twice, a sweep passes it on
        time.sleep(0.02)
        run.process.send_signal(number)
    run.end(code=75)
    assert f"{number.name}: checkpoint written" in run.text()
    assert f"coterie resume {run.out}" in run.text()
    assert not {"Traceback", "Warning", "Error"} & set(re.findall(r"\w+", run.text()))
    summary = read_summary(run.out)
    assert (summary["status"], summary["envs_replaced"]) == ("interrupted", 0)
    assert last_checkpoint(run.out)[1]["env_steps"] == summary["env_steps"]
    wait_until(lambda: not run.processes(), 30, "all are gone")
    assert list(run.tmp.iterdir()) == []


def test_nohup_lets_a_run_go_on_when_its_terminal_closes():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with on_signals(lambda number: None):
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_run_folder_has_one_writer(command, capsys):
    """A job that a scheduler starts again while the old one still runs."""
    run = command(inline_options, "solo", learners=1, **ENDLESS)
    run.until(run.line, "it trains")
    assert main(["resume", str(run.out)]) == 2
    assert last_line(capsys) == f"coterie: {run.out} is being trained by pid {run.process.pid} on {gethostname()}"
    run.until(lambda: len(list(run.out.glob("checkpoints/step_*"))) > 1, "it goes on")
    run.process.kill()  # the kernel frees the lock
    run.process.wait()
    total = last_checkpoint(run.out)[1]["env_steps"] + 500
    assert main(["resume", str(run.out), "--steps", str(total)]) == 0
