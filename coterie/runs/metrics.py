"""The files of a run: metrics.jsonl, TensorBoard events, log.txt, processes.json, summary.json; and recent episodes."""

from __future__ import annotations

import hashlib
import json
import math
import re
import textwrap
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.config import Config
from coterie.extras import needs
from coterie.parallel.processes import location
from coterie.runs.config_io import fields, get, to_dict
from coterie.runs.files import Journal, answered, write_whole, writing
from coterie.runs.trust import SIGNATURE
from coterie.types import CoterieError, reason_of

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

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
    """Writes a run's files. `resume_env_steps`: of the checkpoint that the run resumes from. Drops the lines of
    metrics.jsonl after it, so that env steps only ever increase. `say` shows the user a line.
    """

    def __init__(
        self, folder: Path, config: Config, resume_env_steps: int | None = None, say: Callable[[str], None] = print
    ) -> None:
        self.folder, self._config, self._resumed_at = folder, config, resume_env_steps
        self.say = say
        self._reasons = set[str]()  # why lines could not be written
        self._open = ExitStack()  # closes the others if closing one fails
        self._wandb = _wandb(folder, config) if config.log.wandb else None
        if self._wandb is not None:
            self._open.callback(self._wandb.finish)
        with writing(folder):
            if resume_env_steps is not None:
                kept = [line for line in read_metrics(folder) if line["env_steps"] <= resume_env_steps]
                write_whole(folder / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in kept))
            self._file = self._open.enter_context(closing(Journal(folder / "metrics.jsonl")))
            self._log = self._open.enter_context(closing(Journal(folder / "log.txt")))

    @cached_property
    def _events(self) -> SummaryWriter | None:
        """TensorBoard's file, opened with the first line: start-up does not wait for the import, 0.35 s."""
        if not self._config.log.tensorboard:
            return None
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard ignores what older event files have from the purge step on.
        purge = None if self._resumed_at is None else self._resumed_at + 1
        events = SummaryWriter(str(self.folder), purge_step=purge, flush_secs=10)
        self._open.callback(answered, events.close)
        if purge is None:
            _describe(self._config, events)
        return events

    def write(self, line: dict[str, Any]) -> None:
        """Write a line of metrics; it needs `env_steps` and `seconds`. The line of an evaluation is written after its
        checkpoint, so lines before it may have more env steps.
        """
        if not {"env_steps", "seconds"} <= line.keys():
            raise ValueError(f"a line of metrics needs env_steps and seconds, and has {sorted(line)}")
        plain = clean(line)
        with self._trying():
            self._file.write(json.dumps(plain, allow_nan=False) + "\n")
        with self._trying():
            answered(partial(self._plot, plain))
        if self._wandb is not None:
            self._wandb.log(plain)

    def _plot(self, line: dict[str, Any]) -> None:
        """TensorBoard's queue is full while its disk does not answer."""
        if self._events is not None:
            for name, value in line.items():
                if isinstance(value, int | float) and name != "env_steps":
                    self._events.add_scalar(name, value, line["env_steps"])

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
        with writing(self.folder):
            self._open.close()

    @contextmanager
    def _trying(self) -> Iterator[None]:
        """A line that cannot be written does not end the run; it is said once for each reason."""
        try:
            yield
        except OSError as error:
            if (reason := reason_of(error)) not in self._reasons:
                self._reasons.add(reason)
                self.say(f"cannot write to {self.folder}: {reason}; training goes on, and it is tried again")


def hyperparameters(config: Config) -> dict[str, int | float | str | bool]:
    """By dotted name: the run's own fields, and those of the sections that this run changes, lists as text."""
    default, names = Config(log=config.log, out=config.out), [name for name, _ in fields()]
    sections = {name.partition(".")[0] for name in names if get(config, name) != get(default, name)}
    found = {name: get(config, name) for name in names if "." not in name or name.partition(".")[0] in sections}
    del found["out"]
    return {k: v if isinstance(v, int | float | str) else str(list(v)) for k, v in found.items()}


def _describe(config: Config, events: SummaryWriter) -> None:
    """Give TensorBoard the config as text, and the hyperparameters of a run for its table of runs."""
    from torch.utils.tensorboard.summary import hparams

    # Indented by four columns more, it is code in Markdown.
    events.add_text("config", textwrap.indent(json.dumps(to_dict(config), indent=1), "    "))
    # `SummaryWriter.add_hparams` would write a second folder, which is shown as another run.
    for part in hparams(hyperparameters(config), {"mean_return": 0, "eval/return": 0}):
        events.file_writer.add_summary(part)


def _wandb(folder: Path, config: Config) -> Any:
    """The run's page. W&B's own variables, such as `WANDB_MODE=offline`, apply."""
    with needs("log.wandb", "wandb"):
        import wandb
    # The id depends on the folder only, so that a resumed run continues its page.
    key = f"{folder.name}-{hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:8]}"
    log = config.log
    try:
        page = wandb.init(
            project=log.wandb,
            group=log.wandb_group or None,
            tags=log.wandb_tags or None,
            config=to_dict(config),
            allow_val_change=True,  # a resumed run may have another total of env steps
            dir=str(folder),
            name=folder.name,
            id=key,
            resume="allow",
        )
        # Its own step count cannot go back, as the line of an evaluation and a resumed run do.
        page.define_metric("*", step_metric="env_steps")
        return page
    except Exception as error:  # no key, no network: wandb raises a dozen classes
        raise CoterieError(f"log.wandb: {reason_of(error)}") from None


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
