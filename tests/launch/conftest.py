"""Fixtures of the runs of several learners: odd models, and a meddler beside a run in this process."""

from __future__ import annotations

import multiprocessing.util
import signal
import sys
import tempfile
from collections.abc import Iterator

import pytest

from tests.launch.harness import Meddler

# For `--model.torso odd:NAME`: learners that are unlike the others. Loaded in the parent, too.
ODD = '''
import multiprocessing
import time

import torch

from coterie.models.torsos import MLPTorso
from coterie.runs import checkpoint

RANK = multiprocessing.current_process().name.removeprefix("coterie-learner-")
write = checkpoint.write


def slow_save(rank):
    """Takes a while to write its part of a checkpoint."""

    def slow(draft, tensors):
        time.sleep(0.6)
        write(draft, tensors)

    def torso(obs, config):
        if RANK == rank:
            checkpoint.write = slow
        return Odd(obs[""].shape, config.hidden, config.activation, False)

    return torso


slow_save_0, slow_save_1 = slow_save("0"), slow_save("1")


class Odd(MLPTorso):
    trained, broken = 0, None

    def forward(self, x):
        self.trained += torch.is_grad_enabled()
        x = super().forward(x)
        if self.broken and self.trained == 20 and torch.is_grad_enabled():
            return self.broken(x)
        return x


def broken(how):
    """Learner 1 breaks at its 20th training pass."""

    def torso(obs, config):
        made = Odd(obs[""].shape, config.hidden, config.activation, False)
        if RANK == "1":
            made.broken = how
        return made

    return torso


def fail(x):
    raise ValueError("odd by design")


raises, not_a_number = broken(fail), broken(lambda x: x * float("nan"))
'''


@pytest.fixture
def odd(tmp_path, monkeypatch) -> None:
    """The module `odd` for this test."""
    (tmp_path / "odd.py").write_text(ODD)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "odd", raising=False)


@pytest.fixture
def meddler(tmp_path, monkeypatch) -> Iterator[Meddler]:
    (tmp_path / "tmp").mkdir()
    multiprocessing.util.get_temp_dir()  # the fork server's socket stays where such a thing belongs
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    # Should a signal of these tests come when the run has just ended, it must not end pytest.
    before = {n: signal.signal(n, lambda *_: None) for n in (signal.SIGINT, signal.SIGTERM)}
    yield Meddler(monkeypatch, tmp_path / "run")
    for number, handler in before.items():
        signal.signal(number, handler)
