"""Runs within a user's Python program: its own classes, and torch as it has set it."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
import torch

import coterie
from coterie.acting.inline import Inline
from coterie.errors import ConfigError, CoterieError
from tests.support.runs import read_summary, small_ppo


class Short(coterie.Callback):
    def on_evaluation(self, run): ...


class Unclear(coterie.Callback):
    def should_stop(self, run):
        return np.ones(3)


class Once(Inline):
    def rollouts(self, refresh):
        yield next(super().rollouts(refresh))


@contextmanager
def float64():
    torch.set_default_dtype(torch.float64)
    try:
        yield
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


AUTOCAST = partial(torch.autocast, "cpu", torch.bfloat16)


@pytest.mark.parametrize("state", [float64, partial(torch.device, "meta"), torch.inference_mode, AUTOCAST])
def test_a_run_and_its_policy_are_the_same_whatever_torch_is_set_to(tmp_path, state):
    def found(name):
        digest = coterie.train(small_ppo(tmp_path / name, steps=300), quiet=True)["digest"]
        policy, seen = coterie.load(tmp_path / name), np.linspace(-1, 1, 400, dtype=np.float32).reshape(100, 4)
        return digest, policy(seen).tolist(), coterie.evaluate_run(tmp_path / name, episodes=2)["returns"]

    with state():
        changed = found("changed")
    assert changed == found("plain")


def test_an_acting_that_ends_early_ends_the_run_as_failed(tmp_path):
    with pytest.raises(CoterieError, match=r"^acting: its rollouts ended after [\d,]+ env steps"):
        coterie.train(small_ppo(tmp_path / "run", acting=Once), quiet=True)
    assert read_summary(tmp_path / "run")["status"] == "failed"


def test_a_callback_whose_method_takes_other_arguments_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"^callbacks: Short.on_evaluation must take run and scores \(too many pos"):
        coterie.train(small_ppo(tmp_path / "run"), callbacks=Short, quiet=True)


def test_an_answer_that_is_neither_true_nor_false_ends_the_run_after_a_checkpoint(tmp_path):
    with pytest.raises(CoterieError, match=r"^Unclear\.should_stop: ValueError: The truth value .*; last good"):
        coterie.train(small_ppo(tmp_path / "run"), callbacks=Unclear, quiet=True)
