"""Fixtures of runs with child processes: odd models, envs that count their steps, a meddler beside the run."""

from __future__ import annotations

import json
import multiprocessing.util
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import made_by
from tests.support.commands import PATIENCE, Command
from tests.support.meddler import Meddler
from tests.support.remote_workers import WorkerThread
from tests.support.runs import TALLY

# For `--model.torso odd:NAME`: learners that are unlike the others. Loaded in the parent, too.
ODD = '''
import multiprocessing
import time

import torch

from coterie.models.mlp import MLPTorso
from coterie.runs import checkpoint

RANK = multiprocessing.current_process().name.removeprefix("coterie-learner-")
write = checkpoint.write


def slow_save(obs, config):
    """Learner 1 takes a while to write its part of a checkpoint."""

    def slow(draft, tensors):
        time.sleep(0.6)
        write(draft, tensors)

    if RANK == "1":
        checkpoint.write = slow
    return Odd(obs[""].shape, config.hidden, config.activation, False)


class Odd(MLPTorso):
    trained, broken = 0, None

    def forward(self, x):
        self.trained += torch.is_grad_enabled()
        x = super().forward(x)
        if self.broken and self.trained == 20 and torch.is_grad_enabled():
            return self.broken(x)
        return x


def actor_raises(obs, config):
    """The second actor raises."""
    made = Odd(obs[""].shape, config.hidden, config.activation, False)
    if "actor-1" in RANK:
        made.forward = fail
    return made


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
def module(tmp_path, monkeypatch) -> Callable[[str, str], None]:
    """Makes a module of this name and text that the run can import."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(name: str, text: str) -> None:
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)

    return make


@pytest.fixture
def odd(module) -> None:
    """The module `odd`."""
    module("odd", ODD)


class Tally:
    """Options of an env that counts its own steps, and their number over all processes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.options = {"env.id": "tally_env:Tally", "env.kwargs": json.dumps({"path": str(path)}), "env.delay": 0.01}

    @property
    def steps(self) -> int:
        return self.path.stat().st_size


@pytest.fixture
def tally(tmp_path, module) -> Tally:
    module("tally_env", TALLY)
    return Tally(tmp_path / "tally")


@pytest.fixture
def meddler(tmp_path, monkeypatch) -> Iterator[Meddler]:
    (tmp_path / "tmp").mkdir()
    multiprocessing.util.get_temp_dir()  # the fork server's socket stays where such a thing belongs
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    # Should a signal of these tests come when the run has just ended, it must not end pytest.
    before = {n: signal.signal(n, lambda *_: None) for n in (signal.SIGINT, signal.SIGTERM)}
    yield (made := Meddler(monkeypatch, tmp_path / "run"))
    for number, handler in before.items():
        signal.signal(number, handler)
    made.check_nothing_left()


@pytest.fixture
def worker_threads() -> Iterator[Callable[..., WorkerThread]]:
    def end(worker: WorkerThread) -> None:
        worker.left.set()
        worker.thread.join(PATIENCE / 2)
        assert not worker.thread.is_alive()

    yield from made_by(WorkerThread, end)


@pytest.fixture
def command(tmp_path) -> Iterator[Callable[..., Command]]:
    """Starts `coterie` with the arguments that a function makes for a run in the folder `run`, or in another one."""

    def start(options: Callable[..., list[str]], *args: object, name: str = "run", **changes: object) -> Command:
        return Command(options(tmp_path / name, *args, **changes), tmp_path / name)

    yield from made_by(start, Command.close)
