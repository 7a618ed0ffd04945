"""Processes whose interpreter is held by foreign code, as by a careless simulator: no thread of Python runs in them."""

from __future__ import annotations

import os
import re
import signal
import sys

from coterie.parallel import heartbeats
from tests.support.runs import ENDLESS, check_rows, decoupled_options, inline_options, last_checkpoint
from tests.support.waiting import wait_until


def test_a_process_that_freezes_while_it_waits_is_killed_and_the_run_goes_on(meddler, module):
    """The others go on, so only its own silence shows it."""
    module("frozen", FROZEN)

    def watch() -> None:
        meddler.at_work()
        meddler.hurry(2.5, heartbeats)
        meddler.until(lambda: "actor 1 hung (no rollout for" in meddler.log(), "it is noticed")
        meddler.hurry(1, heartbeats)
        meddler.until(lambda: meddler.starts("actor 1") == 2, "it is started again")
        meddler.saves_again()
        meddler.interrupt()

    changes = {**ENDLESS, "log.stall": 20, "model.torso": "frozen:torso"}
    assert meddler.run(decoupled_options(meddler.out, **changes), watch) == 75
    check_rows(meddler.out)
    assert meddler.log().count(" hung (") == 1  # no other that waits is taken for it


def test_a_run_of_one_process_that_freezes_ends_and_says_where_it_was(command, tmp_path, monkeypatch):
    """No thread of Python can do that. What resumes it, such as a batch system, goes on from the last checkpoint."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    (tmp_path / "frozen.py").write_text(FROZEN)
    changes = {**ENDLESS, "learners": 1, "log.stall": 8, "model.torso": "frozen:torso"}
    run = command(inline_options, "solo", **changes)
    run.end(code=-signal.SIGABRT)
    text = run.text()
    assert re.search(
        r"coterie: no sign of life for \d+ s \(log\.stall\): native code holds Python's lock \(GIL\)", text
    )
    assert f"coterie resume {run.out}" in text
    assert re.search(r'File ".*frozen\.py", line \d+ in forward', text)
    wait_until(lambda: not run.processes(), 30, "all are gone")
    before = last_checkpoint(run.out)[1]["env_steps"]
    again = command(lambda out: ["resume", str(out), "--steps", str(before + 500)])
    again.end()
    assert check_rows(run.out)["env_steps"] >= before + 500


# A slow learner, and a thread that holds the interpreter of actor 1 once it waits for a free slot. A lone learner holds
# its own interpreter.
FROZEN = """
import ctypes
import multiprocessing
import sys
import threading
import time
from pathlib import Path

import torch

from coterie.models.mlp import MLPTorso

LONE = multiprocessing.current_process().name == "MainProcess"
ONCE = Path(__file__).with_suffix(".once")


class Slow(MLPTorso):
    def forward(self, x):
        time.sleep(0.2 * torch.is_grad_enabled())
        if LONE and torch.is_grad_enabled() and not ONCE.exists():
            ONCE.touch()
            ctypes.PyDLL(None).sleep(600)
        return super().forward(x)


def hold():
    while sys._current_frames()[threading.main_thread().ident].f_code.co_name != "next":
        time.sleep(0.001)
    ctypes.PyDLL(None).sleep(120)


def torso(obs, config):
    if multiprocessing.current_process().name == "coterie-actor-1" and not ONCE.exists():
        ONCE.touch()
        threading.Thread(target=hold, daemon=True).start()
    return Slow(obs[""].shape, config.hidden, config.activation, False)
"""
