"""What a run writes: metrics that never double back, standard JSON, reasons for a full disk."""

from __future__ import annotations

import json
import math
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from coterie import presets
from coterie.config import Config, Log
from coterie.errors import CoterieError
from coterie.learner import Progress
from coterie.runs.config_io import from_dict
from coterie.runs.machine import required, version
from coterie.runs.metrics import Episodes, RunWriter, read_metrics

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


@contextmanager
def full_disk() -> Iterator[None]:
    """No file of this process can grow."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_nothing_is_lost_that_a_full_disk_refuses(tmp_path: Path) -> None:
    said = list[str]()
    writer = RunWriter(tmp_path, Config(), say=said.append)
    for step in range(9):
        with full_disk() if step in (0, 1, 4, 5) else nullcontext():
            writer.write({"env_steps": step, "seconds": step})
    writer.close()
    assert said == [f"cannot write to {tmp_path}: File too large; training goes on, and it is tried again"]
    assert [line["env_steps"] for line in read_metrics(tmp_path)] == list(range(9))
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [e.value for e in events.Scalars("seconds")] == list(range(9))
    assert events.Tensors("config/text_summary")


def test_a_group_that_goes_back_on_a_full_disk_drops_the_lines_when_there_is_room(tmp_path: Path) -> None:
    said = list[str]()
    writer = RunWriter(tmp_path, Config(), say=said.append)

    def write(*steps: int) -> None:
        for step in steps:
            writer.write({"env_steps": step, "seconds": step})

    write(0, 1, 2)
    with full_disk():
        write(3)
        for _ in range(2):
            writer.roll_back(1)
            write(2)
        writer.log("goes on")
    assert len(said) == 1
    write(3)
    assert [line["env_steps"] for line in read_metrics(tmp_path)] == [0, 1, 2, 3]
    writer.roll_back(2)
    assert [line["env_steps"] for line in read_metrics(tmp_path)] == [0, 1, 2], "at once"
    write(4)
    writer.close()
    assert [line["env_steps"] for line in read_metrics(tmp_path)] == [0, 1, 2, 4]
    assert (tmp_path / "log.txt").read_text().count("\n") == 1
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [e.step for e in events.Scalars("seconds")] == [0, 1, 2, 4]


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
    assert packages["ray"] == ["ray", "cryptography"]
    assert {"imageio-ffmpeg"} <= set(packages["video"])
    assert "mujoco" in packages["gym"]  # which shows whether gymnasium's extra is installed
    assert "gymnasium" not in packages["gym"]
    assert version("torch")
    assert version("no-such-package") is None


def test_a_batch_that_was_skipped_and_a_value_that_is_no_number_are_not_in_the_means() -> None:
    progress = Progress()
    for loss, norm, own in ((1.0, 1.0, 5.0), (3.0, 1.0, math.nan), (9.0, math.nan, 1.0)):
        progress.count(cast(Any, SimpleNamespace(count=4, metrics={"loss": loss, "grad_norm": norm, "own": own})))
    assert (progress.learner_steps, progress.batches) == (3, 2)
    assert progress.metrics == {"loss": 4.0, "grad_norm": 2.0, "own": 5.0}
