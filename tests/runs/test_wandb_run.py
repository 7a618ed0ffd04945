"""The page at Weights & Biases: what it gets, and that no failure of it ends a run."""

from __future__ import annotations

import math
import os
import re
import signal
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coterie import presets
from coterie.config import Config, Log
from coterie.errors import ConfigError, CoterieError
from coterie.extras import install
from coterie.runs import wandb_run
from coterie.runs.config_io import from_dict
from coterie.runs.metrics import RunWriter, read_metrics
from tests.support.waiting import PATIENCE, wait_until


class FakeWandb(types.ModuleType):
    """Takes what the real one is given."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__("wandb")
        self.error, self.begun, self.axes, self.logged, self.finished = error, [], [], [], 0  # type: ignore[var-annotated]
        self.broken, self.number, self.answers = set[int](), 0, threading.Event()
        self.answers.set()

    def init(self, **options: Any) -> FakeWandb:
        if self.error is not None:
            raise self.error
        self.begun.append(options)
        return self

    def define_metric(self, name: str, step_metric: str) -> None:
        self.axes.append((name, step_metric))

    def log(self, line: dict[str, Any]) -> None:
        if line["env_steps"] in self.broken:
            raise ConnectionResetError("the service is gone")
        self.logged.append(line)

    def finish(self) -> None:
        if not self.finished and self.number:
            os.kill(os.getpid(), self.number)
        self.finished += 1
        self.answers.wait(PATIENCE)

    def teardown(self) -> None:
        self.answers.set()


def test_wandb_gets_every_line_and_a_resumed_run_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    log = Log(wandb="p", wandb_group="g", wandb_tags=("a", "b"), tensorboard=False)
    config = presets.ppo(env="CartPole-v1", log=log)
    for resume in (None, 1):
        writer = RunWriter(tmp_path, config, resume)
        writer.write({"env_steps": 2, "seconds": 1.0, "loss": math.nan})
        writer.close()
    first, second = fake.begun
    assert first == second
    (tmp_path / "other").mkdir()
    RunWriter(tmp_path / "other", config).close()
    assert first["id"] != fake.begun[2]["id"]
    assert first["id"]
    assert (first["project"], first["resume"]) == ("p", "allow")
    assert (first["group"], first["tags"]) == ("g", ("a", "b"))
    assert first["config"]["optim"]["lr"] == config.optim.lr
    assert from_dict(first["config"]) == config
    assert "mode" not in first  # WANDB_MODE decides
    assert fake.logged == [{"env_steps": 2, "seconds": 1.0, "loss": None}] * 2
    assert fake.axes == [("*", "env_steps")] * 3
    assert fake.finished == 3


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (None, f"log.wandb needs the extra 'wandb': {install('wandb')}"),
        (FakeWandb(RuntimeError("no\nAPI key")), "log.wandb: no API key"),
    ],
    ids=["missing", "fails"],
)
def test_wandb_that_is_missing_or_fails_is_one_line(tmp_path: Path, monkeypatch, module: Any, says: str) -> None:
    monkeypatch.setitem(sys.modules, "wandb", module)
    with pytest.raises(ConfigError if module is None else CoterieError, match=f"^{re.escape(says)}$"):
        RunWriter(tmp_path, Config(log=Log(wandb="p", tensorboard=False)))


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeWandb]:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    yield fake
    fake.answers.set()


def writes(folder: Path, said: list[str]) -> RunWriter:
    return RunWriter(folder, Config(log=Log(wandb="p", tensorboard=False)), say=said.append)


def test_a_run_goes_on_without_its_page(tmp_path: Path, wandb: FakeWandb) -> None:
    said = list[str]()
    writer, wandb.broken = writes(tmp_path, said), {1}
    step = 0

    def is_said() -> bool:
        nonlocal step
        writer.write({"env_steps": step, "seconds": 1.0})
        step += 1
        return bool(said)

    wait_until(is_said, what="the failure")
    writer.roll_back(1)
    is_said()
    writer.close()
    line = "log.wandb: the service is gone; no more is sent"
    assert said == [line]
    assert line in (tmp_path / "log.txt").read_text()
    assert [row["env_steps"] for row in read_metrics(tmp_path)] == [0, 1, step - 1]
    assert [row["env_steps"] for row in wandb.logged] == [0]
    assert len(wandb.begun) == 1


@pytest.mark.parametrize(("seconds", "number", "why"), [(0.0, 0, "no answer for 0 s"), (1e6, signal.SIGINT, "SIGINT")])
def test_the_end_waits_for_the_page_for_a_while_or_until_a_signal(
    tmp_path: Path, wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch, seconds: float, number: int, why: str
) -> None:
    said = list[str]()
    monkeypatch.setattr(wandb_run, "_FINISH_S", seconds)
    monkeypatch.setattr(wandb_run.WandbRun, "_kill_service", lambda _: wandb.answers.set())
    wandb.answers.clear()
    wandb.number = number
    writer = writes(tmp_path, said)
    writer.close()
    assert said == [f"log.wandb: {why}; no more is sent"]
    assert wandb.finished
