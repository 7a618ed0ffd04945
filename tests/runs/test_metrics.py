"""What a run writes: metrics that never double back, standard JSON, reasons for a full disk."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from coterie import presets
from coterie.config import Config, Log
from coterie.extras import install
from coterie.runs.config_io import from_dict
from coterie.runs.machine import required, version
from coterie.runs.metrics import Episodes, RunWriter, read_metrics
from coterie.types import ConfigError, CoterieError

QUIET = Config(log=Log(tensorboard=False))


def strict(text: str) -> Any:
    """JSON as other programs read it: without NaN and Infinity."""

    def no(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=no)


def write(folder: Path, steps: range, resume: int | None = None, tensorboard: bool = False, **more: Any) -> None:
    writer = RunWriter(folder, replace(QUIET, log=Log(tensorboard=tensorboard)), resume)
    for step in steps:
        writer.write({"env_steps": step, "seconds": step / 10, **more})
    writer.close()


def test_lines_are_standard_json_and_there_at_once(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path, QUIET)
    given = {"nan": math.nan, "inf": -math.inf, "tensor": torch.tensor(0.25), "list": [1.0, math.nan]}
    given |= {"half": torch.tensor(math.nan, dtype=torch.bfloat16), "numpy": np.float32(2.0)}
    writer.write({"env_steps": np.int64(8), "seconds": 0.5, **given})
    found = strict((tmp_path / "metrics.jsonl").read_text())  # before it is closed
    expected = {"nan": None, "inf": None, "tensor": 0.25, "list": [1.0, None], "half": None, "numpy": 2.0}
    assert found == {"env_steps": 8, "seconds": 0.5, **expected}
    writer.close()


def test_resume_drops_the_lines_after_the_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, range(0, 100, 10), a=1)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"env_steps": 100, "sec')  # the crash
    write(tmp_path, range(60, 80, 10), resume=55, a=2)
    lines = read_metrics(tmp_path)
    assert [(x["env_steps"], x["a"]) for x in lines] == [*((s, 1) for s in range(0, 60, 10)), (60, 2), (70, 2)]
    write(tmp_path, range(80, 90, 10), resume=70, a=3)
    assert [x["env_steps"] for x in read_metrics(tmp_path)] == list(range(0, 90, 10)), "the checkpoint's own line stays"
    assert not list(tmp_path.glob(".*"))


def test_tensorboard_has_the_same_curve(tmp_path: Path) -> None:
    write(tmp_path, range(0, 50, 10), tensorboard=True, loss=1.0, bad=math.nan, what="text")
    write(tmp_path, range(30, 50, 10), resume=20, tensorboard=True, loss=2.0)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(0, 1), (10, 1), (20, 1), (30, 2), (40, 2)]
    assert [e.value for e in events.Scalars("seconds")] == pytest.approx([0, 1, 2, 3, 4])
    assert set(events.Tags()["scalars"]) == {"loss", "seconds"}


def test_tensorboard_has_the_config_and_the_hyperparameters(tmp_path: Path) -> None:
    config = presets.ppo(env="CartPole-v1", learners=2, optim={"lr": 1e-3})
    for resume in (None, 5):
        writer = RunWriter(tmp_path, config, resume)
        writer.write({"env_steps": 1, "seconds": 1.0})
        writer.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    (text,) = events.Tensors("config/text_summary")
    assert from_dict(json.loads(text.tensor_proto.string_val[0])) == config
    content = HParamsPluginData.FromString(events.PluginTagToContent("hparams")["_hparams_/session_start_info"])
    found = content.session_start_info.hparams
    assert found["optim.lr"].number_value == 1e-3
    assert (found["algorithm"].string_value, found["learners"].number_value) == ("ppo", 2)
    assert found["model.hidden"].string_value == "[64, 64]"
    assert not {"q.atoms", "log.every", "out"} & set(found)


def test_reading_metrics_forgives_only_a_torn_last_line(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == []
    path = tmp_path / "metrics.jsonl"
    rows = [b'{"env_steps": 1}', b'{"env_steps": 2}']
    for torn in (b'{"env_st', b"{", b'{"other": 1}', b"\0\0\0", b"12", b'{"a": "\xc3'):
        path.write_bytes(b"\n".join([*rows, torn]))
        assert [line["env_steps"] for line in read_metrics(tmp_path)] == [1, 2], torn
        path.write_bytes(b"\n".join([rows[0], torn, rows[1]]))
        with pytest.raises(CoterieError, match=r"metrics\.jsonl: line 2 is damaged"):
            read_metrics(tmp_path)
    path.write_bytes(b"\n".join(rows))
    assert len(read_metrics(tmp_path)) == 2, "whole but for its line end"


def test_summary_replaces_the_one_before_in_one_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = RunWriter(tmp_path, QUIET)
    given = {"status": "failed", "reason": "[\n 1 ]", "rows": {"learned": np.int64(3)}, "lag": [0.5, 1.0], "none": []}
    writer.summary({**given, "mean_return": math.nan})
    text = (tmp_path / "summary.json").read_text()
    assert strict(text) == {**given, "mean_return": None}
    assert ' "lag": [ 0.5, 1.0 ],' in text.splitlines()
    with monkeypatch.context() as patch:

        def full(handle: int) -> None:
            raise OSError(28, os.strerror(28))

        patch.setattr(os, "fsync", full)
        with pytest.raises(CoterieError, match=f"cannot write to {tmp_path}: No space left on device"):
            writer.summary({"status": "finished"})
    assert (tmp_path / "summary.json").read_text() == text
    assert not list(tmp_path.glob(".*"))
    writer.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    for name in ("metrics.jsonl", "log.txt"):
        (tmp_path / name).symlink_to("/dev/full")
    said = list[str]()
    writer = RunWriter(tmp_path, QUIET, say=said.append)
    for _ in range(2):
        writer.write({"env_steps": 1, "seconds": 1})
        writer.log("x")
    why = f"cannot write to {tmp_path}: No space left on device"
    assert said == [f"{why}; training goes on, and it is tried again"]
    with pytest.raises(CoterieError, match=f"^{why}$"):
        writer.close()
    with pytest.raises(CoterieError, match="gone: No such file or directory"):
        RunWriter(tmp_path / "gone", QUIET)


def test_the_log_is_kept_over_a_resume_with_times(tmp_path: Path) -> None:
    for resume, text in ((None, "began"), (5, "resumed")):
        writer = RunWriter(tmp_path, QUIET, resume)
        writer.log(text)
        writer.close()
    first, second = (tmp_path / "log.txt").read_text().splitlines()
    assert first.endswith(" began")
    assert second.endswith(" resumed")
    assert first[:4].isdigit()
    assert first[:19] <= second[:19]


class FakeWandb(types.ModuleType):
    """Takes what the real one is given."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__("wandb")
        self.error, self.begun, self.axes, self.logged, self.finished = error, [], [], [], 0  # type: ignore[var-annotated]

    def init(self, **options: Any) -> FakeWandb:
        if self.error is not None:
            raise self.error
        self.begun.append(options)
        return self

    def define_metric(self, name: str, step_metric: str) -> None:
        self.axes.append((name, step_metric))

    def log(self, line: dict[str, Any]) -> None:
        self.logged.append(line)

    def finish(self) -> None:
        self.finished += 1


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


def test_episodes_are_the_last_100_and_survive_json() -> None:
    episodes = Episodes()
    assert math.isnan(episodes.mean_return)
    assert math.isnan(episodes.mean_length)
    episodes.extend((float(i), i) for i in range(250))
    assert (episodes.count, episodes.mean_return, episodes.mean_length) == (250, 199.5, 199.5)
    again = Episodes()
    again.extend([(1.0, 1)])
    again.load_state_dict(json.loads(json.dumps(episodes.state_dict())))
    for one in (episodes, again):
        one.extend([(1000.0, 300)])
    assert (
        (again.count, again.mean_return) == (episodes.count, episodes.mean_return) == (251, (199.5 * 100 + 850) / 100)
    )


def test_required_packages_are_listed_by_extra_and_an_extra_of_a_required_package_counts() -> None:
    packages = required()
    assert packages[""][:2] == ["torch", "numpy"]
    assert packages["ray"] == ["ray"]
    assert {"imageio-ffmpeg"} <= set(packages["video"])
    assert "mujoco" in packages["gym"]  # which shows whether gymnasium's extra is installed
    assert "gymnasium" not in packages["gym"]
    assert version("torch")
    assert version("no-such-package") is None
