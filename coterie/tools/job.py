"""One command of a sweep or figure, as a process that can be continued."""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from coterie.errors import EXIT_INTERRUPTED, ConfigError, CoterieError
from coterie.parallel.signals import WARNING, stop_with_parent
from coterie.runs import checkpoint
from coterie.runs.files import read_json
from coterie.runs.metrics import RUN_FILES

_FILES = (".json", ".toml", ".yaml", ".yml")  # that a config may be in


@dataclass(frozen=True)
class Job:
    """`coterie VERB ARGS`: a run to train in `folder`, or a command whose `--json` report goes to `folder`.json."""

    name: str
    args: tuple[str, ...]
    folder: Path
    verb: str = "train"

    def beside(self, suffix: str) -> Path:
        """A file beside the folder: `.args.json` has the options that it began with, `.txt` what it printed."""
        return self.folder.with_name(f"{self.folder.name}{suffix}")

    def done(self) -> bool:
        """Whether it began with these options and finished. Raises `ConfigError` if its folder holds something else."""
        return self._begun() and (complete(self.folder) if self.verb == "train" else self.report() is not None)

    def report(self) -> dict[str, Any] | None:
        """The JSON report, None if there is none yet."""
        return read_json(self.beside(".json"), dict)

    def outcome(self, code: int = 0) -> str:
        """How it ended, in one line. After a failure: the last line of its output."""
        if self.verb != "train" and self.report() is not None:
            return f"{self.verb} done"
        if code in (0, EXIT_INTERRUPTED) and (summary := read_json(self.folder / "summary.json", dict)) is not None:
            mean = summary["mean_return"]
            shown = "-" if mean is None else f"{mean:.1f}"
            return f"{summary['status']}, mean return {shown}, {summary['env_steps']:,} env steps"
        lines = self.beside(".txt").read_text(errors="replace").splitlines()
        return lines[-1] if lines else "no output"

    def start(self, cores: list[int]) -> subprocess.Popen[bytes]:
        """Begin it, or resume it from its last checkpoint. Raises `ConfigError` if another process runs it."""
        begun, train = self._begun(), self.verb == "train"
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)}
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as opened:
            note = opened.enter_context(self.beside(".args.json").open("a+"))
            try:
                fcntl.flock(note, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the child inherits it: it is held until that ends
            except BlockingIOError:
                raise ConfigError(f"--out: {self.folder} is being trained by another process") from None
            except OSError:
                pass  # a file system without locks: the run itself says so
            resumed = train and begun and checkpoint.latest(self.folder / "checkpoints") is not None
            if begun and not resumed:
                self._clear()
            if not begun:  # or a full disk would leave an empty note of a run that can be continued
                note.truncate(0)
                note.write(json.dumps(self._asked()))
                note.flush()
            log = opened.enter_context(self.beside(".txt").open("ab" if resumed else "wb"))
            out = log if train else opened.enter_context(self.beside(".json").open("wb"))
            process = subprocess.Popen(
                self._command(resumed), stdin=subprocess.DEVNULL, stdout=out, stderr=log,
                env=env, pass_fds=[note.fileno()],
                process_group=0,  # Ctrl-C reaches this process only, which passes it on
                preexec_fn=_prepare,
            )  # fmt: skip
        if hasattr(os, "sched_setaffinity"):
            with suppress(OSError):
                os.sched_setaffinity(process.pid, cores)  # before it has started a thread
        return process

    def _command(self, resumed: bool) -> list[str]:
        python, folder = [sys.executable, "-P", "-m", "coterie"], str(self.folder)
        if resumed:
            return [*python, "resume", folder, *["--trust"] * ("--trust" in self.args)]
        return [*python, self.verb, *self.args, *(["--out", folder] if self.verb == "train" else ["--json"])]

    def _begun(self) -> bool:
        begun = (self.folder / "config.json").exists()
        if self.verb == "train" and not begun:
            return False  # it was refused at its start, or is removed
        before = read_json(self.beside(".args.json"), list)
        if before is None:
            if begun:
                raise ConfigError(f"--out: {self.folder} holds a run that this command did not begin; name another")
            return False
        before = without_out(before)  # earlier versions saved it
        words = [word for word in before if isinstance(word, str)]
        if before != (list(self.args) if words == before else self._asked()):  # earlier versions saved the words alone
            other = "other options" if words != list(self.args) else "a different config file"
            said = f"{self.folder} was begun with {other} ({' '.join(words)})"
            raise ConfigError(f"--out: {said}; name another, or remove it")
        return True

    def _asked(self) -> list[Any]:
        """Its options, and what the config files among them hold."""
        files = [Path(word.removeprefix("--config=")) for word in self.args if word.endswith(_FILES)]
        return [*self.args, *({"sha256": sha256(file.read_bytes()).hexdigest()} for file in files if file.is_file())]

    def _clear(self) -> None:
        """Remove the files of a run that ended before its first checkpoint, and nothing else."""
        shutil.rmtree(self.folder / "checkpoints", ignore_errors=True)
        for name in (*RUN_FILES, "events.out.*"):
            for path in self.folder.glob(name):
                path.unlink(missing_ok=True)


def without_out(words: Sequence[Any]) -> list[Any]:
    """Options without `--out`, which names the folder of a whole sweep."""
    pairs = zip(["", *words], words, strict=False)
    return [word for last, word in pairs if last != "--out" and str(word).partition("=")[0] != "--out"]


def _prepare() -> None:
    """Between fork and exec of a run."""
    stop_with_parent()
    signal.signal(WARNING, signal.SIG_IGN)  # until it handles that, with log.checkpoint_on_warning


def complete(folder: Path) -> bool:
    """Whether a run has all its env steps, or its summary says that it has finished."""
    if (read_json(folder / "summary.json", dict) or {}).get("status") == "finished":
        return True
    steps = (read_json(folder / "config.json", dict) or {}).get("steps", math.inf)
    with suppress(CoterieError, KeyError, TypeError):  # killed between its last checkpoint and its summary
        return bool(checkpoint.env_steps(folder / "checkpoints") >= steps)
    return False
