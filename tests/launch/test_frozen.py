"""Processes whose interpreter is held by foreign code, as by a careless simulator: no thread of Python runs in them."""

from __future__ import annotations

from tests.support.runs import ENDLESS, check_rows, decoupled_options


def test_a_process_that_freezes_while_it_waits_is_killed_and_the_run_goes_on(meddler, module):
    """The others go on, so only its own silence shows it."""
    module("frozen", FROZEN)

    def watch() -> None:
        meddler.until(lambda: "actor 1 hung (no rollout for" in meddler.log(), "it is noticed")
        meddler.until(lambda: meddler.starts("actor 1") == 2, "it is started again")
        meddler.saves_again()
        meddler.interrupt()

    changes = {**ENDLESS, "log.stall": 8, "model.torso": "frozen:torso"}
    assert meddler.run(decoupled_options(meddler.out, **changes), watch) == 75
    check_rows(meddler.out)
    assert meddler.log().count(" hung (") == 1  # no other that waits is taken for it
    meddler.check_nothing_left()


# A slow learner, and a thread that holds the interpreter of actor 1 once it waits for a free slot.
FROZEN = """
import ctypes
import multiprocessing
import sys
import threading
import time
from pathlib import Path

import torch

from coterie.models.mlp import MLPTorso


class Slow(MLPTorso):
    def forward(self, x):
        time.sleep(0.2 * torch.is_grad_enabled())
        return super().forward(x)


def hold():
    while sys._current_frames()[threading.main_thread().ident].f_code.co_name != "next":
        time.sleep(0.001)
    ctypes.PyDLL(None).sleep(120)


def torso(obs, config):
    once = Path(__file__).with_suffix(".once")
    if multiprocessing.current_process().name == "coterie-actor-1" and not once.exists():
        once.touch()
        threading.Thread(target=hold, daemon=True).start()
    return Slow(obs[""].shape, config.hidden, config.activation, False)
"""
