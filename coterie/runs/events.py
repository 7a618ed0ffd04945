"""TensorBoard's copy of metrics.jsonl. Its packages load slowly: only the first line imports this module."""

from __future__ import annotations

import json
import os
import socket
import textwrap
import time
from io import BytesIO
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from coterie.config import Config
from coterie.runs.config_io import fields, get, to_dict
from coterie.runs.files import Journal, answered


class Events(Journal):
    """A file of events. TensorBoard's own writer drops all events after the first that a full disk refuses."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}")
        self._new = [Event(file_version="brain.Event:2")]

    def add(self, *events: Event) -> None:
        """Raises `OSError` where they are not written yet."""
        for event in (*self._new, *events):
            event.wall_time = time.time()
            record = BytesIO()
            RecordWriter(record).write(event.SerializeToString())
            self._left += record.getvalue()
        self._new.clear()
        answered(self._flush)


def scalars(line: dict[str, Any]) -> Event:
    """The numbers of a line of metrics."""
    numbers = {name: value for name, value in line.items() if isinstance(value, int | float) and name != "env_steps"}
    values = [Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
    return Event(step=line["env_steps"], summary=Summary(value=values))


def purge(env_steps: int) -> Event:
    """TensorBoard ignores what older events have after these env steps."""
    return Event(step=env_steps + 1, session_log=SessionLog(status=SessionLog.START))


def description(config: Config) -> list[Event]:
    """The config as text, and the hyperparameters for TensorBoard's table of runs."""
    from torch.utils.tensorboard.summary import hparams, text

    # Indented by four columns more, it is code in Markdown.
    shown = text("config", textwrap.indent(json.dumps(to_dict(config), indent=1), "    "))
    # `SummaryWriter.add_hparams` would write a second folder, which is shown as another run.
    return [Event(summary=x) for x in (shown, *hparams(hyperparameters(config), {"mean_return": 0, "eval/return": 0}))]


def hyperparameters(config: Config) -> dict[str, int | float | str | bool]:
    """By dotted name: the run's own fields, and those of the sections that this run changes, lists as text."""
    default, names = Config(log=config.log, out=config.out), [name for name, _ in fields()]
    sections = {name.partition(".")[0] for name in names if get(config, name) != get(default, name)}
    found = {name: get(config, name) for name in names if "." not in name or name.partition(".")[0] in sections}
    del found["out"]
    return {k: v if isinstance(v, int | float | str) else str(list(v)) for k, v in found.items()}
