"""The files of a run: metrics.jsonl, TensorBoard events, log.txt, processes.json, summary.json; and recent episodes."""

from __future__ import annotations

import json
import math
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.config import Config
from coterie.errors import CoterieError, reason_of
from coterie.parallel.processes import location
from coterie.runs.files import Journal, answered, write_whole, writing
from coterie.runs.trust import SIGNATURE
from coterie.runs.wandb_run import WandbRun

if TYPE_CHECKING:
    from coterie.runs.events import Events

# The files of a run's folder, besides checkpoints/ and TensorBoard's events.
RUN_FILES = (
    "config.json", SIGNATURE, "spec.json", "machine.json", "metrics.jsonl", "log.txt", "processes.json", "summary.json",
)  # fmt: skip


def file_name(text: str) -> str:
    """`text` with all characters replaced that a file system or a shell may not accept."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text).strip("-")


def clean(value: Any) -> Any:
    """Plain JSON: null for NaN and infinities, Python's numbers for numpy's and torch's."""
    if isinstance(value, dict):
        return {k: clean(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [clean(v) for v in value]
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Episodes:
    """Returns and lengths of the last 100 complete episodes, and the number of all."""

    def __init__(self) -> None:
        self.window: deque[tuple[float, int]] = deque(maxlen=100)
        self.count = 0

    def extend(self, episodes: Iterable[tuple[float, int]]) -> None:
        new = [(float(score), int(length)) for score, length in episodes]
        self.window.extend(new)
        self.count += len(new)

    @property
    def mean_return(self) -> float:
        return sum(r for r, _ in self.window) / len(self.window) if self.window else math.nan

    @property
    def mean_length(self) -> float:
        return sum(n for _, n in self.window) / len(self.window) if self.window else math.nan

    def state_dict(self) -> dict[str, Any]:
        return {"window": [list(episode) for episode in self.window], "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.window.clear()
        self.extend(state["window"])
        self.count = int(state["count"])


class RunWriter:
    """Writes a run's files. `resume_env_steps`: of the checkpoint that the run resumes from, as for `roll_back`. `say`
    shows the user a line.
    """

    def __init__(
        self, folder: Path, config: Config, resume_env_steps: int | None = None, say: Callable[[str], None] = print
    ) -> None:
        self.folder, self._config, self.say = folder, config, say
        self._reasons = set[str]()  # why lines could not be written
        self._back = self._purge = resume_env_steps  # what metrics.jsonl and TensorBoard are still to go back to
        self._held = ""  # lines for metrics.jsonl, meanwhile
        self._events: Events | None = None
        with writing(folder):
            self._file, self._log = (Journal(folder / name) for name in ("metrics.jsonl", "log.txt"))
            self._add()
        self._open = ExitStack()  # closes each, if another one fails
        for close in (self._log.close, lambda: self._file.close(), self._add):  # the last one first
            self._open.callback(close)
        self._wandb = WandbRun(folder, config) if config.log.wandb else None  # last: its end is waited for

    def roll_back(self, env_steps: int) -> None:
        """Drop the lines of metrics.jsonl after a checkpoint, so that env steps only ever increase: now, or as soon as
        the disk has room.
        """
        self._held = "".join(x for x in self._held.splitlines(True) if json.loads(x)["env_steps"] <= env_steps)
        self._back, self._purge = env_steps if self._back is None else min(self._back, env_steps), env_steps
        with self._trying():
            self._add()

    def _add(self, lines: str = "") -> None:
        self._held += lines
        if self._back is not None:
            self._file.write("")  # what the disk has refused before
            old, self._file = self._file, answered(partial(_cut, self.folder, self._back))
            self._back = None
            old.close()
        self._held, lines = "", self._held
        self._file.write(lines)

    def write(self, line: dict[str, Any]) -> None:
        """Write a line of metrics; it needs `env_steps` and `seconds`. The line of an evaluation is written after its
        checkpoint, so lines before it may have more env steps.
        """
        if not {"env_steps", "seconds"} <= line.keys():
            raise ValueError(f"a line of metrics needs env_steps and seconds, and has {sorted(line)}")
        plain = clean(line)
        with self._trying():
            self._add(json.dumps(plain, allow_nan=False) + "\n")
        if self._config.log.tensorboard:
            with self._trying():
                self._plot(plain)
        if self._wandb is not None:
            self._wandb.log(plain)
            self._say_trouble(self._wandb)

    def _plot(self, line: dict[str, Any]) -> None:
        from coterie.runs.events import Events, description, purge, scalars  # 0.35 s, for which start-up does not wait

        first = []
        if self._events is None:
            self._events = answered(partial(Events, self.folder))
            self._open.callback(self._events.close)
            first = description(self._config) if self._purge is None else []
        if self._purge is not None:
            first, self._purge = [purge(self._purge)], None
        self._events.add(*first, scalars(line))

    def _say_trouble(self, run: WandbRun) -> None:
        if line := run.trouble():
            self.log(line)
            self.say(line)

    def log(self, text: str) -> None:
        with self._trying():
            self._log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

    def processes(self, rows: list[dict[str, Any]], restarts: int) -> None:
        """Replace processes.json: the health of the run's processes."""
        content = {"unix": round(time.time(), 3), "where": location(), "restarts": restarts, "processes": rows}
        with self._trying():
            text = json.dumps(clean(content)) + "\n"
            answered(partial(write_whole, self.folder / "processes.json", text, durable=False))

    def summary(self, data: dict[str, Any]) -> None:
        """Replace summary.json atomically."""
        with writing(self.folder):
            text = json.dumps(clean(data), indent=1, allow_nan=False) + "\n"
            # Lists of numbers on one line. A line break inside of a JSON text is always escaped.
            text = re.sub(r"\[\n[-+.\deE,\s]*\]", lambda found: " ".join(found[0].split()), text)
            answered(partial(write_whole, self.folder / "summary.json", text))

    def close(self) -> None:
        if self._wandb is not None:
            self._wandb.finish()
            self._say_trouble(self._wandb)
        with writing(self.folder):
            self._open.close()

    @contextmanager
    def _trying(self) -> Iterator[None]:
        """A line that cannot be written does not end the run; it is said once for each reason."""
        try:
            yield
        except (OSError, CoterieError) as error:
            if (reason := reason_of(error)) not in self._reasons:
                self._reasons.add(reason)
                self.say(f"cannot write to {self.folder}: {reason}; training goes on, and it is tried again")


def _cut(folder: Path, env_steps: int) -> Journal:
    """metrics.jsonl without the lines after these env steps."""
    kept = [line for line in read_metrics(folder) if line["env_steps"] <= env_steps]
    write_whole(folder / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in kept))
    return Journal(folder / "metrics.jsonl")


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, without a last line that a crash cut short. Other damage is an error."""
    try:
        rows = (folder / "metrics.jsonl").read_bytes().splitlines()
    except FileNotFoundError:
        return []
    lines = []
    for number, row in enumerate(rows, 1):
        try:
            line = json.loads(row)
            line["env_steps"]
        except (ValueError, KeyError, TypeError):
            if number < len(rows):
                raise CoterieError(f"{folder / 'metrics.jsonl'}: line {number} is damaged; remove it") from None
        else:
            lines.append(line)
    return lines
